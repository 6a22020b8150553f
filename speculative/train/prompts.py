"""Conversations to generate from, each a function of a seed and its number.  Encodes no text.

    chat    a question of our own templates and seed words, sometimes after earlier turns
    tool    1-4 turns of an agent; the user's last request wants a call
    result  the same, and the last call's result is there: the model speaks about it

Nothing is copied from anywhere.  What is held out follows from hashes of the texts themselves: a
tool's schema or a user's sentence is on one side in every conversation, so no held-out schema and
no held-out sentence is ever trained on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import xxhash

from speculative.train import tools as made
from speculative.train.words import (
    AUDIENCES,
    FORMS,
    LANGUAGES,
    NAMES,
    QUALITIES,
    TASKS,
    TONES,
    TOPICS,
)

DOMAINS = ("chat", "tool", "result")
SHARES = (0.40, 0.45, 0.15)
TEMPERATURES = (0.0, 0.7, 1.0)  # in thirds
MOST_TOKENS = {"chat": 320, "tool": 192, "result": 128}
HELD = 50  # one of so many texts is held out
LIBRARY = 6000  # tools
LOCAL = 1024  # conversations that draw from the same few tool sets: they share prompts and grammars
LOCAL_SETS = 48
CONSTRAINED = ("required", "auto")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked once, and how."""

    number: int
    domain: str
    temperature: float
    held_out: bool
    messages: tuple[Message, ...]  # of OpenAI's chat endpoint
    tools: tuple[dict[str, Any], ...] = ()
    choice: str = ""  # what the grammar asks for ("required", "auto"); empty = no grammar
    seed: int = 0  # of the sampling, 63 bit

    @property
    def max_tokens(self) -> int:
        """Of the answer."""
        return MOST_TOKENS[self.domain]


def held_out(text: str) -> bool:
    """Which side a sentence or a schema is on."""
    return xxhash.xxh3_64_intdigest(text.encode()) % HELD == 0


def kind(number: int, seed: int) -> tuple[bool, str]:
    """Whether conversation `number` of a run is held out, and its domain; 10 us, not 170."""
    return _kind(Random(f"conversation {seed} {number}"))


def _kind(draw: Random) -> tuple[bool, str]:
    return draw.randrange(HELD) == 0, draw.choices(DOMAINS, SHARES)[0]


def conversation(number: int, seed: int) -> Conversation:
    """Conversation `number` of a run."""
    draw = Random(f"conversation {seed} {number}")
    held, domain = _kind(draw)
    temperature = TEMPERATURES[number % 3]
    own = (seed & 0x7FFFFFFF) << 32 | number
    if domain == "chat":
        return Conversation(
            number, domain, temperature, held, tuple(_chat(held, draw)), seed=own
        )
    kit = _kit(number // LOCAL, seed, held, draw)
    messages = _agent(kit, held, domain == "result", draw)
    choice = ""
    if domain == "tool" and draw.random() < 0.5:
        choice = draw.choices(CONSTRAINED, (2, 1))[0]
    wire = tuple(tool.wire for tool in kit)
    return Conversation(number, domain, temperature, held, tuple(messages), wire, choice, own)


# -- tools


@lru_cache(maxsize=4)
def library(seed: int, held: bool) -> tuple[made.Tool, ...]:
    """All tools of one side, by their schemas."""
    every = (made.tool(number, seed) for number in range(LIBRARY))
    return tuple(tool for tool in every if held_out(tool.schema) is held)


def _kit(local: int, seed: int, held: bool, draw: Random) -> list[made.Tool]:
    """The tools of one conversation: one of the few sets of its neighbourhood."""
    sets = Random(f"kit {seed} {held} {local} {draw.randrange(LOCAL_SETS)}")
    count = sets.choices((1, 2, 3, 4, 5), (4, 5, 4, 2, 1))[0]
    unique = {tool.name: tool for tool in sets.sample(library(seed, held), count)}
    return list(unique.values())


def _agent(kit: list[made.Tool], held: bool, answered: bool, draw: Random) -> list[Message]:
    messages: list[Message] = []
    if draw.random() < 0.3:
        messages.append(_message("system", draw.choice((
            "You are an agent that gets things done with tools.",
            "Use a tool whenever one fits. Be brief.",
            f"You help {draw.choice(NAMES)} with daily work.",
        ))))
    turns = draw.choices((1, 2, 3, 4), (5, 3, 2, 1))[0]
    for turn in range(turns):
        last = turn == turns - 1
        tool = draw.choice(kit)
        given, text = _asked(tool, held, draw)
        messages.append(_message("user", text))
        if last and not answered:
            break
        messages += _called(tool, given, turn, draw)
        if not last:
            messages.append(_message("assistant", _told(tool, given, draw)))
    return messages


def _asked(tool: made.Tool, held: bool, draw: Random) -> tuple[dict[str, Any], str]:
    """Arguments, and a request for them that is on the right side."""
    tail = ""
    while True:
        given = made.arguments(tool, draw)
        text = made.request(tool, given, draw) + tail
        if held_out(text) is held:
            return given, text
        # Of a tool with one flag there are so few requests that all may be on the other side.
        tail = f" My reference is {draw.randrange(10**6)}." if held else ""


def _called(tool: made.Tool, given: dict[str, Any], turn: int, draw: Random) -> list[Message]:
    call = {
        "id": f"call_{turn}_{draw.randrange(10**6)}", "type": "function",
        "function": {"name": tool.name, "arguments": json.dumps(given)},
    }  # fmt: skip
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": made.result(tool, given, draw)},
    ]


def _told(tool: made.Tool, given: dict[str, Any], draw: Random) -> str:
    thing = f"{tool.thing} {next(iter(given.values()))}"
    said = ("Done: {}.", "I took care of the {}.", "Here is the {}.", "The {} is ready.")
    return draw.choice(said).format(thing)


# -- chat


def _chat(held: bool, draw: Random) -> list[Message]:
    messages: list[Message] = []
    if draw.random() < 0.3:
        messages.append(_message("system", draw.choice((
            "You are a helpful assistant.", f"You are a {draw.choice(TONES)} assistant.",
            "Answer briefly.", f"You explain things to {draw.choice(AUDIENCES)}.",
        ))))
    for _ in range(draw.choices((0, 1, 2), (17, 2, 1))[0]):
        messages.append(_message("user", _question(held, draw)))
        messages.append(_message("assistant", _reply(draw)))
    messages.append(_message("user", _question(held, draw)))
    return messages


def _question(held: bool, draw: Random) -> str:
    while True:
        text = draw.choice(_QUESTIONS).format(
            topic=draw.choice(TOPICS), other=draw.choice(TOPICS), audience=draw.choice(AUDIENCES),
            form=draw.choice(FORMS), tone=draw.choice(TONES), quality=draw.choice(QUALITIES),
            task=draw.choice(TASKS), language=draw.choice(LANGUAGES), name=draw.choice(NAMES),
            number=draw.randint(3, 10), a=draw.randint(2, 99), b=draw.randint(2, 99),
        )
        text = text[:1].upper() + text[1:]
        if held_out(text) is held:
            return text


def _reply(draw: Random) -> str:
    topic, quality = draw.choice(TOPICS), draw.choice(QUALITIES)
    return draw.choice((
        f"Gladly. People often ask about {topic}, above all about its {quality}.",
        f"In short, the {quality} of {topic} matters most.",
        f"That depends on the {quality}. Shall I compare it with {topic}?",
        f"Of course! Tell me more about what you need for {topic}.",
    ))


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


_QUESTIONS = (
    "explain {topic} to {audience}.",
    "explain {topic} and {other} to {audience}, in a {tone} tone.",
    "write a {form} about {topic}.",
    "write a {tone} {form} about {topic} for {audience}.",
    "what is the difference between {topic} and {other}?",
    "how does {topic} work?",
    "why is the {quality} of {topic} important?",
    "tell me about the {quality} of {topic}.",
    "give me {number} facts about {topic}.",
    "list {number} ideas that join {topic} with {other}.",
    "compare {topic} and {other} by their {quality}.",
    "what should {audience} know about {topic}?",
    "write a {language} function that {task}.",
    "show me {language} code that {task}, and explain it to {audience}.",
    "how would you test {language} code that {task}?",
    "what is {a} times {b}? Show your steps.",
    "{name} has {a} apples and gives {b} to a friend who likes {topic}. What happens?",
    "write an email to {name} about {topic}. Keep it {tone}.",
    "invent a character called {name} who loves {topic}, and describe a day of theirs.",
    "I want to learn about {topic}. Where should I start?",
    "can you recommend {number} questions about {topic} to ask {audience}?",
    "rewrite in a {tone} tone: We would like to talk about {topic} and its {quality}.",
    "translate into French: {name} likes {topic} and {other}.",
    "make a JSON object that describes {topic} with {number} fields.",
    "what are common mistakes with {topic}, and how can {audience} avoid them?",
    "is {topic} more useful than {other}? Give reasons.",
    "summarise the {quality} of {topic} in {number} sentences.",
    "plan {number} days for {name}, who enjoys {topic} and {other}.",
)

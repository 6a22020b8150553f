"""What a client reads is the same with drafts and without, in whatever portions tokens come.

Over the product's own engine, whose small model says what it likes, or where a request has calls to
make, what it is told to (tests/wishing.py).  Times nothing.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest

from engine.loop import Engine
from engine.messages import Out, Step, Submit
from gateway.config import GatewayConfig
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.tools import load
from speculative.eagle3 import Eagle3
from tests import errands
from tests.asking import ADD, PlayedLink, post
from tests.auditor import Auditor
from tests.cases import AGE, BOOK, MORE, NOTE, call
from tests.heads import config, head_of
from tests.proposers import Eager
from tests.schemas import FAMILIES, tool
from tests.scripted import EOS, byte_tokenizer_json
from tests.tiny import write_llama
from tests.wishing import Room, in_room

LAYOUTS = ("hermes", "kimi")  # the ids of calls are ours and random, or the model's own text
CALLS = [call("add", a=1), call("add", a=22), call("book", seat=42)]
TOOLS = [ADD, BOOK, NOTE]
NAMED = {"type": "function", "function": {"name": "write_note"}}
ANY = {"type": "json_object"}
DICE = {"temperature": 1.0, "seed": 7}

#: A request's fields, and what the model wishes to say to it; None = nothing special.
ASKED: dict[str, tuple[dict[str, Any], str | None]] = {
    "chat": ({**DICE, "max_tokens": 60}, None),
    "chat, greedy": ({"temperature": 0, "max_tokens": 60}, None),
    "penalties": ({**DICE, "frequency_penalty": 0.5, "presence_penalty": 0.4, "max_tokens": 40},
                  None),
    "two choices": ({**DICE, "n": 2, "max_tokens": 40}, None),
    "logprobs": ({**DICE, "n": 2, "logprobs": True, "top_logprobs": 3, "max_tokens": 30}, None),
    "stop strings": ({"stop": ["four", "e f"], "max_tokens": 90}, "One two three four, é € 🌊."),
    "stop strings that never end": ({"stop": ["fo u", "x"], "max_tokens": 90}, "One two four f"),
    "a stop string before tools": ({"tools": TOOLS, "stop": ["Look", "k:"], "max_tokens": 900},
                                   "CALLS"),
    "letters of several bytes": ({"max_tokens": 90}, "é € 🌊 ß <tool_cal"),
    "no call": ({"tools": TOOLS, "max_tokens": 90}, "I would rather not <tool_cal"),
    "calls": ({"tools": TOOLS, "max_tokens": 900}, "CALLS"),
    "calls, two choices, logprobs": (
        {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 900}, "CALLS"),
    "calls that must be": (
        {"tools": [ADD, BOOK], "tool_choice": "required", "max_tokens": 900}, "CALLS"),
    "calls of its own": (
        {"tools": [ADD, BOOK], "tool_choice": "required", "parallel_tool_calls": False, **DICE,
         "max_tokens": 400}, None),
    "a named call": ({"tools": TOOLS, "tool_choice": NAMED, **DICE, "max_tokens": 150}, None),
    "a schema": ({"response_format": AGE, **DICE, "max_tokens": 60}, None),
    "any object": ({"response_format": ANY, **DICE, "max_tokens": 40}, None),
}  # fmt: skip
NAMES = {  # what each layout is asked
    "hermes": list(ASKED),
    "kimi": [name for name in ASKED if "call" in name or "tools" in name],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("same") / "model", max_len=4096)


def prompts(layout: str) -> Prompts:
    return Prompts(byte_tokenizer_json(), None, max_len=4096, format=load(layout), stop_ids=[EOS])


def body(name: str, **more: object) -> dict[str, Any]:
    return {"temperature": 0, "messages": [{"role": "user", "content": f"#{name}#"}],
            **ASKED[name][0], **more}  # fmt: skip


def wanting(layout: str):
    """What the model of a layout wishes to say, by the name in the prompt's last message."""
    calls = load(layout).write(CALLS)

    def want(prompt: str, said: bytes) -> list[bytes]:
        name = prompt.rsplit("#", 2)[1] if prompt.count("#") > 1 else ""
        wish = ASKED[name][1] if name in ASKED else None
        if wish is None:
            return []
        text = "Look:\n" + calls if wish == "CALLS" else wish
        texts = [text.encode(), calls.encode()]
        return [one[len(said) :] for one in texts if one.startswith(said)]

    return want


class Heard:
    """All outs of an engine, by request."""

    def __init__(self) -> None:
        self.outs: dict[str, list[Out]] = defaultdict(list)

    def __call__(self, engine: Engine) -> None:
        step = engine.step

        def stepped():
            replies = step()
            for reply in replies:
                for out in reply.outs if isinstance(reply, Step) else ():
                    self.outs[out.id].append(out)
            return replies

        engine.step = stepped


def read(stream: bytes) -> dict[str, Any]:
    """A stream put together by field, without what is random or tells of drafts.

    And without hits: how much of an answer that a stop string ended was cached is a race.
    """
    auditor = Auditor(include_usage=True).hear(stream)
    usage = json.loads(json.dumps(auditor.usage))
    usage.pop("speculation", None)
    usage.pop("prompt_tokens_details")
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        usage["completion_tokens_details"].pop(name)
    said: dict[str, Any] = {"usage": usage}
    for index, heard in auditor.choices.items():
        for entry in heard.logprobs:  # of rows computed beside others: not to the last bit
            for part in (entry, *entry["top_logprobs"]):
                part["logprob"] = round(part["logprob"], 6)
        calls = [(shape(one["id"]), one["name"], one["arguments"]) for one in heard.calls]
        assert len({one["id"] for one in heard.calls}) == len(calls)
        said[str(index)] = (heard.content, heard.thoughts, calls, heard.finish, heard.logprobs)
    return said


def shape(id: str) -> str:
    """The id of a call if the model wrote it; ours are random."""
    return f"call_ and {len(id)}" if id.startswith("call_") else id


def told(folder, layout: str, names: list[str], *, drafts=None, head=None, heard=None,
         **more: object) -> tuple[list[dict[str, Any]], Engine]:  # fmt: skip
    """What each request is answered, asked twice in one session; and the engine."""

    async def use(room: Room):
        found = []
        for name in names * 2:
            answer = await room.client.post(
                "/v1/chat/completions", json={"model": "tiny", **body(name, **MORE, **more)},
                headers={"x-session-affinity": "s"},
            )
            assert answer.status_code == 200, (name, answer.text)
            found.append(read(answer.content))
        return found, room.engine

    return in_room(
        folder, wanting(layout), use, prompts=prompts(layout), blocks=2048, max_drafts=8,
        drafts=(lambda _: drafts) if drafts else None, head=head, prepare=heard or (lambda _: None),
    )  # fmt: skip


@pytest.fixture(scope="module", params=LAYOUTS)
def plain(request, folder):
    """A layout, and what its gateway says of an engine that drafts nothing; and the tokens."""
    heard = Heard()
    answers, _ = told(folder, request.param, NAMES[request.param], heard=heard)
    return request.param, answers, list(heard.outs.values())


def test_the_answers_are_worth_comparing(plain):
    layout, answers, _ = plain
    by_name = dict(zip(NAMES[layout], answers, strict=False))
    calls = by_name["calls"]["0"][2]
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        (name, json.loads(arguments)) for name, arguments in CALLS
    ]
    assert by_name["calls that must be"]["0"][3] == "tool_calls"
    assert len(by_name["calls, two choices, logprobs"]["1"][4]) > 50
    if layout == "hermes":
        assert by_name["stop strings"]["0"][0] == "One two thre"
        assert by_name["two choices"]["0"] != by_name["two choices"]["1"]
        assert json.loads(by_name["a schema"]["0"][0])["years"] >= 0
    else:
        assert not calls[0][0].startswith("call_")


@pytest.mark.parametrize("mode", ["auto", "suffix", "forced", "off"])
def test_events_are_those_without_drafts(folder, plain, mode):
    layout, answers, _ = plain
    found, engine = told(
        folder, layout, NAMES[layout], drafts=Eager(), speculation={"mode": mode}
    )
    assert found == answers
    accepted = engine.guessing.accepted
    assert accepted == 0 if mode == "off" else accepted > 100


@pytest.mark.parametrize("host", [False, True])
def test_events_are_those_without_drafts_where_a_head_drafts(folder, plain, host):
    layout, answers, _ = plain
    head = Eagle3(head_of(config(), max_len=4200))
    found, engine = told(
        folder, layout, NAMES[layout], head=head, drafts=Eager() if host else None,
        speculation={"mode": "auto"},
    )  # fmt: skip
    assert found == answers
    assert engine.guessing.verified["eagle3"] > 10


# ---- portions ----------------------------------------------------------------------------------


def portions(length: int, rng: random.Random) -> Iterator[list[int]]:
    """Ends of the portions of so many tokens: two of any size, equal ones, and some at random."""
    cuts = range(1, length)
    yield from ([cut, length] for cut in (cuts if length < 70 else rng.sample(cuts, 70)))
    for size in range(1, min(length, 12)):
        yield [*range(size, length, size), length]
    for _ in range(9):
        yield [*sorted(rng.sample(cuts, rng.randrange(length))), length]


def cut(outs: list[Out], ends: list[int]) -> list[Out]:
    """A choice's outs as others that carry so many tokens each."""
    tokens = [token for out in outs for token in out.tokens]
    scores = [score for out in outs for score in out.logprobs]
    last, found, begin = outs[-1], [], 0
    for end in ends:
        final = end == ends[-1]
        found.append(msgspec.structs.replace(
            last, tokens=tokens[begin:end], logprobs=scores[begin:end] if scores else [],
            finish=last.finish if final else "", stopped=last.stopped and final,
            overflow=last.overflow if final else "",
        ))  # fmt: skip
        begin = end
    return found


def replayed(layout: str, name: str, steps: list[list[Out]]) -> dict[str, Any]:
    """What a gateway says of these steps."""

    def outs(submit: Submit) -> list[list[Out]]:
        return [[msgspec.structs.replace(out, id=submit.id) for out in step] for step in steps]

    gateway = Gateway.open(GatewayConfig(), PlayedLink(outs), prompts(layout), "tiny")
    return read(post(gateway, **body(name, **MORE)).content)


def test_however_many_tokens_come_at_once_the_events_say_the_same(plain):
    """Every cut in two of each answer, every equal size, and random ones; choices out of step."""
    layout, answers, recorded = plain
    rng, count = random.Random(3), 0
    for name, answer, outs in zip(NAMES[layout], answers, recorded, strict=False):
        if "stop" in ASKED[name][0]:
            continue  # its engine was told to end in the middle
        choices = [[out for out in outs if out.index == index]
                   for index in range(ASKED[name][0].get("n", 1))]  # fmt: skip
        lengths = [sum(len(out.tokens) for out in one) for one in choices]
        if not min(lengths):
            continue  # a call that did not fit was not begun
        for ends in portions(lengths[0], rng):
            parts = [cut(choices[0], ends)] + [
                cut(one, [*sorted(rng.sample(range(1, length), rng.randrange(length))), length])
                for one, length in zip(choices[1:], lengths[1:], strict=True)
            ]
            steps = []
            while any(parts):
                step = [part.pop(0) for part in parts if part and rng.random() < 0.7]
                steps += [step] if step else []
            said = replayed(layout, name, steps)
            assert said == answer
            count += 1
    assert count > 200


def test_what_comes_behind_a_stop_string_in_its_portion_is_neither_said_nor_counted(plain):
    layout, answers, _ = plain
    for name in NAMES[layout]:
        if not name.startswith(("stop string", "a stop string")):
            continue
        answer = answers[NAMES[layout].index(name)]
        wish = "Look:\n" + load(layout).write(CALLS) if "tools" in name else str(ASKED[name][1])
        tokens = [*wish.encode(), EOS]
        whole = [Out("r", 0, tokens, "stop", True)]
        for ends in portions(len(tokens), random.Random(4)):
            said = replayed(layout, name, [[out] for out in cut(whole, ends)])
            assert said == answer


# ---- forty calls -------------------------------------------------------------------------------


def test_all_forty_errands_are_run_with_drafts_as_without(folder):
    """The list of calls of growing difficulty that a server is judged by, under `auto`."""
    asked = [(family, name, text, right) for family, (name, turns) in errands.ERRANDS.items()
             for text, right in turns.items()]  # fmt: skip

    def answered(drafts, mode: str):
        async def use(room: Room):
            found = [
                await room.ask(
                    messages=[{"role": "user", "content": text}], temperature=0, max_tokens=300,
                    tools=[tool(name, FAMILIES[family])], speculation={"mode": mode}, **MORE,
                )
                for family, name, text, _ in asked
            ]  # fmt: skip
            return [read(one.content) for one in found], room.engine.guessing

        return in_room(folder, errands.want, use, drafts=(lambda _: drafts) if drafts else None,
                       blocks=2048, max_drafts=8)  # fmt: skip

    plain, _ = answered(None, "off")
    found, guessing = answered(Eager(), "auto")
    assert found == plain and len(found) == 40
    for one, (family, name, _, right) in zip(found, asked, strict=True):
        ((_, called, arguments),) = one["0"][2]
        assert (called, json.loads(arguments)) == (name, right)
        jsonschema.validate(json.loads(arguments), FAMILIES[family])
    assert guessing.matched["forced"] > 300

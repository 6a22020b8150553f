"""Reading and checking tool calls in tests: events, splits, grammars over bytes.  Tests nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import llguidance

from engine.grammar.matcher import Compiler
from gateway.events import CallArgs, CallEnd, CallStart, Event, Reasoning, Text
from gateway.text import Detokenizer, Vocabulary
from gateway.tools import Format, Tool, load
from gateway.tools.marked import Marked
from tests.scripted import EOS, byte_tokenizer_json

HERMES = load("hermes")
SIZE = 259  # of the byte tokenizer
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
         dict: "object", type(None): "null"}  # fmt: skip

Calls = Sequence[tuple[str, str]]


@cache
def byte_compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), SIZE, [EOS])


def with_controls(
    texts: Iterable[str], tokenizer_json: str = "", *, special: bool = True
) -> tuple[str, dict[str, int]]:
    """The tokenizer (of bytes, if none is given) with these as further added tokens: text, id."""
    parsed = json.loads(tokenizer_json or byte_tokenizer_json())
    first = max(token["id"] for token in parsed["added_tokens"])
    first = max(first, *parsed["model"]["vocab"].values()) + 1
    ids = {text: first + at for at, text in enumerate(texts)}
    parsed["added_tokens"] += [
        {**parsed["added_tokens"][0], "id": id, "content": text, "special": special}
        for text, id in ids.items()
    ]
    return json.dumps(parsed), ids


@dataclass(frozen=True)
class Dialect:
    """A format and a vocabulary of bytes that has all of its markers as control tokens, or none."""

    fmt: Format
    tokenizer_json: str
    ids: Mapping[str, int]  # of the markers

    @property
    def verbatim(self) -> bool:
        """Whether arguments are the model's own text, not made of it."""
        return isinstance(self.fmt, Marked)

    @property
    def framed(self) -> bool:
        """Whether the model frames all that it says, and may say more than a text and calls."""
        return self.fmt.framed

    @property
    def compiler(self) -> Compiler:
        return _compiler(self.tokenizer_json, SIZE + len(self.ids))

    def seen(self, text: str) -> str:
        """Text in which every marker is meant, as the scanner sees it."""
        for marker in sorted(self.ids, key=len, reverse=True):
            text = text.replace(marker, self.fmt.stand_ins[self.ids[marker]])
        return text

    def written(self, calls: Calls, before: str = "") -> str:
        """A message as the scanner sees it; markers in text and arguments are text."""
        lead = before
        if before and self.fmt.opening:  # then only a control token opens calls behind text
            assert self.fmt.begin, "calls cannot follow text"
            lead = before + self.seen(self.fmt.begin)
        hidden = [(name, self._hide(arguments)) for name, arguments in calls]
        return lead + self.seen(self.fmt.write(hidden)).replace("\ue000", "")

    def tokens(self, seen: str) -> list[int]:
        """What the model sampled for a text that the scanner sees."""
        letters = {letter: id for id, letter in self.fmt.stand_ins.items()}
        return [
            id for part in seen
            for id in ([letters[part]] if part in letters else part.encode("utf-8", "replace"))
        ]  # fmt: skip

    def text(self, tokens: Sequence[int]) -> str:
        """The other way round."""
        decoder = Detokenizer(Vocabulary(self.tokenizer_json), self.fmt.stand_ins)
        return decoder.push(tokens) + decoder.close()

    def _hide(self, arguments: str) -> str:
        for marker in sorted(self.ids, key=len, reverse=True):
            arguments = arguments.replace(marker, marker[0] + "\ue000" + marker[1:])
        return arguments


@cache
def _compiler(tokenizer_json: str, size: int) -> Compiler:
    return Compiler(tokenizer_json, size, [EOS])


@cache
def dialect(name: str, bound: bool) -> Dialect:
    fmt = load(name)
    if not bound:
        return Dialect(fmt, byte_tokenizer_json(), {})
    tokenizer_json, ids = with_controls(fmt.markers)
    return Dialect(fmt.bound(ids), tokenizer_json, ids)


def tools_of(calls: Calls) -> list[Tool]:
    """Tools with parameters of the types that the calls give them."""
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        properties = found.setdefault(name, {})
        for key, value in json.loads(arguments).items():
            properties.setdefault(key, {"type": KINDS[type(value)]})
    return [
        Tool(name, "", {"type": "object", "properties": properties}, False)
        for name, properties in found.items()
    ]


def scan(fmt: Format, pieces: Iterable[str], tools: Sequence[Tool] = ()) -> list[Event]:
    scanner = fmt.scanner(tools)
    return [event for piece in pieces for event in scanner.push(piece)] + scanner.close()


def joined(events: Sequence[Event]) -> list[Any]:
    """Events with neighbouring pieces joined and call ids left out; checks the order rules."""
    out: list[Any] = []
    ids, open_call = set(), None
    for event in events:
        match event:
            case Text(text=text):
                assert text and open_call is None
                text.encode()  # no stand-in is left in it
                if out and isinstance(out[-1], str):
                    out[-1] += text
                else:
                    out.append(text)
            case Reasoning(text=text):
                assert text and open_call is None
                text.encode()
            case CallStart(index=index, id=call_id, name=name):
                assert open_call is None and index == len(ids) and call_id not in ids
                ids.add(call_id)
                open_call = [name, "", "open"]
                out.append(open_call)
            case CallArgs(index=index, text=text):
                assert text and open_call is not None and index == len(ids) - 1
                text.encode()
                open_call[1] += text
            case CallEnd(index=index):
                assert open_call is not None and index == len(ids) - 1
                open_call[2] = "closed"
                open_call = None
            case _:
                raise TypeError(event)
    return out


def splits(text: str, rng: random.Random) -> Iterable[list[str]]:
    yield [text]
    yield list(text)
    yield from ([text[:cut], text[cut:]] for cut in range(1, len(text)))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 9)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def takes(compiler: Compiler, lark: str, text: str | Sequence[int]) -> bool:
    """Whether the text, or the tokens, are a whole output of the grammar."""
    matcher = _matcher(compiler, lark).deep_copy()
    raw = list(text.encode()) if isinstance(text, str) else list(text)
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


@lru_cache(maxsize=64)
def _matcher(compiler: Compiler, lark: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(compiler.vocabulary.tokenizer, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher

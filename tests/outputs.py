"""Whole outputs of a layout by seed: thoughts, text, calls, text; what they say.  Tests nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gateway.events import CallArgs, CallEnd, CallStart, Event, Reasoning, Text
from gateway.text import Detokenizer, Vocabulary
from gateway.tools import Tool, load
from gateway.tools.thinking import CLOSE, OPEN, Thinking
from tests.calls import Dialect, with_controls
from tests.scripted import byte_tokenizer_json

#: Tools and the types of what they take; one takes nothing, one has the longest name there is.
TAKES: dict[str, dict[str, Any]] = {
    "add": {"a": "integer", "b": "number"},
    "note": {"text": "string", "more": "string"},
    "off": {},
    "a-b_C9": {"flag": "boolean", "list": "array", "deep": "object"},
    "x" * 64: {"maybe": ["string", "null"], "text": "string"},
}
TOOLS = [
    Tool(name, "", {"type": "object", "properties": {k: {"type": t} for k, t in keys.items()}},
         False)
    for name, keys in TAKES.items()
]  # fmt: skip
WORDS = ["a", "So: ", "é", "日本", "🌊", "\n", " ", *'<[{"\\\'0}>,']
IN_STRINGS = [*WORDS, "\t", "\\n", '\\"', "}}", "]", "</", "null", "True", "\x7f", "\u2028"]


@dataclass(frozen=True)
class Saying:
    """A layout and the one that its model speaks, which may think before; their vocabulary."""

    plain: Dialect
    said: Dialect
    strict: bool = False  # only what its grammar takes: no rare spellings of JSON

    @property
    def verbatim(self) -> bool:
        """Whether arguments are the model's own text."""
        return self.plain.verbatim or self.plain.fmt.name == "harmony"

    def outputs(self, seed: object, count: int, longest: int) -> Iterator[tuple[str, list[Any]]]:
        """(text as the scanner sees it, what it says in order) each; strings of `longest` words."""
        rng = random.Random(f"{self.said.fmt.name} {self.said.ids} {seed}")
        for _ in range(count):
            yield self._output(rng, longest)

    def _output(self, rng: random.Random, longest: int) -> tuple[str, list[Any]]:
        seen, fmt = self.said.seen, self.plain.fmt
        calls = [self._call(rng, longest) for _ in range(rng.choice([0, 1, 1, 1, 1, 1, 2, 3]))]
        before = self._text(rng, longest) if rng.random() < 0.5 else ""
        if calls and not fmt.begin:
            before = ""
        after = self._text(rng, 3) + "." if calls and rng.random() < 0.3 else ""
        thought = self._text(rng, longest) + "." if rng.random() < 0.4 else ""
        if fmt.name == "harmony":
            return self._framed(thought, before, calls, after)
        if self.said is self.plain:
            thought = ""
        if thought:
            before = before.lstrip("\n")
        lead = seen(f"{OPEN}\n") + thought + seen(f"{CLOSE}\n\n") if thought else ""
        body = self.plain.written(calls, before) if calls else before
        says = [Reasoning(thought), before, *map(list, calls), after]
        return lead + body + after, [one for one in says if one not in ("", Reasoning(""))]

    def _framed(
        self, thought: str, before: str, calls: Sequence[tuple[str, str]], after: str
    ) -> tuple[str, list[Any]]:
        seen, said = self.said.seen, list[str]()
        if thought:
            said.append(seen("<|channel|>analysis<|message|>") + thought)
        if before:
            said.append(seen("<|channel|>commentary<|message|>") + before)
        if calls:
            said.append(self.said.written(calls))
        if after:
            said.append(seen("<|channel|>final<|message|>") + after)
        ends = [seen("<|end|><|start|>assistant"), seen("<|call|><|start|>assistant")]
        out = "".join(
            text + ("" if at == len(said) - 1 else ends[after != "" and at == len(said) - 2
                                                        and bool(calls)])
            for at, text in enumerate(said)
        )  # fmt: skip
        says = [Reasoning(thought), before, *map(list, calls), after]
        return out, [one for one in says if one not in ("", Reasoning(""))]

    def _text(self, rng: random.Random, longest: int) -> str:
        """A text with starts of the trigger and of other literals, but never all of one."""
        literals = [*self.said.fmt.markers, self.said.fmt.example]
        out = ""
        for _ in range(rng.randint(1, longest)):
            part = rng.choice(WORDS)
            if rng.random() < 0.15 and not self.said.ids:
                literal = rng.choice(literals)
                part = literal[: rng.randint(1, min(7, len(literal) - 1))]
            out += part
        if not self.said.ids and any(literal in out for literal in literals):
            return self._text(rng, longest)
        return out if out.strip() and not out[0].isspace() else f"T{out}"

    def _call(self, rng: random.Random, longest: int) -> tuple[str, str]:
        name = rng.choices(list(TAKES), [4, 4, 3, 4, 1])[0]
        keys = [key for key in TAKES[name] if rng.random() < 0.7]
        found = {key: self._value(TAKES[name][key], rng, longest) for key in keys}
        spaces = rng.choice([(", ", ": "), (",", ":")])
        if self.strict:
            return name, json.dumps(found, ensure_ascii=False)
        return name, json.dumps(found, ensure_ascii=rng.random() < 0.3, separators=spaces)

    def _value(self, kind: Any, rng: random.Random, longest: int) -> Any:
        match kind:
            case "integer":
                return rng.choice([0, -1, 7, 12345678901])
            case "number":
                return rng.choice([0.5, -1.5e-7, 3, 1e22])
            case "boolean":
                return rng.random() < 0.5
            case "array":
                kinds = ["integer", "string", *["boolean"] * (not self.strict), "array"]
                return [self._value(rng.choice(kinds), rng, 2) for _ in range(rng.randrange(3))]
            case "object":
                return {rng.choice(["k", "é", "a b"]): self._value("array", rng, 2)}
            case "string":
                out = "".join(rng.choices(IN_STRINGS, k=rng.randrange(longest)))
                return (out.replace("\x7f", "") if self.strict else out) + self._lookalike(rng)
            case _:
                return None if rng.random() < 0.5 else "n" + self._value("string", rng, longest)

    def _lookalike(self, rng: random.Random) -> str:
        """Sometimes: the layout's own literals in a string, whole where JSON can hold them."""
        if rng.random() < 0.8:
            return ""
        literal = rng.choice([*self.said.fmt.markers, "\n</tool_call>", "</parameter>", "}]"])
        whole = self.verbatim or self.plain.fmt.name == "pythonic"
        return literal if whole else literal[: rng.randint(1, 9)].removesuffix(">")


@cache
def saying(name: str, bound: bool, thinks: bool) -> Saying:
    fmt = Thinking(load(name)) if thinks else load(name)
    tokenizer_json, ids = with_controls(fmt.markers) if bound else (byte_tokenizer_json(), {})
    said = Dialect(fmt.bound(ids), tokenizer_json, ids)
    if not thinks:
        return Saying(said, said)
    plain = load(name)
    ids = {marker: id for marker, id in ids.items() if marker in plain.markers}
    return Saying(Dialect(plain.bound(ids), tokenizer_json, ids), said)


@cache
def vocabulary(tokenizer_json: str) -> Vocabulary:
    return Vocabulary(tokenizer_json)


def decoder(said: Dialect) -> Detokenizer:
    return Detokenizer(vocabulary(said.tokenizer_json), said.fmt.stand_ins)


def merged(events: Sequence[Event]) -> tuple[Any, ...]:
    """Events with neighbouring pieces as one and without ids, to be compared fast."""
    out: list[Any] = []
    kind, pieces = None, list[str]()
    for event in [*events, None]:
        if type(event) is not kind:
            if kind in (Text, CallArgs, Reasoning):
                out.append((kind, "".join(pieces)))
            kind, pieces = type(event), []
        if isinstance(event, CallStart):
            out.append((event.index, event.name))
        elif isinstance(event, CallEnd):
            out.append(event.index)
        elif event is not None:
            pieces.append(event.text)
    return tuple(out)


def says(found: tuple[Any, ...], verbatim: bool) -> list[Any]:
    """What merged events say: thoughts, texts, [name, arguments] of calls that were closed.

    Arguments that a scanner wrote are not `verbatim`: only their values count.
    """
    out: list[Any] = []
    for at, event in enumerate(found):
        match event:
            case (kind, text) if kind is Text:
                out.append(text)
            case (kind, text) if kind is Reasoning:
                out.append(Reasoning(text))
            case (int(index), str(name)):
                arguments = found[at + 1][1]
                assert found[at + 2] == index, "a call that is not closed"
                out.append([name, arguments if verbatim else json.loads(arguments)])
    return out

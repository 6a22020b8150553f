"""The sweep of "every call closed": its points, how they are run and how judged.  Prints nothing.

A point is a request for calls (or for an answer with a schema) and a way to run it.  Of each the
plain run, nothing drafted, is judged; the drafted one must equal it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from msgspec.structs import replace

from engine.checkpoint import Checkpoint, open_checkpoint
from engine.grammar.matcher import Compiled, GrammarRefused
from engine.grammar.schema import BadSchema, check, embed
from engine.loop import Engine
from engine.messages import Grammar, Out, Sampling, Submit
from engine.proposer import Draft, Turn
from gateway.events import CallArgs, CallEnd, CallStart
from gateway.tools import Format, Tool, load
from tests.driver import Run, make
from tests.proposers import AdversarialDrafts, OneByOne, OracleDrafts, RandomDrafts
from tests.schemas import SHORT, record
from tests.tiny import write_llama

KINDS = ("required", "named", "auto", "answer")
DRAFTS = ("random", "oracle", "adversarial")  # by the host; "head" is an engine of its own
LAYOUTS = ("hermes", "llama3", "mistral13", "qwen3_coder", "minimax_m2", "glm45", "harmony",
           "pythonic")  # fmt: skip
DRAWS = {
    "greedy": Sampling(temperature=0.0),
    "hot": Sampling(temperature=1.0, seed=11),
    "penalties": Sampling(temperature=0.7, repetition=1.2, frequency=0.4, presence=0.3, seed=5),
}
# In free text calls begin with a control token, which a bias makes likely: else few would open one.
BIAS = 12.0
TRIGGER = 6  # a control token of the vocabulary that has no other use here
NAME = "act"
OTHER = Tool("note", "", record({"text": SHORT}), True)


class Point(NamedTuple):
    """One request, and the drafts that it is run with."""

    schema: str
    most: int  # max_tokens
    kind: str
    draw: str
    layout: str
    drafts: str
    k: int  # draft tokens a step; 0 = none


def covering(
    schemas: Sequence[str], budgets: Sequence[int], drafts: Sequence[str] = DRAFTS, seed: int = 1
) -> list[Point]:
    """Every schema with every budget, and any two other values together at least once."""
    rng = random.Random(seed)
    values = [schemas, budgets, KINDS, list(DRAWS), LAYOUTS, drafts, range(9)]
    points = [
        Point(schema, most, *(rng.choice(list(some)) for some in values[2:]))
        for schema in schemas for most in budgets
    ]  # fmt: skip
    rng.shuffle(points)
    seen = {pair for point in points for pair in pairs(point)}
    for one, two in itertools.combinations(range(len(values)), 2):
        for left, right in itertools.product(values[one], values[two]):
            if (one, left, two, right) not in seen:
                point = [rng.choice(list(some)) for some in values]
                point[one], point[two] = left, right
                points.append(Point(*point))
                seen.update(pairs(points[-1]))
    return points


def every(
    schemas: Sequence[str], budgets: Sequence[int], drafts: Sequence[str] = DRAFTS
) -> Iterator[Point]:
    """All there are."""
    for values in itertools.product(schemas, budgets, KINDS, DRAWS, LAYOUTS, drafts, range(9)):
        yield Point(*values)


def pairs(point: Point) -> Iterator[tuple[int, object, int, object]]:
    """Any two values of a point, with their places."""
    for one, two in itertools.combinations(range(len(point)), 2):
        yield one, point[one], two, point[two]


class End(NamedTuple):
    """All that must be equal of two runs."""

    tokens: list[int]
    finish: str
    overflow: str
    stopped: bool


class ByRequest(OneByOne):
    """Asks the proposer whose name a request's id begins with."""

    source = "sweep"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.answers: dict[tuple[str, int], list[int]] = {}
        vocab, stop = checkpoint.config.vocab, checkpoint.stop_ids[0]
        self.ways: dict[str, OneByOne] = {
            "random": RandomDrafts(vocab, 1), "oracle": OracleDrafts(self.answers, 2),
            "adversarial": AdversarialDrafts(self.answers, vocab, stop, 3),
        }  # fmt: skip

    def guess(self, turn: Turn) -> Draft:
        return self.ways[turn.key[0].partition(" ")[0]].guess(turn)


def random_model(folder: Path, speaks: Checkpoint) -> Path:
    """A tiny Llama of random weights with another model's vocabulary."""
    write_llama(folder, vocab=speaks.config.vocab, max_len=4096)
    (folder / "tokenizer.json").write_text(speaks.tokenizer_json)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        config["eos_token_id"] = list(speaks.stop_ids)
        (folder / name).write_text(json.dumps(config))
    return folder


@dataclass
class Sweep:
    """The engine, the schemas, and what came of the points that were run."""

    engine: Engine
    checkpoint: Checkpoint
    proposer: ByRequest | None  # None: the engine drafts on the device
    schemas: Mapping[str, dict[str, Any]]

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._truth: dict[tuple[object, ...], End] = {}
        self._shortest = cache(self._start_plan)
        self._compiler = self.engine._compiler
        self._decode = self._compiler.vocabulary.tokenizer.decode_bytes
        self._encode = self._compiler.vocabulary.tokenizer.tokenize_str

    @classmethod
    def open(cls, model: str, schemas: Mapping[str, Any], head: Any = None) -> Sweep:
        """An engine on a model, or on a folder of one; `head` guesses instead of the host."""
        checkpoint = open_checkpoint(model)
        drafts = None if head is not None else ByRequest(checkpoint)
        engine = make(
            Path(model), drafts=drafts, head=head, max_drafts=8, blocks=160, max_sequences=48
        )
        enforced = {}
        for name, schema in schemas.items():
            try:
                enforced[name] = check(schema, strict=False, root="object").schema
            except BadSchema:
                continue
        return cls(engine, checkpoint, drafts, enforced)

    def run(self, points: Sequence[Point]) -> None:
        """Run them, plainly where that was not done, then with drafts; judge both."""
        usable = [point for point in points if self._usable(point)]
        self.counts["refused as a schema"] += len(points) - len(usable)
        plain = {_request(point): point for point in usable}
        fresh = [point for key, point in plain.items() if key not in self._truth]
        found = self._answers({f"plain {i}": (point, 0) for i, point in enumerate(fresh)})
        for i, point in enumerate(fresh):
            end = found[f"plain {i}"]
            self._truth[_request(point)] = end
            self.counts["plain: " + self._judged(point, end)] += 1
        drafted = {f"{point.drafts} {i}": (point, point.k)
                   for i, point in enumerate(usable) if point.k}
        if self.proposer is not None:
            for name, (point, _) in drafted.items():
                self.proposer.answers[name, 0] = self._truth[_request(point)].tokens
        for name, end in self._answers(drafted).items():
            point = drafted[name][0]
            assert end == self._truth[_request(point)], (point, end, self._truth[_request(point)])
            self.counts["drafted: equal"] += 1

    def grammar(self, point: Point) -> Grammar:
        """What the gateway would compile for the point."""
        schema = self.schemas[point.schema]
        if point.kind == "answer":
            return Grammar(f"start: %json {embed(schema)}\n", "response_format")
        fmt, tools = _format(point, schema), _tools(point, schema)
        if point.kind == "auto":
            trigger = self._compiler.vocabulary.piece(TRIGGER).decode() if fmt.begin else ""
            return Grammar(fmt.grammar(tools, "auto", True), "tools", trigger, fmt.opening)
        return Grammar(fmt.grammar(tools, point.kind, point.kind == "required"))  # type: ignore[arg-type]

    def _usable(self, point: Point) -> bool:
        if point.schema not in self.schemas:
            return False
        return self._shortest(self.grammar(point)) is not None

    def _start_plan(self, grammar: Grammar) -> int | None:
        """Tokens of the shortest output; None when the grammar is refused."""
        try:
            compiled: Compiled = self._compiler.compile(grammar)
        except GrammarRefused:
            return None
        return len(compiled.planner.start_plan or ())

    def _answers(self, asked: Mapping[str, tuple[Point, int]]) -> dict[str, End]:
        run = Run(self.engine)
        run.put(*(self._submit(name, point, k) for name, (point, k) in asked.items()))
        run.drain(1_000_000)
        assert not run.failed and not run.refused, (run.failed, run.refused)
        assert self.engine.pool.used == 0
        found = {}
        for name in asked:
            last: Out = run.outs[name, 0][-1]
            found[name] = End(run.tokens[name, 0], last.finish, last.overflow, last.stopped)
        return found

    def _submit(self, name: str, point: Point, k: int) -> Submit:
        schema = self.schemas[point.schema]
        shown = json.dumps(schema)[:160]
        prompt = (
            f"<|im_start|>system\nCall {NAME} as asked. Parameters: {shown}<|im_end|>\n"
            f"<|im_start|>user\nDo it, {point.most}.<|im_end|>\n<|im_start|>assistant\n"
        )
        draw = DRAWS[point.draw]
        if point.kind == "auto":
            begin = self._encode(_format(point, schema).opening) or [TRIGGER]
            draw = replace(draw, bias=tuple((token, BIAS) for token in sorted(set(begin))))
        return Submit(
            name, self._encode(prompt), point.most, draw, stop_ids=list(self.checkpoint.stop_ids),
            grammar=self.grammar(point), max_drafts=k, drafts="auto" if k else "off",
        )

    def _judged(self, point: Point, end: End) -> str:
        """What became of it; AssertionError when that is not what was promised."""
        text = self._text(point, end.tokens[: len(end.tokens) - end.stopped])
        assert len(end.tokens) <= point.most, point
        if end.overflow:
            assert end.finish == "length", (point, end)
        elif end.finish == "length":
            more = ("auto", "required")  # behind a whole call another one could have come
            assert len(end.tokens) == point.most and point.kind in more, (point, end)
        else:
            assert end.finish == "stop", (point, end)
        count = self._whole(point, text)
        if point.kind == "auto":
            # A message of harmony's is closed too, and its marks lead on to free text.
            assert count or end.overflow != "closed" or "<|message|>" in text, (point, end, text)
            kind = "whole call" if count else "text only"
            return f"{kind}, closed early" if end.overflow == "closed" else kind
        fits = (self._shortest(self.grammar(point)) or 0) <= point.most
        assert bool(count) == fits, (point, end, text)
        if not fits:
            assert (text, end.overflow) == ("", "unopened"), (point, end, text)
            return "not opened: it does not fit"
        return "whole, closed early" if end.overflow == "closed" else "whole"

    def _text(self, point: Point, tokens: Sequence[int]) -> str:
        """The text as a scanner sees it."""
        stand_ins = _format(point, self.schemas[point.schema]).stand_ins
        text = ""
        for control, some in itertools.groupby(tokens, stand_ins.get):
            some = list(some)
            text += control * len(some) if control else self._decode(some).decode(errors="replace")
        return text

    def _whole(self, point: Point, text: str) -> int:
        """How many calls (or answers) the text holds, all closed and valid."""
        schema = self.schemas[point.schema]
        if point.kind == "answer":
            if text:
                _validate(schema, text)
            return bool(text)
        tools = {tool.name: tool for tool in _tools(point, schema)}
        scanner = _format(point, schema).scanner(list(tools.values()))
        found: list[list[str]] = []
        closed = 0
        for event in scanner.push(text) + scanner.close():
            match event:
                case CallStart(name=name):
                    found.append([name, ""])
                case CallArgs(text=piece):
                    found[-1][1] += piece
                case CallEnd():
                    closed += 1
        assert closed == len(found), (point, text)
        for name, arguments in found:
            _validate(tools[name].parameters, arguments)
        assert point.kind != "named" or len(found) <= 1, (point, text)
        return closed


def _request(point: Point) -> tuple[object, ...]:
    """What of a point decides its answer; an answer with a schema has no layout."""
    return (*point[:4], "" if point.kind == "answer" else point.layout)


def _tools(point: Point, schema: dict[str, Any]) -> list[Tool]:
    tool = Tool(NAME, "", schema, True)
    return [tool] if point.kind == "named" else [tool, OTHER]


def _format(point: Point, schema: dict[str, Any]) -> Format:
    """The point's layout, or one that can promise all of the schema."""
    fmt = load(point.layout)
    if fmt.unenforced(Tool(NAME, "", schema, True)):
        fmt = load("hermes")
    free = point.kind == "auto" and fmt.begin in fmt.markers
    return fmt.bound({fmt.begin: TRIGGER}) if free else fmt


def _validate(schema: Mapping[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)

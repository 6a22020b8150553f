"""Closing plans over real schemas: how many are found, how long, what they cost, whether they hold.

    python -m tests.bench.bench_closing maskbench_260.jsonl --schemas 50 --lengths 80
    python -m tests.bench.bench_closing maskbench_260.jsonl --model smollm2 --points 250 --wire 40

The file holds a JSON object a line: `schema`, and `tests` with `data` and `valid`.  Without a
model, in us of the thread's CPU time: the plan from each start; outputs that are a schema's own
valid data, with room to spare; and outputs of hostile samplers for `max_tokens` 1 to `--lengths`,
each checked to be closed, valid and inside its budget.

With one (`random`: tiny random weights with SmolLM2's vocabulary) an engine answers the points of
tests/sweep.py, plainly and with drafts, and a gateway those of `--wire`, streamed and not.  By
default every schema meets every `max_tokens`, and of the other values any two each other.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

import engine.grammar.planner as planner
from engine.checkpoint import open_checkpoint
from engine.grammar.closing import Closing
from engine.grammar.matcher import Compiled, Compiler, GrammarRefused
from engine.grammar.schema import BadSchema, check, embed
from engine.messages import Grammar
from tests import sweep_wire
from tests.driver import make
from tests.engine.test_closing import SCHEMAS
from tests.hostile import LIKES, Hostile, write
from tests.proposers import RandomDrafts, RandomHead
from tests.sweep import Sweep, covering, every, pairs, random_model

Case = tuple[dict[str, Any], Compiled, list[Any]]  # schema as enforced, its grammar, valid data


class Clock:
    """CPU time of calls, by what they turned out to be."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}
        self.searches = self.misses = 0

    def add(self, what: str, start: float) -> None:
        self.us.setdefault(what, []).append((time.thread_time() - start) * 1e6)

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A search for a plan, timed."""

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            plan = call(*args)
            self.add("search", start)
            self.searches += 1
            self.misses += plan is None
            return plan

        return timed

    def take(self, closing: Closing, run: Sequence[int], budget: int) -> Any:
        """`Closing.take` of one token, timed as a head match, a reuse or a full search."""
        before = self.searches
        head = closing.plan[:1] == list(run)
        start = time.thread_time()
        taken = closing.take(run, budget)
        kind = "full" if self.searches > before else "head" if head else "reuse"
        self.add(kind, start)
        self.add("every token", start)
        return taken


class Timed(Closing):
    """A closing whose calls a clock times."""

    clock: Clock

    def take(self, run: Sequence[int], budget: int) -> Any:
        return self.clock.take(super(), run, budget)


def cases(path: Path, compiler: Compiler, count: int) -> list[Case]:
    """Compile the schemas of the file, print what their starts cost."""
    found: list[Case] = []
    refused: dict[str, int] = {}
    clock, lengths = Clock(), []
    original = planner.Planner._find
    planner.Planner._find = clock.counted(original)  # type: ignore[method-assign]
    for line in path.read_text().splitlines()[:count]:
        case = json.loads(line)
        try:
            schema = check(case["schema"], strict=False, root="any").schema
            compiled = compiler.compile(Grammar(f"start: %json {embed(schema)}\n"))
        except (BadSchema, GrammarRefused) as why:
            refused[why.code] = refused.get(why.code, 0) + 1
            continue
        plan = compiled.planner.start_plan
        assert plan is not None
        lengths.append(len(plan))
        text = compiler.vocabulary.tokenizer.decode_bytes(list(plan))
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        data = [test["data"] for test in case["tests"] if test["valid"]]
        found.append((schema, compiled, data))
    planner.Planner._find = original  # type: ignore[method-assign]
    print(f"{len(found)} starts planned; refused: {refused or 'none'}")
    show("tokens", lengths)
    show("start", clock.us["search"])
    return found


def show(what: str, values: Sequence[float]) -> None:
    """One line: how many, and percentiles."""
    points = np.percentile(values, [50, 90, 99, 100])
    print(f"  {what:12}{len(values):8}" + "".join(f"{point:10.1f}" for point in points))


def lengthened(found: Sequence[Case], compiler: Compiler, clock: Clock) -> None:
    """Outputs that a good model would write."""
    for _, compiled, data in found:
        for value in data:
            text = json.dumps(value, ensure_ascii=False)
            tokens = compiler.vocabulary.tokenizer.tokenize_str(text)
            state = compiled.start()
            if not state.closes(tokens):
                continue  # another order of keys, other numbers than json.dumps prints
            closing = Closing(compiled.planner, state)
            assert closing.admit(100_000)
            for place, token in enumerate(tokens):
                assert clock.take(closing, [token], 100_000 - place).kept == 1


def hostile(found: Sequence[Case], compiler: Compiler, most: int, step: int, clock: Clock) -> None:
    """Outputs that nobody would write."""
    rng, sampler = random.Random(3), Hostile(compiler.vocabulary)
    decode = compiler.vocabulary.tokenizer.decode_bytes
    runs = refused = substituted = 0
    for schema, compiled, _ in found:
        validator = jsonschema.Draft202012Validator(schema)
        for budget in range(1, most + 1, step):
            runs += 1
            state, name = compiled.start(), rng.choice(list(LIKES))
            closing = Timed(compiled.planner, state)
            closing.clock = clock
            if not closing.admit(budget):
                refused += 1
                continue
            out = write(closing, state, budget, lambda: sampler.draw(name, state, rng))
            assert state.accepting, (name, budget, schema)
            validator.validate(json.loads(decode(out)))
            substituted += closing.overridden
    print(
        f"{runs} outputs: {runs - refused} closed and valid, {refused} not admitted, 0 open; "
        f"{substituted} tokens substituted, {clock.misses} searches without a plan that fits"
    )


def chosen(path: Path, count: int) -> dict[str, Any]:
    """Schemas for the sweep: the hard ones of the tests, then plain ones of the file to `count`."""
    found = {name: schema for name, schema in SCHEMAS.items() if schema.get("type") == "object"}
    lines = path.read_text().splitlines()
    random.Random(3).shuffle(lines)
    compiler = _compiler()
    for number, line in enumerate(lines):
        if len(found) >= count:
            break
        try:
            schema = check(json.loads(line)["schema"], strict=False, root="object").schema
            compiled = compiler.compile(Grammar(f"start: %json {embed(schema)}\n"))
        except (BadSchema, GrammarRefused):
            continue
        if len(compiled.planner.start_plan or ()) <= 50:  # else no call with it would ever open
            found[f"file {number}"] = schema
    return found


def swept(options: argparse.Namespace, folder: Path) -> None:
    """The sweep on an engine, with drafts of the host or the device, and over a gateway."""
    speaks = open_checkpoint("smollm2")
    model = str(random_model(folder, speaks)) if options.model == "random" else options.model
    checkpoint = open_checkpoint(model)
    schemas = chosen(options.file, options.schemas)
    budgets = range(1, options.lengths + 1, options.step)
    head = None
    if options.head:
        head = RandomHead(checkpoint.config.hidden, checkpoint.config.vocab, (0, 1))
    sweep = Sweep.open(model, schemas, head)
    names, drafts = list(sweep.schemas), ["head"] if options.head else ["random", "oracle",
                                                                       "adversarial"]  # fmt: skip
    all_of = every if options.every else covering
    points = list(all_of(names, budgets, drafts))[: options.points]
    met = {pair for point in points for pair in pairs(point)}
    whole = {pair for point in covering(names, budgets, drafts) for pair in pairs(point)}
    start = time.process_time()
    for at in range(0, len(points), 50):
        sweep.run(points[at : at + 50])
        told(sweep.counts, min(at + 50, len(points)), start)
    print(f"{len(names)} schemas, {len(met)} of {len(whole)} pairs of values, "
          f"{sweep.engine.stats().drafted_tokens} tokens drafted")  # fmt: skip
    if options.wire:
        counts = sweep_wire.ask(
            lambda: make(Path(model), drafts=RandomDrafts(checkpoint.config.vocab), max_drafts=3,
                         blocks=160),
            checkpoint, sweep.schemas, points[: options.wire],
        )  # fmt: skip
        told(counts, options.wire, start)


def told(counts: Counter[str], done: int, start: float) -> None:
    """One line: what became of the points so far."""
    shown = "; ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
    print(f"{done} points, {time.process_time() - start:.0f} s of CPU; {shown}", flush=True)


def _compiler() -> Compiler:
    checkpoint = open_checkpoint("smollm2")
    return Compiler(checkpoint.tokenizer_json, checkpoint.config.vocab, checkpoint.stop_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--schemas", type=int, default=50, help="of those, for hostile samplers")
    parser.add_argument("--lengths", type=int, default=80, help="the largest max_tokens")
    parser.add_argument("--step", type=int, default=1, help="between two max_tokens")
    parser.add_argument("--model", default="", help="sweep on this: random, or a model's name")
    parser.add_argument("--points", type=int, help="no more points than that")
    parser.add_argument("--every", action="store_true", help="all points, not a covering of pairs")
    parser.add_argument("--head", action="store_true", help="drafts of a random head on the device")
    parser.add_argument("--wire", type=int, default=0, help="so many points over a gateway too")
    options = parser.parse_args()
    if options.model:
        with tempfile.TemporaryDirectory() as folder:
            swept(options, Path(folder) / "random")
        return
    compiler = _compiler()
    print(" " * 22 + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "max")))
    found = cases(options.file, compiler, 10_000)
    original = planner.Planner.full
    for title, part in (
        ("valid data", lambda clock: lengthened(found, compiler, clock)),
        ("hostile", lambda clock: hostile(
            random.Random(3).sample(found, options.schemas), compiler, options.lengths,
            options.step, clock,
        )),
    ):  # fmt: skip
        print(title)
        clock = Clock()
        planner.Planner.full = clock.counted(original)  # type: ignore[method-assign]
        part(clock)
        planner.Planner.full = original  # type: ignore[method-assign]
        for what, values in clock.us.items():
            show(what, values)


if __name__ == "__main__":
    main()

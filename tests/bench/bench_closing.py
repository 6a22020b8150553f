"""Closing plans over real schemas: how many are found, how long, and what they cost.  No model.

    python -m tests.bench.bench_closing maskbench_260.jsonl --schemas 50 --lengths 80

The file holds a JSON object a line: `schema`, and `tests` with `data` and `valid`.  Three parts, in
us of the thread's CPU time: the plan from each start; outputs that are a schema's own valid data,
with room to spare; and outputs of hostile samplers for `max_tokens` 1 to `--lengths`, each checked
to be closed, valid and inside its budget.
"""

from __future__ import annotations

import argparse
import json
import random
import time
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
from tests.hostile import LIKES, Hostile, write

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--schemas", type=int, default=50, help="of those, for hostile samplers")
    parser.add_argument("--lengths", type=int, default=80, help="the largest max_tokens")
    parser.add_argument("--step", type=int, default=1, help="between two max_tokens")
    options = parser.parse_args()
    checkpoint = open_checkpoint("smollm2")
    compiler = Compiler(checkpoint.tokenizer_json, checkpoint.config.vocab, checkpoint.stop_ids)
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

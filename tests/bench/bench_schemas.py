"""Measure what the schema check enforces, on public schemas with instances.  Serves nothing.

    python -m tests.bench.bench_schemas maskbench.jsonl
    python -m tests.bench.bench_schemas JSON-Schema-Test-Suite/tests/draft2020-12 --list loose
    python -m tests.bench.bench_schemas maskbench.jsonl --times

A line of the first kind of file is {"source", "name", "schema", "tests": [{"valid", "data"}]}; a
folder is one draft of the official suite, without what it would fetch.  The grammar alone judges
each instance: right, loose (it takes an invalid one), tight (it rejects a valid one), order (it
takes a valid one with its keys in another order), refused (the schema has no grammar).
Then every grammar says random samples, which jsonschema judges.  Exits with 1 when something
invalid was taken of a schema of which nothing was said to be dropped.  `--times` takes instead the
thread's CPU time with SmolLM2's vocabulary.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import llguidance
from jsonschema import Draft202012Validator
from referencing.exceptions import Unresolvable

from engine.checkpoint import open_checkpoint
from engine.grammar.explain import follow, walk
from engine.grammar.matcher import Compiler, GrammarRefused
from engine.grammar.schema import BadSchema, Dropped, check, embed
from engine.grammar.state import State
from engine.messages import Grammar
from gateway.tools.finished import complaint
from tests.scripted import EOS, byte_tokenizer_json


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and instances of which is known whether they are valid."""

    group: str  # of the report
    name: str
    schema: Any
    tests: tuple[tuple[bool, Any], ...]


@dataclass(slots=True)
class Tally:
    """What one mode made of the cases."""

    compiled: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # keyword -> schemas
    counts: Counter[str] = field(default_factory=Counter)  # verdict -> instances
    faults: list[tuple[str, Case, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # keyword -> schemas
    silent: list[Case] = field(default_factory=list)  # loose, and nothing was said to be dropped
    late: int = 0  # loose instances that the check of finished arguments finds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--list", choices=["loose", "tight", "refused"], default="")
    parser.add_argument("--samples", type=int, default=4, help="of each grammar")
    parser.add_argument("--times", action="store_true")
    given = parser.parse_args(arguments)
    cases = list(suite(given.path) if given.path.is_dir() else lines(given.path))
    if given.times:
        times(cases)
        return 0
    print(f"{len(cases)} schemas, {sum(len(case.tests) for case in cases)} instances")
    wrong = 0
    for strict in (True, False):
        tally = judged(cases, strict)
        report(tally, strict, given.list)
        wrong += len(tally.silent)
    wrong += sampled(cases, given.samples)
    return 1 if wrong else 0


def lines(path: Path) -> Iterator[Case]:
    for line in path.read_text().splitlines():
        read = json.loads(line)
        tests = tuple((test["valid"], test["data"]) for test in read["tests"])
        yield Case(read["source"], read["name"], read["schema"], tests)


def suite(folder: Path) -> Iterator[Case]:
    """The cases of one draft, `optional/format` with them, as the suite's own files name them."""
    for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/format/*.json"))]:
        for group in json.loads(path.read_text()):
            tests = tuple((test["valid"], test["data"]) for test in group["tests"])
            yield Case(path.stem, group["description"], group["schema"], tests)


def judged(cases: Sequence[Case], strict: bool) -> Tally:
    tally = Tally()
    for case in cases:
        try:
            checked = check(case.schema, strict=strict, root="any")
            lark = f"start: %json {embed(checked.schema)}\n"
            takes(lark, None)
        except (BadSchema, GrammarRefused) as bad:
            tally.refused[getattr(bad, "keyword", "") or bad.code] += 1
            tally.counts["refused"] += len(case.tests)
            tally.faults += (("refused", case, str(bad)[:160]),)
            continue
        tally.compiled += 1
        tally.dropped.update({gone.keyword for gone in checked.dropped})
        for valid, value in case.tests:
            taken = takes(lark, value)
            verdict = "right" if taken == valid else "loose" if taken else "tight"
            if verdict == "tight" and any(takes(lark, one) for one in orders(case.schema, value)):
                verdict = "order"
            tally.counts[verdict] += 1
            if verdict != "right":
                tally.faults.append((verdict, case, value))
                note_loose(tally, case, value, checked.dropped, verdict)
    return tally


def takes(lark: str, value: Any) -> bool:
    """Whether the instance, as json.dumps prints it, is an output of the grammar.

    Compiled anew each time: the copies of a grammar share a budget, which a pattern may use up.
    """
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    state = compiler.compile(Grammar(lark)).start()
    compiler.close()
    raw = list(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return follow(state, raw, EOS + 1) == len(raw) and state.accepting


def orders(schema: Any, value: Any) -> Iterator[Any]:
    """The value with its keys as the schema has them, and, of a few keys, in every order."""
    yield reordered(schema, value)
    if isinstance(value, dict) and len(value) <= 4:
        yield from (dict(items) for items in permutations(value.items()))


def reordered(schema: Any, value: Any) -> Any:
    """The value with its keys as the schema first declares them, others behind."""
    known = list(dict.fromkeys(declared(schema)))

    def place(key: str) -> int:
        return known.index(key) if key in known else len(known)

    def ordered(part: Any) -> Any:
        match part:
            case dict():
                return {key: ordered(part[key]) for key in sorted(part, key=place)}
            case list():
                return [ordered(one) for one in part]
        return part

    return ordered(value)


def declared(schema: Any) -> Iterator[str]:
    """Every name of a property, in reading order."""
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield from schema["properties"]
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            yield from declared(part)


def note_loose(
    tally: Tally, case: Case, value: Any, dropped: tuple[Dropped, ...], verdict: str
) -> None:
    if verdict != "loose":
        return
    if not dropped and case not in tally.silent:
        tally.silent.append(case)
    said = complaint(case.schema, json.dumps(value))
    tally.late += bool(said) and not said.endswith("not judged")


def report(tally: Tally, strict: bool, listed: str) -> None:
    counts = tally.counts
    kinds = ("right", "order", "refused", "loose", "tight")
    print(f"\n{'strict' if strict else 'relaxed'}: {tally.compiled} schemas compiled, "
          f"{sum(tally.refused.values())} refused; instances: "
          + ", ".join(f"{counts[kind]} {kind}" for kind in kinds))
    print("  refused by keyword:", dict(tally.refused.most_common(24)))
    if not strict:
        print("  dropped by keyword:", dict(tally.dropped.most_common(24)))
        print(f"  loose instances found by the check of finished arguments: {tally.late}")
    print(f"  schemas with a loose instance and no keyword dropped: {len(tally.silent)}",
          dict(Counter(case.group for case in tally.silent)))
    for kind in ("loose", "tight"):
        by_group = Counter(case.group for found, case, _ in tally.faults if found == kind)
        print(f"  {kind} by group:", dict(by_group))
    for kind, case, value in tally.faults:
        if kind == listed:
            shown = value if kind == "refused" else json.dumps(value)[:200]
            print(f"    {case.group}: {case.name}: {shown} | {json.dumps(case.schema)[:300]}")


def sampled(cases: Sequence[Case], each: int) -> int:
    """Print how many random outputs of strict grammars are invalid; return that number."""
    compiler = Compiler(byte_tokenizer_json(), EOS + 1, [EOS])
    said = whole = invalid = 0
    for case in cases:
        try:
            lark = f"start: %json {embed(check(case.schema, strict=True, root='any').schema)}\n"
        except BadSchema:
            continue
        judge = Draft202012Validator(case.schema)
        for seed in range(each):
            matcher = llguidance.LLMatcher(compiler.vocabulary.tokenizer, lark, log_level=0)
            sample = walk(compiler.vocabulary, State(matcher, compiler.vocabulary, None, {}), seed)
            said += 1
            whole += sample.whole
            try:
                wrong = sample.whole and not judge.is_valid(json.loads(sample.text))
            except (Unresolvable, re.error):  # a remote `$schema`; a pattern that Python has not
                continue
            if wrong:
                invalid += 1
                print(f"    invalid sample of {case.name}: {sample.text[:200]}")
    print(f"\nsamples of strict grammars: {said}, {whole} of them whole, {invalid} invalid")
    return invalid


def times(cases: Sequence[Case]) -> None:
    """CPU time of the calling thread, to the first mask."""
    checkpoint = open_checkpoint("smollm2")
    compiler = Compiler(
        checkpoint.tokenizer_json, checkpoint.config.vocab, checkpoint.stop_ids
    )
    checking: list[float] = []
    masking: list[float] = []
    for case in cases:
        start = time.thread_time()
        try:
            checked = check(case.schema, strict=False, root="any")
        except BadSchema:
            continue
        finally:
            checking.append(1e3 * (time.thread_time() - start))
        start = time.thread_time()
        compiler.compile(Grammar(f"start: %json {embed(checked.schema)}\n", "tools"))
        masking.append(1e3 * (time.thread_time() - start))
    for name, taken in (("check, relaxed", checking), ("compile and first mask", masking)):
        taken.sort()
        share = {p: taken[min(len(taken) * p // 100, len(taken) - 1)] for p in (50, 90, 99)}
        print(f"{name}, ms of CPU: " + ", ".join(f"p{p} {ms:.2f}" for p, ms in share.items())
              + f", max {taken[-1]:.1f}; {len(taken)} schemas")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

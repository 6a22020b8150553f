"""A sample of the sweep "every call closed": tests/bench/bench_closing.py runs all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checkpoint import Checkpoint, open_checkpoint
from tests import sweep_wire
from tests.driver import make
from tests.engine.test_closing import SCHEMAS
from tests.proposers import RandomDrafts, RandomHead
from tests.sweep import (
    DRAFTS,
    DRAWS,
    KINDS,
    LAYOUTS,
    End,
    Point,
    Sweep,
    covering,
    every,
    pairs,
    random_model,
)

pytestmark = pytest.mark.model
NAMES = ("any-of", "enum", "nested", "number+opt", "tree", "unicode")
SOME = {name: SCHEMAS[name] for name in NAMES}
BUDGETS = (1, 7, 20, 28, 33, 37, 41, 47, 56, 80)


@pytest.fixture(scope="module")
def speaks() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def folder(speaks: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("sweep") / "model", speaks)


@pytest.fixture(scope="module")
def swept(folder: Path) -> Iterator[Sweep]:
    sweep = Sweep.open(str(folder), SOME)
    sweep.run(covering(NAMES, BUDGETS)[:90])
    yield sweep
    sweep.engine._compiler.close()


def test_random_logits_close_every_call_and_drafts_of_the_host_change_nothing(
    swept: Sweep,
) -> None:
    counts, stats = swept.counts, swept.engine.stats()
    assert counts["drafted: equal"] > 60 and counts["refused as a schema"] == 0
    assert counts["plain: whole"] + counts["plain: whole call"] > 3
    assert counts["plain: whole, closed early"] > 10
    assert counts["plain: not opened: it does not fit"] > 10
    assert stats.drafted_tokens > stats.accepted_tokens > 0 < stats.closing_tokens


def test_drafts_of_the_device_change_nothing(folder: Path, speaks: Checkpoint) -> None:
    head = RandomHead(64, speaks.config.vocab, (0, 1))
    sweep = Sweep.open(str(folder), SOME, head)
    sweep.run(covering(NAMES[1:3], BUDGETS[3:5], ["head"])[:8])
    assert sweep.counts["drafted: equal"] > 4 and sweep.engine.stats().drafted_tokens > 0


def test_the_real_model_closes_every_call(speaks: Checkpoint) -> None:
    sweep = Sweep.open("smollm2", SOME)
    sweep.run([
        Point("enum", 28, "required", "greedy", "hermes", "oracle", 8),
        Point("enum", 20, "answer", "hot", "hermes", "adversarial", 3),
        Point("enum", 12, "auto", "hot", "hermes", "random", 5),
    ])  # fmt: skip
    assert sweep.counts["drafted: equal"] == 3
    assert sweep.counts["plain: whole, closed early"] + sweep.counts["plain: whole"] == 2


def test_streamed_is_unstreamed_over_a_gateway(
    folder: Path, speaks: Checkpoint, swept: Sweep
) -> None:
    layouts = ("hermes", "qwen3_coder", "harmony", "pythonic")
    points = [p for p in covering(NAMES, BUDGETS, seed=2) if p.layout in layouts][:32]
    counts = sweep_wire.ask(
        lambda: make(folder, drafts=RandomDrafts(speaks.config.vocab), max_drafts=3),
        speaks, swept.schemas, points,
    )  # fmt: skip
    assert counts["wire: not opened"] > 2 < counts["wire: text only"]
    assert counts["wire: call, closed early"] > 1


def test_a_covering_holds_every_two_values_and_all_holds_each_point_once() -> None:
    points = covering(NAMES, BUDGETS)
    met = {pair for point in points for pair in pairs(point)}
    sizes = [len(NAMES), len(BUDGETS), len(KINDS), len(DRAWS), len(LAYOUTS), len(DRAFTS), 9]
    assert len(met) == sum(
        left * right for at, left in enumerate(sizes) for right in sizes[at + 1 :]
    )
    assert points == covering(NAMES, BUDGETS)
    whole = list(every(NAMES[:1], BUDGETS[:2]))
    assert len(whole) == len(set(whole)) == 2 * 4 * 3 * 8 * 3 * 9


@pytest.mark.parametrize("kind", ["required", "answer", "auto"])
def test_the_judge_refuses_what_is_cut_open_or_called_something_else(
    swept: Sweep, kind: str
) -> None:
    """Of a request that went well."""
    point, end = next(
        (Point(*request, "", 0) if request[4] else Point(*request[:4], "hermes", "", 0), end)
        for request, end in swept._truth.items()
        if request[2] == kind and end.overflow == "closed"
    )  # type: ignore[arg-type]
    assert "closed early" in swept._judged(point, end)
    tokens = end.tokens
    for wrong in (
        End(tokens[:-2], "length", "closed", False),  # an open call
        End(tokens, "stop", "closed", False),
        End(tokens, "stop", "unopened", False),
        End(tokens * 3, "length", "closed", False),  # too long
        *([] if kind == "auto" else [End([], "length", "unopened", False)]),  # though it fits
    ):
        with pytest.raises((AssertionError, ValueError)):
            swept._judged(point, wrong)

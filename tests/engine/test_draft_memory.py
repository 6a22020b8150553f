"""A device draft where memory is short, and what of it a start runs.  No GPU, times nothing."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import engine.build as build  # noqa: E402
from cache.config import CacheConfig  # noqa: E402
from engine.checkpoint import open_checkpoint  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.cuda.runner import CudaRunner  # noqa: E402
from engine.cuda.warming import ordered  # noqa: E402
from engine.loop import Engine  # noqa: E402
from engine.messages import Sampling, Submit  # noqa: E402
from engine.timeline import Timeline  # noqa: E402
from tests.captured import KnowingChains  # noqa: E402
from tests.driver import Run  # noqa: E402
from tests.tiny import write_llama  # noqa: E402

ROWS = 5  # of a step: no bucket of its tokens or of its drawn rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(
        tmp_path_factory.mktemp("memory") / "model", hidden=32, heads=2, kv_heads=1, head_dim=32,
        intermediate=48, max_len=128,
    )


def make(folder, head) -> Engine:
    config = EngineConfig(
        model=str(folder), dtype="float32", device=DEVICE, threads=1, max_sequences=ROWS,
        max_batch_tokens=24, mixed_tokens=16, max_drafts=3, cache=CacheConfig(blocks=12),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "fused", lambda device: True)
        patch.setattr(CudaRunner, "compile", lambda *given: None)
        patch.setattr(CudaRunner, "warm", lambda *given: None)
        return Engine(config, open_checkpoint(str(folder)), head=head)


def asks() -> list[Submit]:
    return [Submit(f"r{i}", [7 * i + 1, 2, 3], 10, Sampling(temperature=1.0, seed=i))
            for i in range(2)]


class Noted(KnowingChains):
    """Knows one text; writes down how many rows each pass had."""

    def __init__(self) -> None:
        super().__init__({0: [1, 2, 3]}, 0, DEVICE)
        self.passes: set[tuple[str, int]] = set()

    def extend(self, kept, tokens, positions, slots, ends) -> None:
        self.passes.add(("extend", len(tokens)))

    def join(self, tokens, positions, slots, blocks) -> None:
        self.passes.add(("join", len(tokens)))

    def draw(self, chains, step, place, table, records) -> None:
        self.passes.add((f"draw {step}", len(place)))
        super().draw(chains, step, place, table, records)


def test_the_first_chain_that_does_not_fit_ends_no_request_and_changes_no_answer(
    folder, caplog
) -> None:
    wanted = Run(make(folder, None)).put(*asks()).drain().tokens
    texts = {one.sampling.seed: [*one.prompt, *wanted[one.id, 0]] for one in asks()}
    engine = make(folder, KnowingChains(texts, 0, DEVICE))
    graphs, tried = engine.runner._graphs, []
    real = graphs.run

    def run(key, body, **more) -> None:
        real(key, body, **more)
        if key[0] == "chain" and key[1] == 2:  # as a capture behind it would
            tried.append(key)
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs.run = run
    ended = Run(engine).put(*asks()).drain()
    assert ended.tokens == wanted and not ended.failed
    assert len(tried) == len({*tried}) > 0
    said = [record for record in caplog.records if "no chains of" in record.message]
    assert len(said) == len(tried)
    before = engine.guessing.accepted
    alone = Run(engine).put(asks()[0]).drain()  # chains of one sequence do fit
    assert alone.tokens["r0", 0] == wanted["r0", 0] and engine.guessing.accepted > before + 3
    assert engine.pool.used == 0


def test_the_step_that_pages_are_sized_by_has_every_pass_of_a_draft_at_its_largest(folder) -> None:
    head = Noted()
    make(folder, head).runner.largest()
    assert head.passes == {("join", ROWS), ("extend", 24),
                           *((f"draw {step}", ROWS) for step in range(3))}


def test_what_is_left_to_idle_moments_is_every_graph_that_a_step_may_want(
    folder, monkeypatch
) -> None:
    runner = make(folder, Noted()).runner
    monkeypatch.setattr(runner.picks, "tune", lambda group, size: None)
    monkeypatch.setattr(runner.picks, "save", lambda: None)
    keys: list[tuple] = []
    runner._graphs.run = lambda key, body, **more: keys.append(key)
    runner.warm(Timeline())
    while runner.idle():
        pass
    seen = [key for key in keys if key[0] in ("join", "extend", "chain")]
    assert {*seen} == {
        *(("extend", size) for size in runner.forward.sizes),
        *(("join", many) for many in (1, 2, 4, ROWS)),
        *(("chain", many, depth) for many in (1, 2, 4, ROWS) for depth in (1, 2, 3)),
    }
    assert len(seen) == len({*seen}), "nothing twice"


def test_a_device_without_room_for_a_graph_is_not_asked_for_more_in_idle_moments(folder) -> None:
    runner = make(folder, None).runner
    runner._later.extend(ordered(*runner._sizes)[0][:3])
    runner._graphs.full = True
    assert not runner.idle() and not runner._later

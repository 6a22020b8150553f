"""Drafts cost no prefix hits: the same turns with and without, in a roomy pool and in a short one.

The replay is that of tests/bench/bench_hits.py; most of its drafts are right.
"""

from __future__ import annotations

import pytest

from engine.scheduler import Scheduler
from tests.bench.bench_hits import MAX_LEN, WAYS, agents, replay
from tests.heads import one_thread
from tests.tiny import write_llama

alone = pytest.fixture(autouse=True, scope="module")(one_thread)

POINTS = 0.02  # of the prompts' tokens
ROOMY, SHORT = 512, 44  # blocks; the turns of six sessions fill about 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("hits") / "model", max_len=MAX_LEN)


def turns(seed: int = 1):
    """Without tool calls: pins would hang on how long the turns take."""
    return [[turn._replace(tool=False) for turn in row] for row in agents(6, 10, seed)]


@pytest.fixture(scope="module")
def plain(folder):
    """What is found without drafts, by pool, all of a round at once or each turn by itself."""
    together = turns()
    each = [[turn] for row in together for turn in row]
    return {
        name: (rounds, blocks, replay(folder, "off", rounds, blocks))
        for name, rounds, blocks in (
            ("roomy", together, ROOMY), ("roomy, alone", each, ROOMY), ("short, alone", each, SHORT)
        )
    }  # fmt: skip


def test_the_turns_share_much_and_a_short_pool_loses_some_of_it(plain):
    (*_, roomy), (*_, alone), (*_, short) = plain.values()
    assert roomy.share > 0.75 and alone.share > 0.75 and roomy.preemptions == 0
    assert short.share < alone.share - 0.02


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("name", ["roomy", "roomy, alone", "short, alone"])
def test_each_turn_finds_what_it_finds_without_drafts(folder, plain, way, name):
    """To the token; with a head a hit inside a block is one token shorter (engine/scheduler.py)."""
    rounds, blocks, off = plain[name]
    found = replay(folder, way, rounds, blocks, off)
    assert found.accepted > 300
    lost = [one - other for one, other in zip(off.cached, found.cached, strict=True)]
    if "eagle3" not in way:
        assert lost == [0] * len(lost)
    elif name != "short, alone":
        assert set(lost) <= {0, 1}
    assert found.share >= off.share - POINTS


def test_where_the_order_of_ends_decides_what_is_evicted_it_evens_out(folder):
    """Several at once in a short pool: a turn may find more or less, all of them as much."""
    gained = {way: [] for way in ("suffix", "eagle3")}
    for seed in range(4):
        rounds = turns(seed)
        off = replay(folder, "off", rounds, SHORT)
        for way, shares in gained.items():
            shares.append(replay(folder, way, rounds, SHORT, off).share - off.share)
    for shares in gained.values():
        assert sum(shares) / len(shares) >= -POINTS, gained


def test_a_block_that_is_dropped_at_each_hit_is_noticed(folder, plain, monkeypatch):
    """What other engines did with a draft: the last block of a hit was computed anew."""
    rounds, blocks, off = plain["roomy"]
    match = Scheduler._match
    monkeypatch.setattr(Scheduler, "_match", lambda self, seq: match(self, seq)[:-1])
    assert replay(folder, "suffix", rounds, blocks, off).share < off.share - POINTS

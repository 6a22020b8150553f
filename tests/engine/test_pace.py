"""How prompts share steps with streams: by measured time.  No clock here is real."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.config import WHOLE_BATCH, BadConfig, EngineConfig
from engine.cuda.buckets import sizes
from engine.messages import Sampling, Submit
from engine.pace import FIRST, LEAST, MARGIN, OUTLIER, SETTLED, STRETCH, Pace
from tests.driver import Run, make
from tests.tiny import write_llama

GREEDY = Sampling(temperature=0.0)
SIZES = sizes(2048)
GAP = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("pace") / "model", max_len=512)


def small(tokens: int) -> float:
    """Seconds of a step of a model that a GPU hardly notices."""
    return 0.0007 + tokens * 1.5e-6


def large(tokens: int) -> float:
    """Of an 8B: read-bound first, then bound by arithmetic."""
    return max(0.0045, tokens * 2.4e-5)


def padded(tokens: int) -> int:
    return next(size for size in SIZES if size >= tokens)


def learned(device, streams: int, steps: int = 60) -> tuple[Pace, list[int]]:
    """A pace after so many steps of streams and as many prompt tokens as it allows."""
    pace, budgets = Pace(SIZES, GAP, 2048), []
    pace.observe(streams, device(padded(streams)))
    for _ in range(steps):
        budgets.append(min(pace.budget(streams), 2048 - streams))
        tokens = streams + budgets[-1]
        pace.observe(tokens, device(padded(tokens)))
    return pace, budgets


@pytest.mark.parametrize("streams", [1, 32, 200])
def test_a_small_model_gives_prompts_the_whole_batch(streams):
    _, budgets = learned(small, streams)
    assert budgets[-1] == 2048 - streams


@pytest.mark.parametrize("streams", [1, 32, 100])
def test_a_large_model_gives_prompts_what_it_computes_for_nearly_nothing(streams):
    """Up to the 187 tokens from which arithmetic bounds it; a size is 192."""
    _, budgets = learned(large, streams)
    assert all(large(padded(streams + budget)) <= GAP for budget in budgets)
    assert streams + budgets[-1] == 192


def test_it_takes_few_steps_to_find_the_best():
    _, budgets = learned(large, 8)
    assert budgets.index(budgets[-1]) <= 6 and set(budgets[12:]) == {184}


def test_nothing_is_assumed_of_a_device_that_was_not_measured():
    pace = Pace(SIZES, GAP, WHOLE_BATCH)
    assert pace.budget(5) == FIRST
    pace.observe(5, 0.0)
    assert pace.budget(5) == FIRST and pace.expected(5) == 0


def test_without_a_gap_the_budget_is_the_one_that_was_given():
    pace = Pace(SIZES, 0.0, 192)
    pace.observe(10, 5.0)
    assert pace.budget(10) == pace.budget(1000) == 192


def test_a_given_most_is_kept_however_fast_the_device_is():
    pace = Pace(SIZES, GAP, 100)
    for tokens in SIZES:
        pace.observe(tokens, 1e-4)
    assert pace.budget(1) == 100


def test_drafts_and_streams_are_counted_in_the_step_that_they_share_with_a_prompt():
    pace = Pace(SIZES, GAP, 2048)
    for size in SIZES:
        pace.observe(size, large(size))
    assert pace.budget(8) - pace.budget(108) == 100


def test_streams_that_are_beyond_the_gap_by_themselves_still_let_prompts_on():
    pace = Pace(SIZES, GAP, 2048)
    for tokens in SIZES:
        pace.observe(tokens, 0.05 + tokens * 5e-5)
    budget = pace.budget(32)
    assert budget > LEAST
    assert 0.05 + (32 + budget) * 5e-5 <= STRETCH * (0.05 + 32 * 5e-5)
    for tokens in SIZES:
        pace.observe(tokens, tokens * 0.01)
    for _ in range(100):
        pace.observe(64, 10.0)
    assert pace.budget(64) >= LEAST


def test_a_larger_step_never_costs_less_nor_more_than_its_tokens_are_worth():
    chance = random.Random(5)
    pace = Pace(SIZES, 10.0, 2048)
    for _ in range(500):
        size = chance.choice(SIZES)
        usual, seconds = pace.expected(size), chance.random()
        pace.observe(size, seconds)
        if usual:  # the newest average is never overruled
            newest = pace.expected(size)
            assert min(usual, seconds) <= newest <= min(max(usual, seconds), OUTLIER * usual)
            assert newest != pytest.approx(usual) or seconds == pytest.approx(usual, rel=0.1)
        costs = [pace.expected(size) for size in SIZES]
        assert costs == sorted(costs)
        rates = [cost / size for cost, size in zip(costs, SIZES, strict=True)]
        assert all(one >= two * (1 - 1e-9) for one, two in pairwise(rates))


def test_a_whole_batch_of_prompts_says_nothing_good_of_a_step_with_streams():
    """The first step of all is a large one; what streams cost alone is only bounded by it."""
    pace = Pace(SIZES, GAP, 2048)
    pace.observe(2048, large(2048))
    assert pace.budget(3) == LEAST
    pace.observe(3 + LEAST, large(80))
    assert LEAST < pace.budget(3) <= GAP / large(80) * 80


def test_what_was_not_seen_is_bounded_by_what_was():
    pace = Pace(SIZES, GAP, 2048)
    pace.observe(64, 0.004)
    assert pace.expected(1) == pace.expected(64) == 0.004
    assert pace.expected(512) == pytest.approx(8 * 0.004)
    pace.observe(512, 0.01)
    assert pace.expected(512) == 0.01  # a first measurement replaces a bound
    assert pace.expected(1024) == pytest.approx(0.02)
    assert pace.expected(256) == 0.01 and pace.expected(128) == pytest.approx(0.008)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_stall_closes_no_bucket_for_long(where):
    """As when a kernel is compiled in the middle of a run."""
    pace, budgets = learned(large, 8)
    best = 8 + budgets[-1]
    pace.observe([8, best, 128][where], 3.0)
    taken = []
    for _ in range(SETTLED + 10):
        taken.append(8 + pace.budget(8))
        pace.observe(taken[-1], large(padded(taken[-1])))
        pace.observe(8, large(8))
    assert taken[-1] == best and max(large(size) for size in taken) <= GAP


def test_a_stall_in_the_very_first_step_is_forgotten():
    pace = Pace(SIZES, GAP, 2048)
    pace.observe(512, 4.0)
    for _ in range(20):
        tokens = 8 + pace.budget(8)
        pace.observe(tokens, small(padded(tokens)))
        pace.observe(8, small(8))
    assert pace.budget(8) == 2040


def test_longer_contexts_are_noticed_within_a_few_steps_and_shorter_ones_too():
    pace, before = learned(large, 32)
    late = 0
    for _ in range(40):
        tokens = 32 + pace.budget(32)
        seconds = large(padded(tokens)) * 1.8
        late += seconds > GAP
        pace.observe(tokens, seconds)
    assert late <= 8 and large(padded(32 + pace.budget(32))) * 1.8 <= GAP
    for _ in range(60):
        tokens = 32 + pace.budget(32)
        pace.observe(tokens, large(padded(tokens)))
        pace.observe(32, large(32))
    assert pace.budget(32) == before[-1]


@pytest.mark.parametrize(
    ("settings", "gap_s", "mixed"),
    [
        ({"device": "cuda"}, 0.02, WHOLE_BATCH),
        ({"device": "cpu"}, 0.0, 192),
        ({"device": "cuda", "mixed_tokens": 300}, 0.0, 300),
        ({"device": "cuda", "mixed_tokens": 300, "max_gap_s": 0.05}, 0.05, 300),
        ({"device": "cuda", "max_gap_s": 0.0}, 0.0, WHOLE_BATCH),
        ({"device": "cpu", "max_gap_s": 0.2}, 0.2, 192),
    ],
)
def test_a_fixed_budget_replaces_the_measured_one_unless_both_are_asked_for(settings, gap_s, mixed):
    config = EngineConfig(model="m", **settings).resolved(settings["device"])
    assert (config.max_gap_s, config.mixed_tokens) == (gap_s, mixed)
    assert config.resolved(settings["device"]) == config


@pytest.mark.parametrize("gap_s", [-0.1, 20_000, float("nan")])
def test_a_gap_that_makes_no_sense_is_refused(gap_s):
    with pytest.raises(BadConfig, match="max_gap_s is"):
        EngineConfig(model="m", max_gap_s=gap_s).check()


class Timed:
    """An engine whose steps take what `device` says; when which token came."""

    def __init__(self, engine, device) -> None:
        self.now, self.gaps, self.began = 0.0, {}, {}
        self.first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.run = Run(engine)
        collect = engine.runner.collect

        def timed(depth):
            flights = collect(depth)
            for flight in flights:
                flight.seconds = device(flight.plan.tokens)
                self.now += flight.seconds
            return flights

        engine.runner.collect = timed

    def put(self, name: str, length: int, most: int) -> None:
        chance = random.Random(name)
        prompt = [chance.randrange(256) for _ in range(length)]
        self.run.put(Submit(name, prompt, most, GREEDY))
        self.began[name] = self.now

    def step(self) -> None:
        before = {key: len(tokens) for key, tokens in self.run.tokens.items()}
        self.run.step()
        for (name, index), tokens in self.run.tokens.items():
            if len(tokens) > before.get((name, index), 0):
                if name in self._last:
                    self.gaps.setdefault(name, []).append(self.now - self._last[name])
                self._last[name] = self.now
                self.first.setdefault(name, self.now - self.began[name])


def slow(tokens: int) -> float:
    return 0.004 + tokens * 8e-5


def crowd(folder, depth: int, **settings) -> Timed:
    """Six streams, then four prompts of 300 tokens at once, three times."""
    engine = make(folder, depth=depth, max_batch_tokens=512, **settings)
    timed = Timed(engine, slow)
    for i in range(6):
        timed.put(f"stream{i}", 20, 200)
    for _ in range(4):
        timed.step()
    for i in range(12):
        timed.put(f"prompt{i:02}", 300, 4)
        if i % 4 == 3:
            timed.step()
            timed.step()
    for _ in range(60):
        timed.step()
    assert len(timed.first) == 18
    return timed


@pytest.mark.parametrize("depth", [0, 1])
def test_under_load_no_gap_is_long_and_no_prompt_waits_more_than_its_share(folder, depth):
    """Streams stay within the gap; prompts wait for the tokens before them, not for streams."""
    timed = crowd(folder, depth, max_gap_s=0.025, mixed_tokens=512)
    gaps = sorted(gap for name in timed.gaps if "stream" in name for gap in timed.gaps[name])
    assert gaps[int(0.99 * len(gaps))] <= 0.025 and gaps[-1] <= 1.3 * 0.025
    waits = [timed.first[f"prompt{i:02}"] for i in range(12)]
    budget = max(s for s in SIZES if slow(s) <= MARGIN * 0.025) - 12  # streams, and young ones
    share = 12 * 300 / budget * 0.025
    assert max(waits) <= share, (max(waits), share)
    fixed = crowd(folder, depth, mixed_tokens=64)
    assert max(waits) < max(fixed.first[f"prompt{i:02}"] for i in range(12))
    whole = crowd(folder, depth, mixed_tokens=512)
    assert max(max(gaps) for gaps in whole.gaps.values()) > 1.3 * 0.025


def test_a_step_on_the_cpu_is_measured(folder):
    engine = make(folder)
    seen = []
    engine.scheduler.pace.observe = lambda tokens, seconds: seen.append((tokens, seconds))
    Run(engine).put(Submit("r", [1, 2, 3], 2, GREEDY)).drain()
    assert [tokens for tokens, _ in seen] == [3, 1]
    assert all(0 < seconds < 10 for _, seconds in seen)


def test_without_a_measurement_or_a_gap_a_queue_changes_nothing():
    assert Pace(SIZES, GAP, 2048).budget(5, 10**6) == FIRST
    assert Pace(SIZES, 0.0, 700).budget(5, 10**6) == 700

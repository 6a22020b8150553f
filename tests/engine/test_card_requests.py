"""What a request may ask for and go through, on a real card.  Times nothing; see test_card.py.

    SLIPSTREAM_GGUF=... python -m pytest -m gpu -s tests/engine/test_card_requests.py

Choices, penalties, biases, stops, grammars, drafts of the device, pauses, deadlines, a step without
room: bit for bit where the KV is the same, by counted near-ties where it was computed anew.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from msgspec.structs import replace

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.messages import Pause, Resume, Sampling, Submit
from tests import card_rig
from tests.card_rig import (
    DRAWS,
    NEAR,
    PROMPT,
    ROWS,
    Bits,
    Rig,
    counted,
    differing,
    gap,
    greedy,
    record,
    tokens,
    tokens_of,
)
from tests.driver import Run
from tests.engine.test_exactness import GRAMMARS
from tests.proposers import AdversarialDrafts, KnowingHead, OracleDrafts

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(300)]

HELD = 5  # min_tokens
SHAPED = [
    Sampling(temperature=0.7, repetition=1.3, frequency=0.4, presence=0.3, logprobs=0),
    Sampling(temperature=0.0, repetition=1.2, presence=0.5, logprobs=0),
    Sampling(temperature=0.8, top_p=0.8, top_k=40, min_p=0.02, logprobs=0),
    Sampling(temperature=0.9, frequency=1.0, bias=((65, 6.0), (66, -6.0)), logprobs=0),
    Sampling(temperature=1.0, min_tokens=HELD, logprobs=0),
]


@pytest.fixture(scope="module")
def smol():
    return card_rig.smol()


def shaped(rig: Rig, count: int) -> list[Submit]:
    """Requests of every way to draw, some with two choices, a grammar or stop ids they may meet."""
    stops = rig.engine.hello.stop_ids
    return [
        Submit(
            f"s{i}", rig.prompt(PROMPT, 3000 + i), 16 + i % 13,
            replace(SHAPED[i % 5], seed=i), n=1 + (i % 3 == 0),
            stop_ids=[*stops, *range(i, rig.engine.hello.vocab, 6000)] if i % 2 else [],
            grammar=GRAMMARS["json"] if i % 7 == 6 else None,
        )
        for i in range(count)
    ]


# ---- bit for bit ---------------------------------------------------------------------------------


def test_whatever_a_request_asks_for_it_gets_the_same_in_a_crowd(smol):
    asks = shaped(smol, 90)
    wanted = smol.alone(*asks)
    for size in (7, 30, 90):
        seen = smol.widest()
        crowd = random.Random(size).sample(asks, size)
        found = smol.run(*crowd)
        assert seen.rows <= ROWS and (size < 90 or seen.rows > 90)
        assert not differing(found, {key: wanted[key] for key in found}), size
    some = asks[:20]
    expected = smol.alone(*some)
    for depth in (0, 1):
        with smol.using(depth=depth):
            assert not differing(smol.run(*some), expected), depth
    record("shaped = shaped in a crowd",
           f"{len(wanted)} texts, {tokens_of(wanted)} tokens, crowds of 7, 30, 90: 0 differ")


@pytest.mark.parametrize("kind", [OracleDrafts, AdversarialDrafts])
def test_whatever_a_request_asks_for_drafts_do_not_change_it(smol, kind):
    asks = shaped(smol, 10)  # 14 choices, of 9 rows at most: 126
    wanted = smol.alone(*asks)
    known = {key: [token for token, _ in text] for key, text in wanted.items()}
    stop = smol.engine.hello.stop_ids[0]
    accepted = smol.engine.guessing.accepted
    for k in (1, 3, 8):
        given = (known, 2) if kind is OracleDrafts else (known, smol.engine.hello.vocab, stop, 3)
        seen = smol.widest()
        with smol.using(drafts=kind(*given), max_drafts=k):
            assert not differing(smol.run(*asks), wanted), k
        assert seen.rows <= ROWS
    accepted = smol.engine.guessing.accepted - accepted
    assert accepted > 100
    record("shaped, drafts = none",
           f"{kind.__name__}, k = 1, 3, 8: {3 * tokens_of(wanted)} tokens, {accepted} drafts "
           "accepted: 0 differ")


def test_choices_fork_without_changing_the_first_one(smol):
    for number, draw in enumerate(DRAWS):
        one = Submit(f"one{number}", smol.prompt(PROMPT, 3500), 24, replace(draw, seed=9))
        (text,) = smol.alone(one).values()
        found = smol.run(replace(one, id="four", n=4))
        assert len(found) == 4 and found["four", 0] == text
        others = [found["four", i] for i in (1, 2, 3)]
        if draw.temperature:
            assert len({tuple(token for token, _ in other) for other in (text, *others)}) == 4
        else:
            assert all(other == text for other in others)
    record("choices", "4 choices, greedy and sampled: the first as alone, greedy ones equal")


def test_a_choice_that_is_forked_off_uncached_leaves_by_near_ties_only(smol):
    """The fork computes the prompt's last token alone, its leader within the prompt's chunk."""
    asks = [replace(ask, n=3) for ask in greedy(smol, 16, 200, 3600)]
    gaps = []
    with smol.using(prefix_caching=False):
        for ask in asks:
            run = Run(smol.engine).put(ask).drain()
            assert not run.failed and smol.engine.pool.used == 0
            first = smol.bits(run, (ask.id, 0))
            for index in (1, 2):
                key = (ask.id, index)
                pair = tokens({key: smol.bits(run, key)}), tokens({key: first})
                gaps += [gap(run, *place) for place in differing(*pair)]
    assert all(value < NEAR for value in gaps), gaps
    record("forks of uncached prompts", f"32 greedy forks: {len(gaps)} with another token, all "
                                        f"near-ties {gaps}")


def test_penalties_biases_and_held_stops_do_what_they_say(smol):
    vocab, length = smol.engine.hello.vocab, 60
    prompt = smol.prompt(PROMPT, 3700)
    never = Sampling(temperature=0.0, presence=1e4, logprobs=0)
    only = Sampling(temperature=1.0, seed=3, bias=((77, 1e4), (78, 2e4)), min_tokens=HELD)
    found = Run(smol.engine).put(
        Submit("never twice", prompt, length, never),
        Submit("held", prompt, length, only, stop_ids=[78]),
        Submit("banned", prompt, length, Sampling(
            temperature=0.0, bias=tuple((id, -1e4) for id in range(0, 2000, 2)))),
    ).drain()
    assert not found.failed and not found.refused
    assert len(set(found.tokens["never twice", 0])) == length
    assert found.tokens["held", 0] == [77] * HELD + [78]
    assert found.finish(("held", 0)) == "stop"
    assert not set(found.tokens["banned", 0]) & set(range(0, 2000, 2))
    assert all(0 <= token < vocab for text in found.tokens.values() for token in text)
    record("penalties, biases, min_tokens", f"{length} tokens without a repeat; stop after {HELD}")


def test_a_stop_that_nobody_could_foresee_ends_the_text_there(smol):
    asks = smol.asks(60)
    wanted = smol.alone(*asks)
    stopped = {}
    for ask in asks:
        text = wanted[ask.id, 0]
        stop = text[len(text) // 2][0]
        end = next(i for i, (token, _) in enumerate(text) if token == stop) + 1
        stopped[ask.id, 0] = text[:end]
    given = [replace(ask, stop_ids=[text[-1][0]])
             for ask, text in zip(asks, stopped.values(), strict=True)]
    before = smol.engine.scheduler.wasted
    assert not differing(smol.run(*given), stopped)
    wasted = smol.engine.scheduler.wasted - before
    assert 0 < wasted <= len(asks)
    record("stops", f"60 unforeseen: texts end there, {wasted} rows in vain")


def test_a_paused_request_that_lost_its_slot_goes_on_as_if_nothing_happened(smol):
    asks = smol.asks(ROWS)
    wanted = smol.alone(*asks)
    others = [Submit(f"o{i}", smol.prompt(PROMPT, i), 12, DRAWS[1]) for i in range(60)]
    run, most = Run(smol.engine).put(*asks), 0
    for _ in range(6):
        run.step()
    run.put(*(Pause(ask.id) for ask in asks[:60]), *others)
    for _ in range(12):
        run.step()
        most = max(most, len(smol.engine.scheduler.running))
    assert most > ROWS, "every paused sequence kept its slot"
    run.put(*(Resume(ask.id) for ask in asks[:60])).drain()
    assert not run.failed and smol.engine.pool.used == 0
    found = {key: smol.bits(run, key) for key in wanted}
    assert not differing(found, wanted)
    record("paused and resumed", f"60 of {ROWS}, {most} sequences over {ROWS} slots: 0 differ")


def test_a_deadline_ends_its_request_and_nobody_else(smol):
    asks = smol.asks(40)
    wanted = smol.alone(*asks)
    late = [Submit(f"l{i}", smol.prompt(PROMPT, i), 4000, DRAWS[1], deadline_s=0.05)
            for i in range(20)]
    run = Run(smol.engine).put(*late, *asks).drain()
    assert set(run.failed) == {ask.id for ask in late}
    assert {failed.code for failed in run.failed.values()} == {"deadline_exceeded"}
    assert smol.engine.pool.used == 0 and not smol.engine.intake.arrived
    found = {key: smol.bits(run, key) for key in wanted}
    assert not differing(found, wanted)
    record("deadlines", f"20 passed, {tokens_of(found)} tokens of 40 others: 0 differ")


def test_drafts_that_the_device_makes_change_no_bit():
    """A head of random weights, which knows half of the answers; the same engine without it."""
    model = os.environ["SLIPSTREAM_GGUF"]
    checkpoint = open_checkpoint(model)
    shape = checkpoint.config
    head = KnowingHead(shape.hidden, shape.vocab, (0, shape.layers // 2), answers={})
    config = EngineConfig(
        model=model, device="cuda", max_sequences=16, max_batch_tokens=256, mixed_tokens=64,
        max_drafts=4, cache=CacheConfig(blocks=400),
    )
    rig = Rig("a head", Engine(config, checkpoint, head=head))
    runner = rig.engine.runner
    assert runner.depth == 0
    asks = [*rig.asks(8), *shaped(rig, 4)]
    runner.head = None
    wanted = rig.alone(*asks)
    runner.head = head
    assert not rig.engine.guessing.drafted
    head.answers = {ask.sampling.seed: (PROMPT, [token for token, _ in wanted[ask.id, 0]])
                    for ask in asks[:8:2]}
    assert not differing(rig.run(*asks), wanted)
    engine = rig.engine
    assert head.steps > 20 and engine.guessing.drafted > engine.guessing.accepted > 20
    record("drafts of the device", f"{tokens_of(wanted)} tokens, {engine.guessing.accepted} of "
                                   f"{engine.guessing.drafted} drafts accepted: 0 differ")
    engine.close()


# ---- breaking one thing must be noticed ----------------------------------------------------------


def broken(rig: Rig, monkeypatch, what: str) -> None:
    """Let steps with drafts settle something wrong: a column of their integers, or the masks."""
    settling = rig.engine.runner.settling
    prepare, supply = settling.prepare, settling.supply

    def prepared(rows, *given):
        draw = prepare(rows, *given)
        if what != "masks" and any(row.draft for row in rows):
            column = settling._buckets[draw.size].hosts[draw.staged][what][: draw.count]
            column[1:] = 0 if what == "offset" else column[:-1].copy()
        return draw

    def supplied(draw, masked):
        if what == "masks":
            only = dict(zip(masked.only, [*[*masked.only.values()][1:], 0], strict=True))
            masked = masked._replace(masks=masked.masks.roll(1, 0), only=only)
        supply(draw, masked)

    monkeypatch.setattr(settling, "prepare", prepared)
    monkeypatch.setattr(settling, "supply", supplied)


@pytest.mark.parametrize("what", ["", "position", "picked", "slot", "offset", "masks"])
def test_a_wrong_noise_key_row_slot_history_or_mask_is_noticed(smol, monkeypatch, what):
    """All tests above compare bits: they would see it.  With nothing broken nothing differs."""
    plain = [replace(ask, sampling=replace(SHAPED[i % 2], seed=i), n=1, grammar=None)
             for i, ask in enumerate(shaped(smol, 10))]
    asks = [replace(ask, id=f"b{i}") for i, ask in enumerate(plain)]
    if what == "masks":
        asks = [replace(ask, id=f"m{i}", grammar=GRAMMARS["json"]) for i, ask in enumerate(asks)]
    wanted = smol.alone(*asks)
    known = {key: [token for token, _ in text] for key, text in wanted.items()}
    if what:
        broken(smol, monkeypatch, what)
    with smol.using(drafts=OracleDrafts(known, 2), max_drafts=8) as engine:
        run = Run(engine).put(*asks).drain()
    assert (run.tokens == known) == (what == "")


# ---- counted -------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_and_a_whole_one_differ_by_near_ties_only(smol):
    asks = greedy(smol, 24, 700, 4000)
    with smol.using(prefix_caching=False):
        wanted: Bits = {}
        for ask in asks:
            wanted |= smol.run(ask)
    with smol.using(prefix_caching=False, max_batch_tokens=201, mixed_tokens=47):
        counted(smol, "chunked against whole", asks, wanted)


@pytest.mark.parametrize("length", [72, 129, 200, 256, 501])
def test_what_is_cached_is_found_to_the_token(smol, length):
    def found(tokens: int) -> int:
        """What is worth a copy: all but a short beginning of a block."""
        rest = tokens % smol.engine.pool.size
        return tokens - rest if rest < smol.engine.pool.part else tokens

    shared = smol.prompt(length, 4100 + length)
    first = Submit(f"f{length}", shared, 4, DRAWS[0])
    second = Submit(f"h{length}", [*shared, 5, 6, 7], 24, Sampling(temperature=0.0, logprobs=2))
    with smol.using(prefix_caching=False):
        wanted = smol.run(second)
    smol.run(first)
    run = counted(smol, f"{length} tokens cached", [second], wanted)
    assert {out.cached for out in run.outs[second.id, 0]} == {found(length)}
    again = Run(smol.engine).put(replace(second, id="again")).drain()
    assert {out.cached for out in again.outs["again", 0]} == {found(length + 2)}


class Short:
    """Lacks memory for some steps: before their launch, or when their settling has run."""

    def __init__(self, graphs, phase: str, steps: set[int]) -> None:
        self.real, self.phase, self.steps = graphs.run, phase, steps
        self.seen = self.raised = 0

    def __call__(self, key, body) -> None:
        self.seen += 1
        fails = self.seen in self.steps
        self.raised += fails
        if fails and self.phase == "before":
            raise torch.OutOfMemoryError("no room")
        self.real(key, body)
        if fails:
            raise torch.OutOfMemoryError("no room for a graph")


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_without_room_is_tried_again_smaller(smol, monkeypatch, phase, depth):
    asks = greedy(smol, 24)
    wanted = smol.alone(*asks)
    before = smol.engine.scheduler.preemptions
    short = Short(smol.engine.runner._graphs, phase, {3, 9, 10, 20})
    monkeypatch.setattr(smol.engine.runner._graphs, "run", short)
    with smol.using(depth=depth, prefix_caching=False):
        counted(smol, f"no room {phase} the launch, depth {depth}", asks, wanted)
    assert short.raised == 4 and smol.engine.scheduler.preemptions - before >= 4

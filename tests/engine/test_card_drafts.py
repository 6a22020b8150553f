"""Drafts of the device on a real card: whatever it guesses, no bit of an answer.  Times nothing.

    SLIPSTREAM_GGUF=... python -m pytest -m gpu -s tests/engine/test_card_drafts.py

The chains are captured behind settle, where what was drawn is known to the device alone.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
from msgspec.structs import replace

from cache.config import CacheConfig
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.loop import Engine
from engine.messages import Submit
from engine.proposer import ASLEEP, FREE
from tests import card_rig
from tests.captured import KnowingChains
from tests.card_rig import DRAWS, PROMPT, ROWS, Rig, differing, record, tokens_of
from tests.engine.test_exactness import GRAMMARS

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(300)]

MOST = 7  # drafts a sequence
SEQUENCES = ROWS // (MOST + 1)


@pytest.fixture(scope="module")
def smol():
    return card_rig.smol()


def drafting(head, most: int = MOST) -> Rig:
    model = os.environ["SLIPSTREAM_GGUF"]
    config = EngineConfig(
        model=model, device="cuda", max_sequences=SEQUENCES, max_batch_tokens=1024,
        mixed_tokens=64, max_drafts=most, cache=CacheConfig(blocks=2000),
    )
    return Rig("drafting", Engine(config, open_checkpoint(model), head=head))


def asks(rig: Rig, count: int, first: int = 0) -> list[Submit]:
    """Requests whose seeds tell them apart; every fourth has a grammar."""
    stops = rig.engine.hello.stop_ids
    return [
        Submit(
            f"d{i}", rig.prompt(PROMPT, 5000 + i), 24 + i % 17, replace(DRAWS[i % 3], seed=i),
            stop_ids=stops if i % 4 == 3 else [], grammar=GRAMMARS["json"] if i % 4 == 3 else None,
        )
        for i in range(first, first + count)
    ]


def known(wanted, submits: list[Submit]) -> dict[int, list[int]]:
    return {one.sampling.seed: [*one.prompt, *(token for token, _ in wanted[one.id, 0])]
            for one in submits}


@pytest.mark.parametrize("wrong", [0, 3, 1])
def test_chains_of_the_device_change_no_bit(smol, wrong):
    submits = asks(smol, 3 * SEQUENCES)
    wanted = smol.alone(*submits)
    head = KnowingChains(known(wanted, submits), wrong, "cuda")
    rig = drafting(head)
    for one in submits:  # fills the cache, as `alone` does
        rig.run(replace(one, max_tokens=1, grammar=None))
    lengths = itertools.cycle([MOST, 0, 3, FREE, FREE, 1, ASLEEP, 5, 2])
    for ahead in (lambda *given: MOST, lambda *given: next(lengths)):
        rig.engine.guessing.ahead = ahead
        before = rig.engine.guessing.accepted, rig.engine.guessing.drafted
        seen = rig.widest()
        found = rig.run(*random.Random(wrong).sample(submits, len(submits)))
        assert not differing(found, wanted)
        assert seen.rows <= ROWS
        accepted = rig.engine.guessing.accepted - before[0]
        drafted = rig.engine.guessing.drafted - before[1]
        assert drafted > 500 and (accepted > drafted * 0.9) == (wrong == 0)
        record("chains of the device", f"wrong every {wrong or 'never'}: {tokens_of(wanted)} "
               f"tokens, {accepted} of {drafted} drafts accepted in {seen.steps} steps: 0 differ")
    assert head.extended and head.joined


def test_a_head_that_knows_nothing_changes_no_bit_either(smol):
    from speculative.captured import CapturedEagle3
    from speculative.head import Head, shapes
    from speculative.train.unroll import head_config

    shape = head_config(open_checkpoint(os.environ["SLIPSTREAM_GGUF"]).config, 8192)
    noise = torch.Generator().manual_seed(1)
    weights = {
        name: (torch.ones(size) if len(size) == 1 else
               torch.randn(size, generator=noise) * size[-1] ** -0.5).to("cuda", torch.bfloat16)
        for name, size in shapes(shape).items()
    }
    embedding = (torch.randn(shape.vocab, shape.hidden, generator=noise)).to("cuda", torch.bfloat16)
    kept = torch.arange(0, 6 * 8192, 6, device="cuda")
    rig = drafting(CapturedEagle3(Head(shape, weights, embedding, kept, 2048), 2048))
    submits = asks(smol, 2 * SEQUENCES, 100)
    wanted = smol.alone(*submits)
    for one in submits:
        rig.run(replace(one, max_tokens=1, grammar=None))
    assert not differing(rig.run(*submits), wanted)
    drafted = rig.engine.guessing.drafted
    assert drafted > 500
    record("a random head", f"{tokens_of(wanted)} tokens, {drafted} drafted: 0 differ")

"""A head that reads a neighbour of its layers is found out at start, one of no use is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.model_config import BadCheckpoint
from engine.noise import gumbel
from speculative.probe import Probed, probe
from speculative.witness import SEED, Witness
from tests.heads import F64, Target, config, head_of, learnt, one_thread
from tests.tiny import write_llama

alone = pytest.fixture(autouse=True, scope="module")(one_thread)

TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("probe") / "model", layers=7, max_len=128)
    return Target(folder)


@pytest.fixture(scope="module")
def witness(target):
    return Witness(target.model, target.shape)


@pytest.fixture(scope="module")
def texts(witness):
    return witness.write([[i] for i in range(4)], 30)


class Layered:
    """A made-up target: each of its layers tells what it will say next, in a way of its own."""

    layers = 7

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(8)
        self.told = torch.randn(self.layers + 1, 12, 64, generator=noise, dtype=F64)

    def read(self, tokens: list[int], boundaries: tuple[int, ...]):
        said = torch.tensor([(a * 31 + b * 17) % 12 for a, b in zip(tokens, [0, *tokens])])
        ahead = said.roll(-1)  # row i: what the target will say behind x[i + 1]
        return torch.cat([self.told[b][ahead] for b in boundaries], dim=-1), said * 20


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_the_layers_that_a_head_learnt_on_are_found(shift, caplog):
    target, noise = Layered(), torch.Generator().manual_seed(9)
    texts = [torch.randint(0, 259, (42,), generator=noise).tolist() for _ in range(5)]
    shape = config(taps=TAPS, draft_vocab=259)
    head = learnt(target, texts[:3], shape, max_len=128, steps=30, shift=shift).head
    with caplog.at_level(logging.INFO, logger="speculative.probe"):
        found = probe(head, target, texts[3:])
    assert set(found.agreement) == {-1, 0, 1} and found.guesses == 2 * 40
    assert found.best == shift
    assert found.agreement[shift] > 0.6
    assert max(share for other, share in found.agreement.items() if other != shift) < 0.4
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert all(str([b + other for b in TAPS]) in told[0][1] for other in (-1, 0, 1))
    warned = [words for level, words in told if level == logging.WARNING]
    assert bool(warned) is (shift != 0)
    if warned:
        assert f"serve it with boundaries {[b + shift for b in TAPS]}" in warned[0]


def test_a_head_that_guesses_nothing_is_refused(target, witness, texts):
    head = head_of(config(taps=TAPS, draft_vocab=259), max_len=128)
    with pytest.raises(BadCheckpoint, match=r"guesses .*% of the model.*below 15%"):
        probe(head, witness, texts)
    assert probe(head, witness, texts, least=0.0).guesses == 4 * 29


def test_shifts_that_the_target_does_not_have_are_left_out(target, witness, texts):
    for taps, wanted in (((0, 3, 5), {0, 1}), ((2, 4, 7), {-1, 0}), ((0, 4, 7), {0})):
        head = head_of(config(taps=taps, draft_vocab=259), max_len=128)
        assert set(probe(head, witness, texts, least=0.0).agreement) == wanted


def test_too_little_text_says_nothing(witness):
    head = head_of(config(taps=TAPS, draft_vocab=259), max_len=128)
    with pytest.raises(ValueError, match="3 guesses say nothing"):
        probe(head, witness, [[1, 2, 3, 4, 5], [1, 2], []])


def test_equal_shares_do_not_move_the_layers():
    assert Probed({-1: 0.5, 0: 0.5, 1: 0.5}, 99).best == 0
    assert Probed({-1: 0.5, 0: 0.2, 1: 0.4}, 99).best == -1


# ---- the witness -------------------------------------------------------------------------------


def test_a_witness_reads_what_the_model_computes(target, witness):
    tokens = torch.randint(0, 259, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    for boundaries in ((0, 3, 7), (1, 2, 6), TAPS):
        aux, said = witness.read(tokens, boundaries)
        streams, logits = target.read(tokens, boundaries)
        torch.testing.assert_close(aux, streams)
        assert torch.equal(said, logits.argmax(-1))
    assert target.model.taps == tuple(range(-1, 7)), "the model itself was changed"


def test_a_witness_writes_what_reading_it_again_would_draw(target, witness):
    """Step by step through pages = at once: each drawn id is the arg-max with its noise."""
    texts = witness.write([[3, 4], [9, 1], [3, 4]], 70)  # beyond one block
    assert texts == witness.write([[3, 4], [9, 1], [3, 4]], 70)
    assert texts[0] != texts[2], "each has noise of its own"
    for choice, text in enumerate(texts):
        assert len(text) == 72
        _, logits = target.read(text, (0,))
        noise = gumbel(torch.full((70,), SEED), torch.full((70,), choice), torch.arange(2, 72),
                       259, torch.float32)
        assert text[2:] == (logits[1:-1].float() + noise).argmax(-1).tolist()

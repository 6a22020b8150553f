"""Philox against its published vectors, the noise against its layout and law.  Draws no token."""

from __future__ import annotations

import math

import pytest
import torch

from engine import noise
from engine.noise import gumbel, gumbel_at, philox

WORD = 0xFFFFFFFF
# Random123's known answers for philox4x32, 10 rounds: counter, key, output.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(autouse=True)
def threads():
    """One: tensors this small are slower on several, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The paper's round function on Python integers, which never wrap."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & WORD, low >> 32 ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "output"), ANSWERS)
def test_philox_gives_the_published_answers(counter, key, output):
    words = philox(*(ints(word) for word in (*key, *counter)))
    assert tuple(int(word) for word in words) == output


def test_philox_broadcasts_its_words_and_never_leaves_32_bits():
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 1), (4, 1), (4, 1), (1,), (7,), ()]
    words = [torch.randint(0, WORD + 1, shape, generator=generator) for shape in shapes]
    before = [word.clone() for word in words]
    outputs = philox(*words)
    full = [word.expand(4, 7) for word in words]
    for row in range(4):
        for column in range(7):
            k0, k1, *counter = (int(word[row, column]) for word in full)
            got = tuple(int(word[row, column]) for word in outputs)
            assert got == slow_philox(tuple(counter), (k0, k1))
    assert all(torch.equal(a, b) for a, b in zip(before, words, strict=True))


def test_noise_follows_the_documented_layout():
    seed, choice, position = -(2**63) + 12345678901, 3, 2**31 + 5
    values = gumbel(ints(seed), ints(choice), ints(position), 11, torch.float64)
    assert values.shape == (1, 11)
    key = (seed & WORD, seed >> 32 & WORD)
    for token, value in enumerate(values[0].tolist()):
        word = slow_philox((position, choice, token // 4, 0), key)[token % 4]
        assert value == pytest.approx(-math.log(-math.log1p(-(word + 0.5) / 2**32)), rel=1e-13)


def test_every_part_of_the_key_and_the_counter_changes_the_noise():
    rows = [(7, 0, 9), (8, 0, 9), (7 + 2**32, 0, 9), (7 - 2**63, 0, 9), (7, 1, 9), (7, 0, 10)]
    seeds, choices, positions = (ints(*column) for column in zip(*rows, strict=True))
    values = gumbel(seeds, choices, positions, 40, torch.float64)
    assert len({float(value) for value in values.flatten()}) == values.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 4, 997, 20_001])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, vocab, monkeypatch):
    torch.set_num_threads(2)
    seeds, choices, positions = ints(*range(9)) * 77, ints(*range(9)) % 2, ints(*range(9)) + 100
    whole = gumbel(seeds, choices, positions, vocab, dtype)
    assert whole.shape == (9, vocab) and whole.dtype == dtype
    for row in range(9):
        numbers = (tensor[row : row + 1] for tensor in (seeds, choices, positions))
        assert torch.equal(gumbel(*numbers, vocab, dtype)[0], whole[row])
    monkeypatch.setattr(noise, "CHUNK", 3 * vocab // 4)  # work in pieces of a few rows
    assert torch.equal(gumbel(seeds, choices, positions, vocab, dtype), whole)


def test_a_longer_vocabulary_leaves_the_noise_of_the_first_ids_alone():
    row = ints(3), ints(0), ints(17)
    assert torch.equal(gumbel(*row, 101, torch.float64), gumbel(*row, 203, torch.float64)[:, :101])


def test_fp32_noise_is_fp64_noise_to_the_last_bits_where_arg_maxes_are_won():
    row = ints(*range(20)), ints(*range(20)), ints(*range(20))
    double = gumbel(*row, 5000, torch.float64)
    error = (gumbel(*row, 5000, torch.float32).double() - double).abs()
    assert error[double > 0].max() < 2e-6
    assert error[double > -2].max() < 1e-3  # u itself has 24 bits there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_words_give_finite_noise_and_keep_the_upper_tail(dtype):
    words = torch.tensor([0, 1, 2**24 + 1, 2**31, WORD - 1, WORD], dtype=dtype)
    noise._to_gumbel(words)
    assert words.isfinite().all()
    assert words[:2].tolist() == pytest.approx([33 * math.log(2), -math.log(1.5 / 2**32)])
    lowest = -math.log(24 * math.log(2)) if dtype == torch.float32 else -math.log(33 * math.log(2))
    assert words[-1].item() == pytest.approx(lowest)


def test_the_noise_is_gumbel_and_neighbours_do_not_know_each_other():
    values = gumbel(ints(*[11] * 64), ints(*[0] * 64), ints(*range(64)), 4000, torch.float64)
    flat = values.flatten().sort().values
    law = torch.exp(-torch.exp(-flat))
    steps = (torch.arange(len(flat), dtype=torch.float64) + 0.5) / len(flat)
    assert (law - steps).abs().max() * math.sqrt(len(flat)) < 1.6  # Kolmogorov: 1 % above 1.63
    centred = torch.exp(-torch.exp(-values)) - 0.5  # uniform
    for one, other in [
        (centred[:, :-1], centred[:, 1:]),  # next id, next lane
        (centred[:, :-4], centred[:, 4:]),  # same lane
        (centred[:-1], centred[1:]),  # next position
    ]:
        correlation = (one * other).mean() * 12
        assert abs(correlation) * math.sqrt(one.numel()) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_single_ids_is_the_noise_of_the_whole_row(dtype):
    seeds, choices, positions = torch.tensor([7, -3]), torch.tensor([0, 2]), torch.tensor([5, 900])
    whole = gumbel(seeds, choices, positions, 4001, dtype)
    ids = torch.randint(0, 4001, (2, 512), generator=torch.Generator().manual_seed(1))
    single = gumbel_at(seeds, choices, positions, ids, dtype)
    torch.testing.assert_close(single, whole.gather(1, ids), rtol=1e-6, atol=1e-6)

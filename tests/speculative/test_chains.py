"""Hash chains against a search that looks everywhere.  Guesses nothing."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from speculative.chains import BULK, NO_ID, Chains


def everywhere(tokens: list[int], context: list[int], reach: int) -> list[tuple[int, int]]:
    """All (position, length) at which at least two tokens of the context's end stand before."""
    found = []
    for at in range(2, len(tokens)):
        length = 0
        while (length < min(reach, at, len(context))
               and tokens[at - 1 - length] == context[-1 - length]):
            length += 1
        if length >= 2:
            found.append((at, length))
    return sorted(found, key=lambda match: (-match[1], -match[0]))


def text_of(seed: int, size: int, vocab: int) -> list[int]:
    """Random tokens with copies of earlier stretches in them."""
    draw = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < size:
        if tokens and draw.random() < 0.5:
            start = draw.randrange(len(tokens))
            tokens += tokens[start : start + draw.randint(1, 12)]
        else:
            tokens += [draw.randrange(vocab) for _ in range(draw.randint(1, 8))]
    return tokens[:size]


def grown(tokens: list[int], seed: int) -> Chains:
    """The text in pieces of all sizes: single tokens, loops, numpy."""
    draw, chains, at = random.Random(seed), Chains(), 0
    while at < len(tokens):
        size = draw.choice((1, 1, 2, 5, BULK - 1, BULK, 3 * BULK))
        chains.extend(tokens[at : at + size])
        at += size
    return chains


@pytest.mark.parametrize("vocab", [2, 5, 40, 50_000])
def test_all_earlier_places_are_found_with_their_lengths(vocab):
    for seed in range(8):
        tokens = text_of(seed, 300, vocab)
        chains = grown(tokens, seed)
        chains.check()
        assert list(chains.tokens) == tokens
        for end in (300, 299, 180, 47, 2, 1, 0):
            context = tokens[max(0, end - 40) : end]
            for reach in (2, 7, 32):
                assert chains.matches(context, most=300, reach=reach) == everywhere(
                    tokens, context, reach
                )


def test_of_many_places_the_newest_are_taken_longest_first():
    tokens = text_of(3, 600, 2)
    chains = grown(tokens, 3)
    some, all_of_them = chains.matches(tokens[-40:]), everywhere(tokens, tokens[-40:], 32)
    assert len(some) == 16 < len(all_of_them)
    assert set(some) <= set(all_of_them)
    oldest = min(at for at, _ in some)
    assert {match for match in all_of_them if match[0] >= oldest} == set(some)
    assert some == sorted(some, key=lambda match: (-match[1], -match[0]))


def test_pairs_that_share_a_slot_are_told_apart():
    chains = Chains()
    chains.extend([1, 9, 5])
    other = next(n for n in range(2, 10_000) if chains._slot(n, 9) == chains._slot(1, 9))
    last = next(n for n in range(10, 10_000) if chains._slot(1, n) == chains._slot(1, 9))
    assert chains.matches([1, 9]) == [(2, 2)]
    assert chains.matches([other, 9]) == chains.matches([1, last]) == []


def test_places_that_are_known_are_left_out():
    chains = Chains()
    chains.extend([1, 2, 3, 1, 2, 4, 1, 2])
    assert chains.matches([1, 2]) == [(5, 2), (2, 2)]
    assert chains.matches([1, 2], known={5}) == [(2, 2)]


def test_a_lookup_follows_as_many_links_in_a_long_text_as_in_a_short_one():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    reads = []
    for size in (200, 20_000):
        chains = Chains()
        chains.extend([7] * size)
        links = chains.before = Counting(chains.before)
        assert len(chains.matches([7] * 40)) == 16
        reads.append(links.reads)
    assert reads[0] == reads[1] <= 33


def test_chains_do_not_depend_on_how_the_text_came():
    tokens = text_of(5, 4000, 300)
    whole, single = Chains(), Chains()
    whole.extend(tokens)
    for token in tokens:
        single.extend((token,))
    whole.check()
    single.check()
    for end in range(40, 4000, 97):
        context = tokens[end - 32 : end]
        assert whole.matches(context) == single.matches(context)


@pytest.mark.parametrize("size", [3, 200])
def test_any_ids_are_taken_and_what_is_no_int32_stands_for_nothing(size):
    strange = [2**31, -(2**31), 2**63, -(2**70), -1, 0, 2**31 - 1]
    tokens = (strange * size)[: 7 * size]
    chains = grown(tokens, size)
    chains.check()
    assert chains.tokens[0] == chains.tokens[2] == NO_ID
    assert chains.tokens[6] == 2**31 - 1
    assert chains.matches([2**63, 2**64]) == []
    assert chains.matches([0, 2**31 - 1])
    other = Chains()
    other.extend(array("q", [2**40, 1, 2] * 40))
    assert list(other.tokens[:3]) == [NO_ID, 1, 2]


@pytest.mark.parametrize("size", [0, 10, 700, 20_000])
def test_bytes_are_told_as_they_are(size):
    tokens = text_of(1, size, 1000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        chains = Chains()
        for at in range(0, size, 100):
            chains.extend(tokens[at : at + 100])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert chains.nbytes == pytest.approx(held, rel=0.2, abs=200)

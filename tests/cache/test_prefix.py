"""Block keys: chained, namespaced, equal in every process.  Nothing about who holds a block."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import prefix

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(IDS, st.integers(1, 5))
def test_a_chain_is_the_key_of_each_full_block_under_the_one_before(tokens, size):
    parent, expected = prefix.root(b"t"), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = prefix.key(parent, tokens[start : start + size])
        expected.append(parent)
    assert prefix.chain(prefix.root(b"t"), tokens, size) == expected


@given(IDS, IDS, st.integers(1, 4))
def test_two_chains_agree_exactly_as_far_as_their_blocks_do(left, right, size):
    a, b = (prefix.chain(prefix.root(b""), ids, size) for ids in (left, right))
    same = 0
    while same < min(len(a), len(b)) and left[: (same + 1) * size] == right[: (same + 1) * size]:
        same += 1
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b[same:])


def test_tokens_pack_alike_from_a_list_and_from_any_array():
    ids = [0, 1, 255, 256, 65_536, 2**32 - 1]
    packed = prefix.pack(ids)
    assert packed == prefix.pack(array("I", ids)) == prefix.pack(array("Q", ids))
    assert len(packed) == 4 * len(ids)


def test_an_id_that_is_no_u32_is_refused_and_never_wrapped():
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            prefix.pack([bad])


def test_namespaces_and_keys_cannot_be_taken_for_one_another():
    assert prefix.root(b"a") != prefix.root(b"b") != prefix.root(b"")
    assert len(prefix.root(b"a")) != prefix.KEY_BYTES == len(prefix.key(prefix.root(b"a"), [1]))
    tokens = [7] * 64
    assert not set(prefix.chain(prefix.root(b"a"), tokens)) & set(
        prefix.chain(prefix.root(b"b"), tokens)
    )


def test_moving_a_token_over_a_block_border_changes_the_keys():
    assert prefix.chain(b"r", [1, 2, 3, 4], 2) != prefix.chain(b"r", [1, 2, 3, 4], 4)
    assert prefix.chain(b"r", [0, 0, 0, 0], 2)[0] != prefix.chain(b"r", [0, 0, 0, 0], 2)[1]


def test_keys_are_the_same_in_every_process():
    code = "from cache import prefix as p; print(p.chain(p.root(b'n'), list(range(128)))[1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        ).stdout.strip()
        for seed in ("0", "1")
    }  # fmt: skip
    assert seen == {prefix.chain(prefix.root(b"n"), list(range(128)))[1].hex()}

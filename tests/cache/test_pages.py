"""Pages: layout, copies, sizes, untouched memory.  No tokens."""

from __future__ import annotations

import psutil
import pytest
import torch

from cache.pages import Pages

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def pages(dtype=torch.float32, **more):
    return Pages(layers=3, blocks=5, size=4, kv_heads=2, head_dim=8, dtype=dtype, **more)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_blocks_keys_lie_together_and_so_do_its_values(dtype):
    made = pages(dtype)
    assert made.data.shape == (3, 5, 2, 4, 2, 8) and made.data.is_contiguous()
    halves = made.data[1].view(5 * 2, 4 * 2 * 8)  # what attention gathers: block * 2 (+ 1)
    halves[2 * 2 + 1].fill_(7)
    assert (made.data[1, 2, 1] == 7).all() and made.data.dtype == dtype
    assert made.size_bytes == 5 * Pages.bytes_per_block(3, 4, 2, 8, dtype)
    assert made.size_bytes == made.data.numel() * made.data.element_size()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cleared_blocks_are_zero_in_all_layers_and_the_others_are_not(dtype):
    made = pages(dtype, poison=True)
    made.clear([1, 3])
    assert (made.data[:, [1, 3]] == 0).all()
    assert made.data[:, [0, 2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_is_bit_for_bit_over_all_layers_and_touches_no_other_block(dtype):
    made = pages(dtype)
    bits = torch.randint(0, 255, (made.size_bytes,), dtype=torch.uint8)
    made.data.copy_(bits.view(dtype).view(made.data.shape))  # NaN patterns among them
    before = made.data.clone()
    made.copy(1, 4)
    after = made.data.view(torch.uint8).view(3, 5, -1)
    was = before.view(torch.uint8).view(3, 5, -1)
    assert torch.equal(after[:, 4], was[:, 1])
    assert torch.equal(after[:, :4], was[:, :4])


def test_a_copy_outside_the_pages_is_caught():
    for source, target in ((0, 5), (-1, 0), (5, 0)):
        with pytest.raises(AssertionError):
            pages().copy(source, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_pages_are_nan_until_written(dtype):
    assert pages(dtype, poison=True).data.isnan().all()


def test_memory_is_not_touched_until_it_is_written():
    process = psutil.Process()
    before = process.memory_info().rss
    made = Pages(layers=4, blocks=1024, size=64, kv_heads=8, head_dim=64, dtype=torch.bfloat16)
    assert made.size_bytes == 2**29
    assert process.memory_info().rss - before < 2**26


def test_pages_that_cannot_be_had_are_refused_with_their_size():
    with pytest.raises(MemoryError, match=r"need 1,048,576\.0 GiB on cpu.*--cache\.kv-bytes"):
        Pages(layers=2**10, blocks=2**20, size=64, kv_heads=8, head_dim=512, dtype=torch.bfloat16)

"""Rotate queries and keys, and write keys and values to their pages.  Attends to nothing.

Rotary positions: Su et al., RoFormer (2021).  Everything is elementwise: computed in float32 and
rounded once, so a token's bits depend on no other token.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait

HEADS = 16  # heads a program; a power of two
WARPS = 4


def rotate_and_store(
    qkv: Tensor,
    pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    overlap: int = 0,
) -> None:
    """Rotate N tokens' queries in place; store rotated keys, and values, in one layer's pages.

    `qkv` [N, (heads + 2 * kv_heads) * head_dim] has queries, keys, values side by side; the keys in
    it stay unrotated.  `pages` is [blocks, 2, size, kv_heads, head_dim].  `positions` and `slots`
    are int32 [N]; a slot is block * size + offset, and padded tokens name the trash block.  `cos`
    and `sin` are float32 [max_len, head_dim / 2]; elements 2i and 2i + 1 of a head turn together.
    `overlap`: see kernels/overlap.py.  Allocates nothing and reads nothing on the host.
    """
    _, _, size, kv_heads, dim = pages.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    count = positions.shape[0]
    assert heads > 0 and qkv.shape[1] == (heads + 2 * kv_heads) * dim
    assert qkv.stride(1) == 1 and pages.is_contiguous() and cos.is_contiguous()
    assert sin.is_contiguous() and cos.shape == sin.shape and cos.shape[1] * 2 == dim
    assert qkv.shape[0] == slots.shape[0] == count
    enqueue(_rotate_kernel, (count, triton.cdiv(heads + 2 * kv_heads, HEADS)))(
        qkv, pages, positions, slots, cos, sin, qkv.stride(0),
        QUERIES=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=size, HEADS=HEADS,
        OVERLAP=int(overlap), num_warps=WARPS, **launch_options(overlap),
    )  # fmt: skip


@triton.jit
def turned(left, right, cos, sin):
    """A pair of elements, rotated; one function, so that every kernel rounds alike."""
    # Said outright: a compiler left to itself may fuse either product, and did, differently.
    return tl.fma(left, cos, -(right * sin)), tl.fma(right, cos, left * sin)


@triton.jit
def _rotate_kernel(
    qkv, pages, positions, slots, cos, sin, stride,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Heads program_id(1) * HEADS .. + HEADS - 1 of token program_id(0): queries, keys, values."""
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, half)[None, :]
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    turn = tl.load(cos + position * half + pair)
    lift = tl.load(sin + position * half + pair)
    is_query = head < QUERIES
    is_value = head >= QUERIES + KV_HEADS
    known = head < QUERIES + 2 * KV_HEADS
    # Whole heads as one run of memory: loads of every second element move two bytes at a time.
    at = head * DIM + tl.arange(0, DIM)[None, :]
    own = qkv + token * stride + at
    wait(OVERLAP)
    run = tl.load(own, mask=known, other=0.0)
    release(OVERLAP)
    left, right = tl.split(tl.reshape(run.to(tl.float32), (HEADS, half, 2)))
    left, right = turned(left, right, turn, lift)
    result = tl.reshape(tl.join(left, right), (HEADS, DIM)).to(pages.dtype.element_ty)
    result = tl.where(is_value, run, result)
    tl.store(own, result, mask=is_query)
    # A block's page is its keys, then its values.
    row: tl.constexpr = KV_HEADS * DIM
    line = slot // PAGE * (2 * PAGE) + slot % PAGE + tl.where(is_value, PAGE, 0)
    inner = at - QUERIES * DIM - tl.where(is_value, row, 0)
    tl.store(pages + line * row + inner, result, mask=known & (head >= QUERIES))

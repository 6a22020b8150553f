"""Rotate queries and keys, and write keys and values to their pages.  Attends to nothing.

Rotary positions: Su et al., RoFormer (2021).  Everything is elementwise: computed in float32 and
rounded once, so a token's bits depend on no other token.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait

HEADS = 8  # heads a program; a power of two
WARPS = 4

Pairs = Literal["halves", "neighbours"]


def rotate_and_store(
    qkv: Tensor,
    pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    query: Tensor | None = None,
    pairs: Pairs = "halves",
    overlap: int = 0,
) -> None:
    """Rotate N tokens' queries and keys; store keys and values in one layer's pages.

    `qkv` [N, (heads + 2 * kv_heads) * head_dim] has queries, keys, values side by side; `pages` is
    [blocks, 2, size, kv_heads, head_dim].  `positions` and `slots` are int32 [N]; a slot is block *
    size + offset, and padded tokens name the trash block.  `cos` and `sin` are float32 [max_len,
    head_dim / 2].  Rotated queries go to `query` [N, heads * head_dim], or replace those in `qkv`;
    the keys in `qkv` stay unrotated.  `pairs` says which elements turn together: i with i +
    head_dim / 2 ("halves", as in Hugging Face checkpoints), or 2i with 2i + 1 ("neighbours").
    `overlap`: see kernels/overlap.py.  Allocates nothing and reads nothing on the host.
    """
    _, _, size, kv_heads, dim = pages.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    count = positions.shape[0]
    assert pairs in ("halves", "neighbours"), pairs
    assert heads > 0 and qkv.shape[1] == (heads + 2 * kv_heads) * dim
    assert qkv.stride(1) == 1 and pages.is_contiguous() and cos.is_contiguous()
    assert sin.is_contiguous() and cos.shape == sin.shape and cos.shape[1] * 2 == dim
    assert qkv.shape[0] == slots.shape[0] == count
    target = qkv if query is None else query
    assert target.stride(1) == 1 and target.shape[0] == count
    enqueue(_rotate_kernel, (count, triton.cdiv(heads + kv_heads, HEADS)))(
        qkv, target, pages, positions, slots, cos, sin, qkv.stride(0), target.stride(0),
        QUERIES=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=size, HEADS=HEADS,
        NEIGHBOURS=pairs == "neighbours", OVERLAP=int(overlap), num_warps=WARPS,
        **launch_options(overlap),
    )  # fmt: skip


@triton.jit
def turned(left, right, cos, sin):
    """A pair of elements, rotated; one function, so that every kernel rounds alike."""
    # Said outright: a compiler left to itself may fuse either product, and did, differently.
    return tl.fma(left, cos, -(right * sin)), tl.fma(right, cos, left * sin)


@triton.jit
def _rotate_kernel(
    qkv, target, pages, positions, slots, cos, sin, qkv_stride, target_stride,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HEADS: tl.constexpr, NEIGHBOURS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Heads program_id(1) * HEADS .. + HEADS - 1 of token program_id(0): queries, then keys."""
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, half)[None, :]
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    turn = tl.load(cos + position * half + pair)
    lift = tl.load(sin + position * half + pair)
    is_query = head < QUERIES
    is_key = (head >= QUERIES) & (head < QUERIES + KV_HEADS)
    step: tl.constexpr = 2 if NEIGHBOURS else 1
    partner: tl.constexpr = 1 if NEIGHBOURS else half
    at = head * DIM + pair * step
    source = qkv + token * qkv_stride + at
    known = is_query | is_key
    wait(OVERLAP)
    left = tl.load(source, mask=known, other=0.0).to(tl.float32)
    right = tl.load(source + partner, mask=known, other=0.0).to(tl.float32)
    release(OVERLAP)
    first, second = turned(left, right, turn, lift)
    first, second = first.to(pages.dtype.element_ty), second.to(pages.dtype.element_ty)

    own = target + token * target_stride + at
    tl.store(own, first, mask=is_query)
    tl.store(own + partner, second, mask=is_query)

    # A block's page is its keys, then its values.
    row: tl.constexpr = KV_HEADS * DIM
    keys = pages + (slot // PAGE * (2 * PAGE) + slot % PAGE) * row
    inner = at - QUERIES * DIM
    tl.store(keys + inner, first, mask=is_key)
    tl.store(keys + inner + partner, second, mask=is_key)
    # The program that turns a key also carries its value, KV_HEADS heads further on.
    values = keys + PAGE * row + inner
    tl.store(values, tl.load(source + row, mask=is_key), mask=is_key)
    tl.store(values + partner, tl.load(source + row + partner, mask=is_key), mask=is_key)

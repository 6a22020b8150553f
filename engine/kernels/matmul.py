"""Matrix products whose rows do not know their neighbours.  Picks no tile: engine/cuda/picks.py.

    y = epilogue(x W^T)        x [M, K], W [N, K], both of one type; sums in fp32

A row of y depends on that row of x alone, bit for bit: the tensor cores add along K in one order
whatever the tile, and K is never split between programs.  So the tile may follow the number of
rows and a row's bits do not.  (Measured on an H200: the same bits from every tile, from rows
16 / 32 / 64 / 128 high, and from cuBLAS wherever cuBLAS does not split K.)
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.overlap import launch_options, release, wait

STORE, RESIDUAL, SWIGLU = 0, 1, 2  # what happens to a tile before it is stored


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs; it has no influence on the result."""

    bm: int  # rows of x, 16 to 128
    bn: int  # rows of W
    bk: int  # numbers of K a step
    warps: int
    stages: int  # steps in flight
    ahead: int = 0  # of K, read before the kernel before has ended; 0 or a power of two from 16

    def even(self, depth: int) -> bool:
        """Whether steps end where K does."""
        return (depth - self.ahead) % self.bk == 0


@triton.jit
def silu_times(gate, up, kind: tl.constexpr):
    """silu(gate) * up in fp32, of values rounded to `kind` as a stored product's would be."""
    gate = gate.to(kind).to(tl.float32)
    up = up.to(kind).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    return gate * up


@triton.jit
def accumulate(
    x, w, rm, rn, rows, columns, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of x W^T at rows `rm`, columns `rn`: fp32 [BM, BN], K from its start to its end.

    Waits for the kernel before.  The first AHEAD of K of the weights are read before that: they
    depend on nobody, and where a kernel is all latency theirs is gone.
    """
    rk = tl.arange(0, BK)
    live = rm[:, None] < rows
    there = rn[None, :] < columns
    xs = x + rm[:, None].to(tl.int64) * depth
    ws = w + rn[None, :].to(tl.int64) * depth
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if AHEAD > 0:
        early = tl.arange(0, AHEAD)
        first_b = tl.load(ws + early[:, None], mask=there, other=0.0)
        wait(OVERLAP)
        first_a = tl.load(xs + early[None, :], mask=live, other=0.0)
        acc = tl.dot(first_a, first_b, acc, input_precision=PRECISION)
    else:
        wait(OVERLAP)
    for k in range(AHEAD, depth, BK):
        if EVEN:
            a = tl.load(xs + k + rk[None, :], mask=live, other=0.0)
            b = tl.load(ws + k + rk[:, None], mask=there, other=0.0)
        else:
            inside = rk < depth - k
            a = tl.load(xs + k + rk[None, :], mask=live & inside[None, :], other=0.0)
            b = tl.load(ws + k + rk[:, None], mask=there & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
def _product(
    x, w, bias, residual, out, rows, columns, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rm[:, None] < rows
    there = rn[None, :] < columns
    acc = accumulate(
        x, w, rm, rn, rows, columns, depth, BM, BN, BK, AHEAD, EVEN, OVERLAP, PRECISION
    )
    release(OVERLAP)
    kind = x.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + rn, mask=rn < columns, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == 2:
        gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        rn = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        columns = columns // 2
        there = rn[None, :] < columns
        acc = silu_times(gate, up, kind)
    at = rm[:, None].to(tl.int64) * columns + rn[None, :]
    if EPILOGUE == 1:
        acc += tl.load(residual + at, mask=live & there, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=live & there)


def product(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    overlap: bool = False,
) -> None:
    """Write `x` [M, K] times the rows of `w` [N, K] to `out`: [M, N], or [M, N / 2] with `swiglu`.

    `bias` [N] is added to the product, then `residual` [M, N] (which may be `out`); `swiglu` takes
    rows 2i of w as gate and 2i + 1 as up: out = silu(gate) * up.  All contiguous; `out` may be of
    a wider type than the rest.  `overlap`: see kernels/overlap.py.
    """
    (rows, depth), columns = x.shape, w.shape[0]
    assert w.shape[1] == depth, f"x {x.shape}, w {w.shape}"
    assert out.shape == (rows, columns // 2 if swiglu else columns), f"out {out.shape}"
    assert tile.ahead <= depth, f"{tile.ahead} of {depth} columns cannot be read ahead"
    assert not (swiglu and residual is not None), "a gated product has no residual"
    epilogue = SWIGLU if swiglu else RESIDUAL if residual is not None else STORE
    enqueue(_product, (triton.cdiv(columns, tile.bn), triton.cdiv(rows, tile.bm)))(
        x, w, bias if bias is not None else w, residual if residual is not None else out, out,
        rows, columns, depth,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, AHEAD=tile.ahead, EPILOGUE=epilogue,
        BIAS=bias is not None, EVEN=tile.even(depth), OVERLAP=overlap, PRECISION=precision(x),
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(overlap),
    )  # fmt: skip


def precision(x: Tensor) -> str:
    """How tensor cores may take fp32 operands: not at all; bf16 is exact either way."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _gate(both, out, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    wait(OVERLAP)
    gate = tl.load(both + row * 2 * columns + 2 * at, mask=there, other=0.0)
    up = tl.load(both + row * 2 * columns + 2 * at + 1, mask=there, other=0.0)
    release(OVERLAP)
    kind = both.dtype.element_ty
    result = silu_times(gate.to(tl.float32), up.to(tl.float32), kind)
    tl.store(out + row * columns + at, result.to(kind), mask=there)


def gate(both: Tensor, out: Tensor, *, overlap: bool = False) -> None:
    """silu(gate) * up [M, N] of a stored product [M, 2N] in turns: the bits of `swiglu`."""
    rows, columns = out.shape
    assert both.shape == (rows, 2 * columns), f"both {both.shape}, out {out.shape}"
    block = 1024
    enqueue(_gate, (rows, triton.cdiv(columns, block)))(
        both, out, columns, BLOCK=block, OVERLAP=overlap, num_warps=4, **launch_options(overlap)
    )

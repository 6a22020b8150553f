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
from engine.kernels.norm import scale_of, warps
from engine.kernels.overlap import launch_options, release, wait

STORE, RESIDUAL, SWIGLU = 0, 1, 2  # what happens to a tile before it is stored
NORMED = 4  # rows that a product can norm itself: every program does it anew


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs; it has no influence on the result."""

    bm: int  # rows of x, 16 to 128
    bn: int  # rows of W
    bk: int  # numbers of K a step
    warps: int
    stages: int  # steps in flight
    ahead: int = 0  # of K, read before the kernel before has ended; 0 or a power of two from 16
    tail: int = 0  # of K behind that, read as early: depths are seldom powers of two

    def steps(self, depth: int) -> int:
        """Of K behind what is read ahead: 0 = there are none, 1 = whole ones, 2 = one is cut."""
        rest = depth - self.ahead - self.tail
        return 0 if rest == 0 else 1 if rest % self.bk == 0 else 2


@triton.jit
def silu_times(gate, up, kind: tl.constexpr):
    """silu(gate) * up in fp32, of values rounded to `kind` as a stored product's would be."""
    gate = gate.to(kind).to(tl.float32)
    up = up.to(kind).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    return gate * up


@triton.jit
def read_ahead(
    w, gain, rn, columns, depth,
    AHEAD: tl.constexpr, TAIL: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first AHEAD and the next TAIL of K of weights and gain; then wait for the kernel before.

    Weights depend on nobody, and where a kernel is all latency theirs is gone.
    """
    ws = w + rn[None, :].to(tl.int64) * depth
    there = rn[None, :] < columns
    first, second, gains, more = 0, 0, 0, 0
    if AHEAD > 0:
        at = tl.arange(0, AHEAD)
        first = tl.load(ws + at[:, None], mask=there, other=0.0)
        if NORM > 0:
            gains = tl.load(gain + at).to(tl.float32)
    if TAIL > 0:
        at = AHEAD + tl.arange(0, TAIL)
        second = tl.load(ws + at[:, None], mask=there, other=0.0)
        if NORM > 0:
            more = tl.load(gain + at).to(tl.float32)
    wait(OVERLAP)
    return first, second, gains, more


@triton.jit
def _scales(
    x, rm, rows, depth, eps, BM: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr
):
    """RMSNorm's factors of the first NORM rows of a tile: fp32 [BM, 1], with the bits of `norm`."""
    at = tl.arange(0, WIDTH)
    begin = tl.program_id(1) * BM
    scales = tl.zeros((BM, 1), dtype=tl.float32)
    for i in tl.static_range(NORM):
        # Beyond the last row its factor again: those lines of the tile are 0 anyway.
        row = tl.minimum(begin + i, rows - 1).to(tl.int64)
        a = tl.load(x + row * depth + at, mask=at < depth, other=0.0).to(tl.float32)
        scales = tl.where((rm == begin + i)[:, None], scale_of(a, depth, eps), scales)
    return scales


@triton.jit
def _scaled(a, scales, gains, NORM: tl.constexpr):
    """A part of a tile, normed where that is wanted."""
    if NORM > 0:
        a = (a.to(tl.float32) * scales * gains[None, :]).to(a.dtype)
    return a


@triton.jit
def _parts(xs, live, AHEAD: tl.constexpr, TAIL: tl.constexpr):
    """x where weights were read ahead."""
    head, tail = 0, 0
    if AHEAD > 0:
        head = tl.load(xs + tl.arange(0, AHEAD)[None, :], mask=live, other=0.0)
    if TAIL > 0:
        tail = tl.load(xs + AHEAD + tl.arange(0, TAIL)[None, :], mask=live, other=0.0)
    return head, tail


@triton.jit
def accumulate(
    x, w, ahead, gain, eps, rm, rn, rows, columns, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, TAIL: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile of x W^T at rows `rm`, columns `rn`: fp32 [BM, BN], K from its start to its end.

    `ahead` is what read_ahead gave.  NORM rows of x are normed first, with the bits of `norm`.
    """
    rk = tl.arange(0, BK)
    live = rm[:, None] < rows
    there = rn[None, :] < columns
    xs = x + rm[:, None].to(tl.int64) * depth
    ws = w + rn[None, :].to(tl.int64) * depth
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    parts = _parts(xs, live, AHEAD, TAIL)  # asked for together with what the norm sums
    scales = 1.0
    if NORM > 0:
        scales = _scales(x, rm, rows, depth, eps, BM, NORM, WIDTH)
    if AHEAD > 0:
        head = _scaled(parts[0], scales, ahead[2], NORM)
        acc = tl.dot(head, ahead[0], acc, input_precision=PRECISION)
    if TAIL > 0:
        tail = _scaled(parts[1], scales, ahead[3], NORM)
        acc = tl.dot(tail, ahead[1], acc, input_precision=PRECISION)
    if STEPS > 0:
        for k in range(AHEAD + TAIL, depth, BK):
            inside = rk < (BK if STEPS == 1 else depth - k)
            if STEPS == 1:
                a = tl.load(xs + k + rk[None, :], mask=live, other=0.0)
                b = tl.load(ws + k + rk[:, None], mask=there, other=0.0)
            else:
                a = tl.load(xs + k + rk[None, :], mask=live & inside[None, :], other=0.0)
                b = tl.load(ws + k + rk[:, None], mask=there & inside[:, None], other=0.0)
            if NORM > 0:
                gain_part = tl.load(gain + k + rk, mask=inside, other=0.0).to(tl.float32)
                a = _scaled(a, scales, gain_part, NORM)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
def _product(
    x, w, gain, bias, residual, out, rows, columns, depth, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, TAIL: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr,
    STEPS: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    live = rm[:, None] < rows
    there = rn[None, :] < columns
    ahead = read_ahead(w, gain, rn, columns, depth, AHEAD, TAIL, NORM, OVERLAP)
    at = rm[:, None].to(tl.int64) * columns + rn[None, :]
    # Eager kernels ask for what the end needs before they multiply: there its latency is hidden.
    if EPILOGUE == 1 and OVERLAP == 2:
        before = tl.load(residual + at, mask=live & there, other=0.0)
    acc = accumulate(
        x, w, ahead, gain, eps, rm, rn, rows, columns, depth,
        BM, BN, BK, AHEAD, TAIL, NORM, WIDTH, STEPS, PRECISION,
    )  # fmt: skip
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
        if OVERLAP != 2:
            before = tl.load(residual + at, mask=live & there, other=0.0)
        acc = acc.to(kind).to(tl.float32) + before.to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=live & there)


def product(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
    overlap: int = 0,
) -> None:
    """Write `x` [M, K] times the rows of `w` [N, K] to `out`: [M, N], or [M, N / 2] with `swiglu`.

    `bias` [N] is added to the product; `residual` [M, N] (which may be `out`) to what that is in
    x's type, as cuBLAS does; `swiglu` takes rows 2i of w as gate and 2i + 1 as up:
    out = silu(gate) * up.  All contiguous; `out` may be of
    a wider type than the rest.  With `gain` [K], x is normed on the way as by kernels/norm.py, with
    the same bits; then M is at most NORMED and the tile has that kernel's warps.  `overlap`: see
    kernels/overlap.py.
    """
    (rows, depth), columns = x.shape, w.shape[0]
    assert w.shape[1] == depth, f"x {x.shape}, w {w.shape}"
    assert out.shape == (rows, columns // 2 if swiglu else columns), f"out {out.shape}"
    assert tile.ahead + tile.tail <= depth, f"{tile} reads more than {depth} columns ahead"
    assert tile.ahead or not tile.tail, f"{tile} has a tail and nothing before it"
    assert not (swiglu and residual is not None), "a gated product has no residual"
    epilogue = SWIGLU if swiglu else RESIDUAL if residual is not None else STORE
    enqueue(_product, (triton.cdiv(columns, tile.bn), triton.cdiv(rows, tile.bm)))(
        x, w, gain if gain is not None else w, bias if bias is not None else w,
        residual if residual is not None else out, out, rows, columns, depth, eps,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, AHEAD=tile.ahead, TAIL=tile.tail, EPILOGUE=epilogue,
        NORM=normed(gain, tile, rows, depth), WIDTH=triton.next_power_of_2(depth),
        BIAS=bias is not None, STEPS=tile.steps(depth), OVERLAP=int(overlap),
        PRECISION=precision(x), num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(overlap),
    )  # fmt: skip


def normed(gain: Tensor | None, tile: Tile, rows: int, depth: int) -> int:
    """Rows that a product has to norm first: none without a gain, else a power of two."""
    if gain is None:
        return 0
    assert rows <= NORMED, f"{rows} rows are normed in their products, {NORMED} at most"
    assert tile.warps == warps(depth), f"{tile} does not sum as norm does, by {warps(depth)} warps"
    return int(triton.next_power_of_2(rows))


def precision(x: Tensor) -> str:
    """How tensor cores may take fp32 operands: not at all; bf16 is exact either way."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _gate(both, out, columns, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    # Both as one run of memory: two loads of every second element would move two bytes at a time.
    pair = 2 * begin + tl.arange(0, 2 * BLOCK)
    wait(OVERLAP)
    run = tl.load(both + row * 2 * columns + pair, mask=pair < 2 * columns, other=0.0)
    release(OVERLAP)
    gate, up = tl.split(tl.reshape(run, (BLOCK, 2)))
    kind = both.dtype.element_ty
    result = silu_times(gate.to(tl.float32), up.to(tl.float32), kind)
    tl.store(out + row * columns + at, result.to(kind), mask=at < columns)


def gate(both: Tensor, out: Tensor, *, overlap: int = 0) -> None:
    """silu(gate) * up [M, N] of a stored product [M, 2N] in turns: the bits of `swiglu`."""
    rows, columns = out.shape
    assert both.shape == (rows, 2 * columns), f"both {both.shape}, out {out.shape}"
    block = 1024
    enqueue(_gate, (rows, triton.cdiv(columns, block)))(
        both, out, columns, BLOCK=block, OVERLAP=int(overlap), num_warps=4,
        **launch_options(overlap),
    )  # fmt: skip

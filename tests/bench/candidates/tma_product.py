"""Products of 65 to 128 rows whose operands come by tensor descriptors.  Norms and gates nothing.

As kernels/matmul.py, with the same bits: one sum along K an output.  What differs is who moves the
operands: the tensor memory accelerator (compute capability 9.0) fetches whole tiles at the word of
one thread, and with `specialize` a warp of its own asks for them.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.launch import enqueue
from engine.kernels.matmul import Tile, precision
from engine.kernels.overlap import launch_options, mode, release, wait


@triton.jit(do_not_specialize=["rows"])
def _tma_product(
    x, w, residual, out, rows, columns, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RESIDUAL: tl.constexpr,
    SPECIALIZE: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(1) * BM, tl.program_id(0) * BN
    rm, rn = m + tl.arange(0, BM), n + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    wait(OVERLAP)
    for k in tl.range(0, depth, BK, warp_specialize=SPECIALIZE):
        a = x.load([m, k])
        b = w.load([n, k])
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    release(OVERLAP)
    at = rm[:, None].to(tl.int64) * columns + rn[None, :]
    there = (rm < rows)[:, None] & (rn < columns)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=there)


def tma_product(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    residual: Tensor | None = None,
    specialize: bool = False,
    overlap: int = 0,
) -> None:
    """Write `x` [M, K] times the rows of `w` [N, K], plus `residual` if any, to `out` [M, N].

    All contiguous; a row of x or w is a multiple of 16 bytes, which descriptors ask for.  The tile
    has at most 256 elements a side and reads nothing ahead.
    """
    (rows, depth), columns = x.shape, w.shape[0]
    assert w.shape[1] == depth and out.shape == (rows, columns), f"{x.shape}, {w.shape}"
    assert depth * x.element_size() % 16 == 0, f"rows of {depth} elements are not 16-byte aligned"
    assert tile.ahead == 0, f"{tile} reads ahead, which descriptors do not"
    described = (TensorDescriptor.from_tensor(x, [tile.bm, tile.bk]),
                 TensorDescriptor.from_tensor(w, [tile.bn, tile.bk]))
    enqueue(_tma_product, (triton.cdiv(columns, tile.bn), triton.cdiv(rows, tile.bm)))(
        *described, residual if residual is not None else out, out, rows, columns, depth,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, RESIDUAL=residual is not None, SPECIALIZE=specialize,
        OVERLAP=mode(overlap), PRECISION=precision(x), num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(overlap),
    )  # fmt: skip

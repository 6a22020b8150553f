"""silu(gate) * up of a product that has all gates first, then all ups.  Multiplies by no weight.

The target's own weights lie in turns (kernels/matmul.py: `gate`); a head keeps its file's order, so
that its largest weight is in memory once.
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import enqueue
from engine.kernels.matmul import silu_times

BLOCK = 1024  # columns a program


@triton.jit
def _gate(both, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    own = both + row * 2 * columns + at
    gate = tl.load(own, mask=there, other=0.0).to(tl.float32)
    up = tl.load(own + columns, mask=there, other=0.0).to(tl.float32)
    kind = both.dtype.element_ty
    tl.store(out + row * columns + at, silu_times(gate, up, kind).to(kind), mask=there)


def chain_gate(both: Tensor, out: Tensor) -> None:
    """out [M, N] = silu(both[:, :N]) * both[:, N:]; contiguous, of one type."""
    rows, columns = out.shape
    assert both.shape == (rows, 2 * columns), f"both {both.shape}, out {out.shape}"
    assert both.is_contiguous() and out.is_contiguous()
    enqueue(_gate, (rows, triton.cdiv(columns, BLOCK)))(
        both, out, columns, BLOCK=BLOCK, num_warps=4)

"""Let a kernel begin while the one before it ends.  Moves no data.

Programmatic dependent launch (CUDA 12, compute capability 9.0): a kernel that was launched with
`launch_options(True)` may start before its predecessor has ended; `wait` holds it until everything
that predecessor wrote can be read.  `release` says that the next kernel may start now.  A chain of
small kernels then pays for arithmetic, and much less for launches.  Every kernel of a chain must
call `wait` before it reads or writes what others touch: completion is only known of the kernel
right before, and that one has waited for its own.

EAGER releases as soon as a kernel has waited, and reads what it needs last before what it needs
first: the next kernel's weights then travel while this one computes.  It is as safe: whoever passes
its own `wait` knows that the kernel before, which had passed one too, has ended.  LATE releases
when the main loop is over.  Which is quicker depends on the model (engine/cuda/picks.py).
"""
# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def possible(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability has the instructions; others cannot compile them."""
    return capability >= (9, 0)


OFF, LATE, EAGER = 0, 1, 2  # how kernels overlap; True is LATE

OVERLAPS = torch.cuda.is_available() and possible(torch.cuda.get_device_capability())


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until the kernel before has ended; nothing when launched without overlap."""
    if OVERLAP:
        gdc_wait()
    if OVERLAP == 2:
        gdc_launch_dependents()


@triton.jit
def release(OVERLAP: tl.constexpr):
    """The next kernel may be started, unless `wait` has said so."""
    if OVERLAP == 1:
        gdc_launch_dependents()


def launch_options(overlap: int) -> dict[str, bool]:
    """Keyword arguments of the launch."""
    return {"launch_pdl": True} if overlap else {}

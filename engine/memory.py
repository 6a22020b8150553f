"""How much of a GPU's memory the KV pages may take.  Allocates nothing; see cache/pages.py.

    |<------------------------- total -------------------------->|
    |<-------------- utilization x total -------------->|  spare |
    | others | weights | largest step | graphs | KV     |        |

`others` is everything on the device that torch's allocator of this process does not hold: other
processes, the CUDA context, kernels, workspaces of libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config import BadConfig

GIB = 1 << 30
MOST = 0.98  # of a GPU: the highest utilization that we advise


class Counters(Protocol):
    """The part of `torch.cuda` that is read here; everything is in bytes."""

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give unused reserved memory back."""

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Peaks begin anew."""

    def memory_reserved(self, device: torch.device) -> int:
        """Held by torch's allocator, used or not."""

    def max_memory_reserved(self, device: torch.device) -> int:
        """Most of that since the reset."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """(free, total) of the device."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What a profiled step showed, in bytes."""

    total: int  # of the device
    others: int  # held on it, but not by torch's allocator here
    weights: int  # held before the step: weights and static buffers
    activation: int  # more at the worst moment of the step, gaps of the allocator included

    def kv_bytes(self, graphs_reserve: int, utilization: float) -> int:
        """What is left for KV pages; see the function `kv_bytes`."""
        return kv_bytes(self.total, self.others, self.weights, self.activation, graphs_reserve,
                        utilization)


def kv_bytes(
    total: int, used_by_others: int, weights: int, peak_activation: int, graphs_reserve: int,
    utilization: float,
) -> int:
    """Bytes left for KV pages, always positive; all arguments but the last are bytes.

    `utilization` is the share of the device that all may take together, above 0 and at most 1.
    Raises MemoryError with every part and the next step when nothing is left, BadConfig for an
    impossible share.
    """
    if not 0 < utilization <= 1:
        raise BadConfig(f"gpu_memory_utilization is {utilization}; it is a share of the GPU's "
                        "memory: above 0, at most 1.")
    taken = used_by_others + weights + peak_activation + graphs_reserve
    left = int(total * utilization) - taken
    if left > 0:
        return left
    raise MemoryError(
        f"Nothing is left for KV pages: of the GPU's {_gib(total)}, {utilization:.2f} may be used "
        f"= {_gib(total * utilization)}; {_gib(used_by_others)} are held by others, the weights "
        f"need {_gib(weights)}, the largest step {_gib(peak_activation)}, graphs "
        f"{_gib(graphs_reserve)}: {_gib(taken)}. {_advice(total, used_by_others, taken)}"
    )


def _advice(total: int, used_by_others: int, taken: int) -> str:
    """The cheapest step that makes room."""
    share = taken / total + 0.01  # a hundredth for KV: otherwise the same error would come again
    if share <= MOST:
        return f"Start with --gpu-memory-utilization {share + 0.005:.2f} or more."
    if taken - used_by_others < MOST * total:
        return "End the other processes on the GPU (nvidia-smi lists them)."
    return "Choose a smaller model, a larger GPU, or a smaller --max-num-batched-tokens."


def profile(
    run: Callable[[], None], device: torch.device, counters: Counters = torch.cuda
) -> Peak:
    """Run the largest step once and read what it took; the device's numbers, not a guess.

    Call it after weights and static buffers exist and before pages do.  What `run` raises passes
    through; torch's out-of-memory error becomes a MemoryError with the next step.
    """
    counters.synchronize(device)
    counters.empty_cache()
    counters.reset_peak_memory_stats(device)
    before = counters.memory_reserved(device)
    try:
        run()
        counters.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"The largest step does not fit beside the {_gib(before)} that weights and buffers "
            "hold. Start with a smaller --max-num-batched-tokens, or choose a smaller model."
        ) from error
    peak = counters.max_memory_reserved(device)
    held = counters.memory_reserved(device)
    free, total = counters.mem_get_info(device)  # after the step: it loads kernels and workspaces
    counters.empty_cache()
    return Peak(total, max(0, total - free - held), before, max(0, peak - before))


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that the device has no memory left: torch's, the driver's or Triton's."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB"

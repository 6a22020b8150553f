"""CUDA events and streams, with types that torch leaves out.  Waits for nothing."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch


def event(*, timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    """An event; `blocking` lets whoever waits for it sleep instead of spin."""
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)


def stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of its own, which nothing else uses."""
    return torch.cuda.Stream(device)


def passed(marked: torch.cuda.Event) -> bool:
    """Whether the device has come to what was last recorded; waits for nothing."""
    return bool(marked.query())


def enter(own: torch.cuda.Stream | None) -> None:
    """Have the calling thread queue on a stream, also from then on; None = there is no device.

    For an engine's thread, which has but one: to enter and leave it in each phase of a step would
    cost 25 us, and torch looks up the device anew where it is not told its index.
    """
    if own is not None:
        current = torch.cuda.current_stream(own.device_index)
        if current.cuda_stream != own.cuda_stream:
            torch.cuda.set_stream(own)

"""Where a step's integers lie: one buffer on the device, filled by one copy.  Knows no step.

Captured graphs read fixed addresses, so every array of a step is a view of one int32 buffer.  The
layout depends on the step's bucket: a small step copies little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.events import event

ALIGN = 4  # int32 words: kernels may load 16 bytes at a time

Ints = NDArray[np.int32]


class Layout:
    """Names and shapes, laid end to end."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._spans: dict[str, slice] = {}
        self.words = 0
        for name, shape in self.shapes.items():
            self._spans[name] = slice(self.words, self.words + math.prod(shape))
            self.words += -(-math.prod(shape) // ALIGN) * ALIGN

    def device(self, buffer: Tensor) -> dict[str, Tensor]:
        """Every array as a view of the int32 buffer."""
        return {name: buffer[span].view(self.shapes[name]) for name, span in self._spans.items()}

    def host(self, buffer: Ints) -> dict[str, Ints]:
        """The same on the host's side."""
        return {
            name: buffer[span].reshape(self.shapes[name]) for name, span in self._spans.items()
        }


class Mirror:
    """A device buffer and as many host buffers as steps may be under way, taken in turn.

    A step that draws nothing (a chunk in mid-prompt) is collected without a wait, so the host may
    be any number of steps ahead: a host buffer is given out again once its last copy is done.
    All copies are queued on the stream that is current when it is made.
    """

    def __init__(self, words: int, copies: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.buffer = torch.zeros(words, dtype=torch.int32, device=device)
        self._staged = [
            torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)
        ]
        self._arrays: list[Ints] = [staged.numpy() for staged in self._staged]
        self._copied = [_mark(device) for _ in range(copies)]  # its last copy is done
        # Where copies are queued.  Asking torch for it costs more than a copy does.
        self._stream = torch.cuda.current_stream(device) if pinned else None
        self._spans: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by words: to, from
        self._turn = 0

    def hosts(self, layout: Layout) -> list[dict[str, Ints]]:
        """A layout's arrays in every host buffer."""
        return [layout.host(array) for array in self._arrays]

    def next(self) -> int:
        """The number of the host buffer used longest ago; waits until its last copy is done."""
        self._turn = (self._turn + 1) % len(self._staged)
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        return self._turn

    def send(self, number: int, words: int) -> None:
        """Copy the first `words` of a host buffer to the device, in stream order."""
        spans = self._spans.get(words)
        if spans is None:  # one for each layout: a view costs as much as a copy
            spans = self._spans[words] = [(self.buffer[:words], one[:words])
                                          for one in self._staged]
        to, source = spans[number]
        to.copy_(source, non_blocking=True)
        if (copied := self._copied[number]) is not None:
            copied.record(self._stream)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """What tells when a copy is done; on a CPU it is when the call returns."""
    return event() if device.type == "cuda" else None

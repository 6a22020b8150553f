"""When steps begin and end on the device, and the wait for the end of one.  Launches nothing."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from engine.cuda.events import event, passed
from engine.cuda.naps import Naps

BLOCKING = 16  # sequences from which the host waits for an interrupt instead of spinning


@dataclass(slots=True)
class Lap:
    """One step's way over the device."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event
    chained: torch.cuda.Event
    blocks: bool
    launched_s: float = 0.0  # monotonic
    kind: Hashable = None  # steps that are alike; None = like no other
    chains: bool = False  # a device draft goes on behind the results


class Laps:
    """Marks steps on a stream.  The events of a step that is over are used again."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._naps = Naps()
        self._spare: dict[bool, list[Lap]] = {False: [], True: []}

    def begin(self, rows: int) -> Lap:
        """The device comes to here when it is free for the step."""
        blocks = rows >= BLOCKING
        spare = self._spare[blocks]
        lap = spare.pop() if spare else Lap(_mark(blocks), _mark(blocks), _mark(blocks), blocks)
        lap.launched_s, lap.chains = time.monotonic(), False
        lap.begun.record(self._stream)
        return lap

    def end(self, lap: Lap) -> None:
        """The device comes to here when the step's results are home."""
        lap.ended.record(self._stream)

    def chain(self, lap: Lap) -> None:
        """The device comes to here when the step's chains are home, too."""
        lap.chains = True
        lap.chained.record(self._stream)

    def wait(self, lap: Lap) -> float:
        """Return when the step has ended: the seconds it took, 0 if it was like no other.

        The lap is over then, unless it has chains.
        """
        ended, waited = lap.ended, False
        if not passed(ended):
            waited = True
            rest = self._naps.rest(lap.kind, lap.launched_s, time.monotonic())
            if rest:
                time.sleep(rest)
                waited = not passed(ended)
                self._naps.woke(not waited)
            if waited:
                ended.synchronize()
        took_s = float(lap.begun.elapsed_time(ended)) / 1e3
        self._naps.ended(lap.kind, lap.launched_s, time.monotonic(), took_s, waited=waited)
        if not lap.chains:
            self._spare[lap.blocks].append(lap)
        return took_s if lap.kind is not None else 0.0

    def wait_chain(self, lap: Lap) -> float:
        """Return when the chains of a step that was waited for are there: the seconds they took."""
        lap.chained.synchronize()
        took_s = float(lap.ended.elapsed_time(lap.chained)) / 1e3
        self._spare[lap.blocks].append(lap)
        return took_s if lap.kind is not None else 0.0


def _mark(blocks: bool) -> torch.cuda.Event:
    return event(timing=True, blocking=blocks)

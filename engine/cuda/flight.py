"""What one step on a GPU carries from launch to collect, and the largest there can be.  Runs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cuda.chaining import Staged
from engine.cuda.laps import Lap
from engine.cuda.settle import Draw
from engine.cuda.slots import Place
from engine.runner import Flight


@dataclass(frozen=True, slots=True)
class Most:
    """The largest step and sequence."""

    tokens: int  # flat tokens of a step
    rows: int  # sequences of a step
    max_len: int  # tokens of a sequence
    drafts: int  # draft tokens a row; 0 without a proposer


@dataclass
class CudaFlight(Flight):
    """What is kept of a step between its phases."""

    draw: Draw | None = None
    plain: bool = False  # each row draws one token
    lap: Lap | None = None  # None where there is no stream
    graphs: int = 0  # that there were before it
    chain: Staged | None = None
    late: tuple[list[Place], int] | None = None  # its draft is staged behind settle: where, bucket

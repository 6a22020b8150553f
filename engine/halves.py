"""Which sequences a step has when they take turns, half of them and then the others.  Runs none.

A step that waits for drafts leaves the device idle while the host works, and the host while the
device does.  In halves either works on one while the other works on the other: the host commits,
guesses and launches what does not fly, behind what does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import sequence


def half(
    decoders: Sequence[sequence.Sequence], running: Iterable[sequence.Sequence]
) -> list[sequence.Sequence]:
    """Of those that decode the ones that do not fly, at most half of all.

    So halves come about by themselves, and are about equal again soon after some have ended.
    """
    ready = [seq for seq in decoders if not seq.pending]
    flying = sum(seq.pending > 0 for seq in running)
    return ready[: (len(ready) + flying + 1) // 2]

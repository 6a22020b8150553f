"""speculative guesses: what could be wrong without changing an answer.  Decides nothing.

    PROPOSERS names every way to guess; the protocols it fills in are in engine/proposer.py.
"""

from __future__ import annotations

PROPOSERS: dict[str, str] = {}

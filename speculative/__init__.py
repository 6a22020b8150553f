"""speculative guesses: what could be wrong without changing an answer.  Decides nothing.

    PROPOSERS names every way to guess on the host, each made with what a further row of a step
    costs (length.py), and whether steps may run ahead of it (ahead.py); the protocol that it fills
    in is in engine/proposer.py.
"""

from __future__ import annotations

PROPOSERS: dict[str, str] = {
    "hybrid": "speculative.hybrid:hybrid",
    "suffix": "speculative.hybrid:suffix",
    "forced": "speculative.hybrid:forced",
    "eagle3": "speculative.hybrid:device",
}

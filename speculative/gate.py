"""Whether texts are worth asking behind what a grammar dictates.  Asks none itself.

Behind the last bracket of a call nothing may follow but the end, and behind a key often nothing
that stood anywhere before; a grammar says so only once there is a guess to judge.  So the last two
tokens that were dictated are remembered, by tenant, with how often in a row what texts suggested
behind them was refused.
"""

from __future__ import annotations

Pair = tuple[bytes, int, int]  # the tenant's namespace, and the tokens; -1: there was but one

PATIENCE = 16  # refusals in a row from which on
AGAIN = 16  # only every such time is asked
MOST = 4096  # pairs; with more all are forgotten


class Gate:
    """Opens where a guess may be legal."""

    def __init__(self) -> None:
        self._refused: dict[Pair, int] = {}

    def opens(self, pair: Pair) -> bool:
        """Whether to ask behind these two tokens; then `learn` is to be told what came of it."""
        refused = self._refused.get(pair, 0)
        if refused < PATIENCE or refused % AGAIN == 0:
            return True
        self._refused[pair] = refused + 1
        return False

    def learn(self, pair: Pair, legal: bool) -> None:
        """What was suggested behind them was legal, as far as one token, or refused."""
        if legal:
            self._refused.pop(pair, None)
            return
        if len(self._refused) >= MOST:
            self._refused.clear()
        self._refused[pair] = self._refused.get(pair, 0) + 1

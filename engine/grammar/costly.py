"""Which grammars are tried apart before an engine compiles them, and the threads that wait for it.

Tries and compiles none: trial.py has that done, matcher.py does what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.grammar.trial import (
    WAITING,
    Bad,
    Busy,
    CompileJob,
    Limits,
    NoRoom,
    Setup,
    Trial,
    Unavailable,
    plain,
)
from engine.messages import Grammar

log = logging.getLogger("engine.grammar.costly")

Refusal = tuple[str, str, int]  # code, message, HTTP status


class Costly:
    """The trials of one engine."""

    def __init__(self, setup: Setup, limits: Limits) -> None:
        self._trial = Trial(setup, limits)
        # One more than may wait: it says that it is too many.
        self._pool = ThreadPoolExecutor(WAITING + 1, thread_name_prefix="trial")

    def holds(self, grammar: Grammar) -> bool:
        """Whether the grammar has to be tried."""
        return not plain(grammar.lark)

    def submit(self, grammar: Grammar, then: Callable[[Refusal | None], None]) -> None:
        """Call `then` from a thread once it is known why the grammar is refused, or that it is not.

        Where there can be no such process nothing is refused: what is counted is bounded anyhow.
        """
        self._pool.submit(self._try, grammar, then)

    def close(self) -> None:
        """End the process at once; who waits for it hears nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._trial.close()

    def _try(self, grammar: Grammar, then: Callable[[Refusal | None], None]) -> None:
        refusal: Refusal | None = None
        try:
            said = self._trial.ask(CompileJob(grammar.lark, grammar.trigger, grammar.opening))
            if isinstance(said, Bad):
                refusal = said.code, said.message, 400
        except Busy as busy:
            refusal = "engine_overloaded", str(busy), 429
        except NoRoom as full:
            refusal = "engine_unavailable", str(full), 503
        except Unavailable:
            pass
        except Exception:  # whoever waits must hear of it
            log.exception("a grammar of %d characters could not be tried", len(grammar.lark))
        then(refusal)

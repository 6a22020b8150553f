"""Links to scripted engine processes, and readers of their answers.  Tests nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable

from engine.scripted import letter
from gateway.link import Mailbox
from gateway.socket_link import SocketLink
from gateway.supervision import Supervision
from tests.patience import PATIENCE_S

RULES = Supervision(boot_s=20, rerun_s=10, backoff_s=0.05, term_s=1, crashes=5)


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "engine.scripted", *options]


@contextlib.asynccontextmanager
async def socket_link(*options: str, rules: Supervision = RULES, **kw) -> AsyncIterator[SocketLink]:
    link = SocketLink(command(*options), rules, **kw)
    await link.start()
    try:
        await link.ready()
        yield link
    finally:
        await link.stop()


async def read(box: Mailbox, enough: int = 1 << 30) -> list[int]:
    """Tokens of choice 0 until it finished or `enough` are here."""
    tokens: list[int] = []
    while len(tokens) < enough:
        for out in await box.outs():
            tokens += out.tokens
            if out.finish:
                return tokens
    return tokens


def letters(count: int) -> list[int]:
    return [letter(position) for position in range(count)]


async def until(condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> float:
    """Seconds until `condition()` holds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, "waited too long"
        await asyncio.sleep(0.005)
    return time.monotonic() - start

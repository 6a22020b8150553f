"""A turn's own headers: what a request may ask in them, what a response tells.  Reads no bodies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gateway.errors import BadRequest, DeadlineExceeded

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from gateway.sessions import Session
    from gateway.turn import Turn


def headers_of(turn: Turn, session: Session, prompt_tokens: int) -> dict[str, str]:
    """The response headers that say what the cache and the session did."""
    hit = f"hit={turn.cached}; prompt={prompt_tokens}"
    state = "none" if session.key is None else "ended" if session.end else "active"
    source = "" if session.key is None else f"; source={session.source}"
    return {
        "cache-control": "no-store",
        "x-accel-buffering": "no",
        "x-slipstream-cache": hit,
        "x-slipstream-session": state + source,
    }


def deadline_of(headers: Headers, begin: float) -> float | None:
    """Seconds that are left of the caller's `x-request-deadline-ms`; None without one.

    Raises BadRequest for one that is no number, DeadlineExceeded when it has passed already.
    """
    given = headers.get("x-request-deadline-ms")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 12):
        raise BadRequest(
            "`x-request-deadline-ms` is the time this request may take, in whole milliseconds.",
            param="x-request-deadline-ms",
        )
    left = int(given) / 1000 - (time.monotonic() - begin)
    if left <= 0:
        raise DeadlineExceeded
    return left

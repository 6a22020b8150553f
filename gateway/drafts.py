"""What a request says of speculation: `speculation` and `prediction`.  Guesses nothing itself.

Neither can change an answer.  Sources: OpenAI's predicted outputs; `speculation` is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.messages import DRAFT_SOURCES, Hello
from gateway.errors import BadRequest
from gateway.protocol import Speculated, Speculation

_PREDICTION = DRAFT_SOURCES.index("prediction")


def fields(asked: Speculation | None, hello: Hello) -> dict[str, Any]:
    """Of the Submit; raise BadRequest for a source that this server has not."""
    if asked is None:
        return {}
    known = hello.draft_sources
    if asked.mode not in ("auto", "off", *known):
        there = f"This server drafts with {', '.join(known)}" if known else "This server drafts not"
        raise BadRequest(
            f"`speculation.mode` {asked.mode!r} is not available. {there}; use auto or off.",
            param="speculation.mode", code="unsupported_value",
        )
    return {"drafts": asked.mode} | ({} if asked.max is None else {"max_drafts": asked.max})


def predicted(counts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens of predictions that were right, and that were not, of each choice's Out.drafts."""
    seen = sum(count[2 * _PREDICTION] for count in counts if count)
    right = sum(count[2 * _PREDICTION + 1] for count in counts if count)
    return right, seen - right


def speculated(counts: Sequence[Sequence[int]]) -> Speculated:
    """The same of every source, as `usage.speculation`."""
    sums = [sum(column) for column in zip(*(count for count in counts if count), strict=True)]
    sources = {
        source: (sums[2 * place], sums[2 * place + 1])
        for place, source in enumerate(DRAFT_SOURCES) if sums and sums[2 * place]
    }  # fmt: skip
    return Speculated(
        sum(seen for seen, _ in sources.values()), sum(right for _, right in sources.values()),
        {source: {"drafted": seen, "accepted": right} for source, (seen, right) in sources.items()},
    )  # fmt: skip

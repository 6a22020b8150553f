"""Tool plans, remembered by the request's own bytes and made off the event loop.  Checks no schema.

An agent sends the same tools each turn; choice.plan() then costs milliseconds a tool only once.
"""

from __future__ import annotations

from collections import OrderedDict

import anyio.to_thread

from engine.grammar.schema import BadSchema, Busy, NoRoom
from gateway.errors import BadRequest, QueueFull, Unavailable
from gateway.protocol import ChatRequest
from gateway.tools import Format
from gateway.tools.choice import ToolPlan, plan

PLANS = 64
PLAN_BYTES = 256 * 1024  # of a request's fields; larger ones are planned anew each time

Fields = tuple[bytes, bytes, bool | None, bytes]


class Plans:
    """The plans of one format; one event loop only."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._made: OrderedDict[Fields, ToolPlan] = OrderedDict()

    async def of(self, request: ChatRequest) -> ToolPlan:
        """How this request's output is constrained and read.

        Raise BadRequest naming the field; QueueFull or Unavailable where none can be tried now.
        """
        fields: Fields = (
            bytes(request.tools),
            bytes(request.tool_choice),
            request.parallel_tool_calls,
            bytes(request.response_format),
        )
        if found := self._made.get(fields):
            self._made.move_to_end(fields)
            return found
        try:
            if fields[0] == fields[3] == b"null":
                made = self._plan(fields)
            else:
                made = await anyio.to_thread.run_sync(self._plan, fields)
        except BadSchema as bad:
            raise BadRequest(_said(bad), param=getattr(bad, "param", ""), code=bad.code) from None
        except Busy as busy:
            raise QueueFull(str(busy), 1.0) from None
        except NoRoom as full:
            raise Unavailable(str(full)) from None
        if sum(len(field) for field in fields if isinstance(field, bytes)) <= PLAN_BYTES:
            self._made[fields] = made
            if len(self._made) > PLANS:
                self._made.popitem(last=False)
        return made

    def _plan(self, fields: Fields) -> ToolPlan:
        tools, choice, parallel, answer = fields
        return plan(tools, choice, parallel, answer, self._format)


def _said(bad: BadSchema) -> str:
    """The refusal with its pointer and keyword, which clients cannot read anywhere else."""
    where = f" (keyword {bad.keyword!r} at {bad.pointer or '/'})" if bad.keyword else ""
    return bad.message if bad.keyword and bad.keyword in bad.message else f"{bad.message}{where}"

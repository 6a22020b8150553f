"""What a choice that has ended delivered: whether it may be told so, and counted.  Ends no turn.

Calls and answers whose schema was enforced in full are valid; a thread judges the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gateway.link import EngineFailed

if TYPE_CHECKING:
    from gateway.choices import Choice
    from gateway.metrics import Metrics
    from gateway.tools.choice import ToolPlan


def check_call(plan: ToolPlan | None, choice: Choice) -> None:
    """Raise EngineFailed when a choice ended by itself without the call that it owes.

    A grammar makes that impossible; were it to fail, no agent may take the answer for a good one.
    """
    owed = plan is not None and plan.owes_call
    if owed and choice.finish == "stop" and not choice.calls and not choice.stopped_here:
        raise EngineFailed(
            "no_call", "The model ended without the call that `tool_choice` asks for. Try again."
        )


def count(plan: ToolPlan | None, choice: Choice, metrics: Metrics) -> None:
    """Count the calls, or the answer by a schema that is enforced in part."""
    calls = choice.calls
    if plan is None or not plan.relaxed:
        for _ in calls:
            metrics.tool_call()
    elif calls:
        _judge(plan, calls, metrics.tool_call)
    elif plan.relaxes_answer and (text := choice.content()):
        _judge(plan, [("", text)], metrics.relaxed_answer)


def _judge(
    plan: ToolPlan, said: Sequence[tuple[str, str]], counted: Callable[[bool], None]
) -> None:
    def judged(done: asyncio.Future[list[bool]]) -> None:
        for valid in done.result():
            counted(valid)

    judging = asyncio.get_running_loop().run_in_executor(None, plan.judged, said)
    judging.add_done_callback(judged)

"""Two gateways on one engine process that neither of them started: who loses what.  No model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest
import uvloop

from engine.messages import Submit
from gateway.attached_link import AttachedLink
from gateway.link import EngineLost
from gateway.socket_link import SocketLink
from tests.linking import RULES, letters, read, socket_link, until


@contextlib.asynccontextmanager
async def pair(*options: str) -> AsyncIterator[tuple[SocketLink, AttachedLink, AttachedLink]]:
    """The link that runs the engine, and two that are attached to it."""
    async with socket_link(*options) as owner:
        links = [AttachedLink(owner.path, RULES) for _ in range(2)]
        for link in links:
            await link.start()
            await link.ready()
        yield (owner, *links)
        for link in links:
            await link.stop()


def test_an_engine_answers_each_gateway_and_outlives_one_that_leaves():
    async def go() -> None:
        async with pair("--step-ms", "5") as (owner, first, second):
            boxes = [first.submit(Submit("r0", [1], 30)), second.submit(Submit("r1", [1], 30))]
            assert await asyncio.gather(*map(read, boxes)) == [letters(30)] * 2
            stays, leaves = second.submit(Submit("s", [1], 60)), first.submit(Submit("l", [1], 60))
            await leaves.admission()
            await first.stop()
            with pytest.raises(EngineLost, match="stopping"):
                await read(leaves)
            assert await read(stays) == letters(60)
            assert (owner.restarts, second.restarts) == (0, 0)
    uvloop.run(go())


def test_a_killed_engine_comes_back_for_all_and_runs_again_what_nobody_was_shown():
    async def go() -> None:
        async with pair("--step-ms", "8") as (owner, first, second):
            shown = first.submit(Submit("shown", [1], 1000))
            await read(shown, 3)
            waits = second.submit(Submit("waits", [1], 20))
            await waits.admission()
            os.kill(owner.process.pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match="send it again"):
                await read(shown)
            assert await read(waits) == letters(20)
            await until(lambda: first.hello is not None)
            assert (first.hello, first.restarts, second.restarts) == (second.hello, 1, 1)
            assert await read(first.submit(Submit("next", [1], 5))) == letters(5)
    uvloop.run(go())


def test_what_waits_for_an_engine_ends_when_none_will_come():
    async def go() -> None:
        async with pair("--step-ms", "5000") as (owner, first, _):
            waits = first.submit(Submit("waits", [1], 20))
            await waits.admission()
            os.kill(owner.process.pid, signal.SIGSTOP)  # it neither ends nor comes back
            first._wire.close()
            await until(lambda: first.hello is None)
            first.give_up("It stays down.")
            with pytest.raises(EngineLost, match="stays down"):
                await read(waits)
            with pytest.raises(EngineLost, match="stays down"):
                first.submit(Submit("late", [1], 1))
            os.kill(owner.process.pid, signal.SIGKILL)
    uvloop.run(go())

"""What keeps an engine's supervisor going: no process, no memory, callbacks that raise."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop

from engine.messages import Hello, Submit
from gateway.link import EngineLost
from gateway.socket_link import SocketLink
from tests.linking import RULES, letters, read, socket_link, until


def test_an_engine_program_that_does_not_exist_is_said_so():
    async def go() -> None:
        downs: list[str] = []
        link = SocketLink(["/no/such/program"], RULES, on_down=downs.append)
        await link.start()
        with pytest.raises(EngineLost, match=r"could not start .*No such file"):
            await link.ready()
        await until(lambda: bool(downs))
        await link.stop()
    uvloop.run(go())


def test_a_restart_that_the_system_refuses_counts_as_one_more_life(monkeypatch):
    async def go() -> None:
        async with socket_link() as link:
            start = asyncio.create_subprocess_exec
            refusals = [OSError(11, "no more processes"), OSError(12, "no memory")]

            async def scarce(*command: str, **kw: object) -> asyncio.subprocess.Process:
                if refusals:
                    raise refusals.pop()
                return await start(*command, **kw)

            monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
            os.kill(link.process.pid, signal.SIGKILL)
            await until(lambda: link.hello is None)
            await until(lambda: link.hello is not None)
            assert link.restarts == 3
            assert await read(link.submit(Submit("r", [1], 5))) == letters(5)
    uvloop.run(go())


def test_what_a_callback_does_harms_no_connection_and_delays_no_request(caplog):
    seen: list[int] = []

    async def go() -> None:
        def on_ready(hello: Hello) -> None:
            seen.append(len(link._waiting))
            raise BrokenPipeError("nobody reads our output")

        async with socket_link("--step-ms", "20", on_ready=on_ready) as opened:
            link = opened
            waits = link.submit(Submit("waits", [1], 5))
            await waits.admission()
            os.kill(link.process.pid, signal.SIGKILL)
            await until(lambda: link.hello is None)
            assert link._waiting
            assert await read(waits) == letters(5)
    uvloop.run(go())
    assert seen[1] == 0  # it was sent again before anything was told
    assert "nobody reads our output" in caplog.text

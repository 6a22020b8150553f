"""Slow readers: what waits in a mailbox merges, its request pauses and resumes.  Both links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from engine.messages import Out, Pause, Resume, Submit, TokenLogprobs
from engine.scripted import ScriptedEngine
from gateway.link import CROWDED, Bell, Mailbox, Note
from gateway.local_link import LocalLink
from tests.linking import letters, read, socket_link, until


@contextlib.asynccontextmanager
async def local_link(build: Callable[[], ScriptedEngine]) -> AsyncIterator[LocalLink]:
    link = LocalLink(build)
    await link.start()
    try:
        yield link
    finally:
        await link.stop()


@pytest.mark.parametrize("make", ["local", "socket"])
def test_a_reader_that_does_not_read_pauses_its_request_and_loses_nothing(make):
    async def go() -> None:
        opened = local_link(lambda: ScriptedEngine(0.0005)) if make == "local" else (
            socket_link("--step-ms", "0.5"))
        async with opened as link:
            await link.ready()
            notes: list[Note] = []

            def send(note: Note) -> None:
                notes.append(note)
                link.send(note)

            box, other = (link.submit(Submit(id, [1], 800)) for id in ("slow", "quick"))
            box.watch(Bell(), send)
            reading = asyncio.ensure_future(read(other))
            await until(lambda: bool(notes))
            assert await reading == letters(800)  # hundreds of steps went by
            assert notes == [Pause("slow")]
            assert CROWDED < box.waiting_tokens < 600
            assert len(box._outs) == 1
            assert await read(box) == letters(800)
            assert notes[:2] == [Pause("slow"), Resume("slow")]
            link.close(box)
    uvloop.run(go())


def test_a_paused_request_is_aborted_when_its_mailbox_closes():
    async def go() -> None:
        async with local_link(lambda: ScriptedEngine(0.0005)) as link:
            await link.ready()
            box = link.submit(Submit("slow", [1], 100_000))
            box.watch(Bell(), link.send)
            engine = link._engine
            await until(lambda: bool(engine._paused))
            assert not engine._running
            link.close(box)
            await until(lambda: not engine._paused)
    uvloop.run(go())


def test_outs_that_wait_for_a_slow_reader_become_one_a_choice_with_all_that_they_held():
    async def go() -> None:
        notes: list[Note] = []
        box = Mailbox(Submit("r", [1], 9999, n=2))
        box.watch(Bell(), notes.append)
        shared = [7] * 100
        marks = [TokenLogprobs(-1.0, [])] * 100
        for index in (0, 1, 0):
            box.put_out(Out("r", index, shared, logprobs=marks, written=64))
        box.put_out(Out("r", 0, [8, 9], "stop", True, marks[:2], cached=5, written=128))
        assert (len(shared), notes) == (100, [Pause("r")])  # the engine's own list is untouched
        first, second = await box.outs()
        assert first.tokens == [7] * 200 + [8, 9] and len(first.logprobs) == 202
        assert (first.finish, first.stopped, first.cached, first.written) == ("stop", True, 5, 128)
        assert (second.index, second.tokens, second.finish) == (1, [7] * 100, "")
        assert notes == [Pause("r"), Resume("r")] and box.waiting_tokens == 0
        box.put_out(Out("r", 1, [7] * 999, "length"))  # nothing runs any more: nothing to pause
        assert len(notes) == 2
    asyncio.run(go())

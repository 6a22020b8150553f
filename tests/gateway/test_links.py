"""Both links over the scripted engine: a thread, and a process that dies in every phase."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from engine.messages import Abort, Hello, Submit
from engine.scripted import ScriptedEngine
from gateway.link import EngineLost, SubmitRefused
from gateway.local_link import LocalLink
from gateway.socket_link import SocketLink
from gateway.supervision import Supervision
from tests.linking import RULES, command, letters, read, socket_link, until

pytestmark = pytest.mark.timed


@contextlib.asynccontextmanager
async def local_link(build: Callable[[], ScriptedEngine]) -> AsyncIterator[LocalLink]:
    link = LocalLink(build)
    await link.start()
    try:
        yield link
    finally:
        await link.stop()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_local_link_serves_many_requests_at_once_and_refuses_an_empty_prompt():
    async def go() -> None:
        async with local_link(lambda: ScriptedEngine(step_s=0.001)) as link:
            hello = await link.ready()
            assert (hello.model, link.hello) == ("scripted", hello)
            boxes = [link.submit(Submit(f"r{i}", [1, 2], 10 + i)) for i in range(20)]
            assert (await boxes[0].admission()).queued == 0
            answers = await asyncio.gather(*[read(box) for box in boxes])
            assert answers == [letters(10 + i) for i in range(20)]
            with pytest.raises(SubmitRefused):
                await link.submit(Submit("empty", [], 1)).admission()
            assert link.stats_age_s < 2
    asyncio.run(go())


def test_a_local_link_never_blocks_the_event_loop_while_its_engine_is_made_or_steps():
    class Slow(ScriptedEngine):
        def step(self):
            time.sleep(0.05)
            return super().step()

    async def go() -> float:
        async with local_link(lambda: Slow(boot_s=0.2)) as link:
            with pytest.raises(EngineLost):
                link.submit(Submit("early", [1], 1))
            reading = asyncio.ensure_future(link.ready())
            worst = 0.0
            submitted = False
            while not (submitted and reading.done()):
                at = time.monotonic()
                await asyncio.sleep(0.001)
                worst = max(worst, time.monotonic() - at)
                if not submitted and link.hello is not None:
                    submitted = True
                    reading = asyncio.ensure_future(read(link.submit(Submit("r", [1], 3))))
            return worst
    assert uvloop.run(go()) < 0.05


def test_a_local_engine_that_raises_ends_every_mailbox_and_is_closed(caplog):
    closed: list[bool] = []

    class Breaks(ScriptedEngine):
        def step(self):
            replies = super().step()
            if self._step >= 3:
                raise RuntimeError("secret details")
            return replies

        def close(self):
            closed.append(True)

    async def go() -> None:
        async with local_link(lambda: Breaks(step_s=0.002)) as link:
            await link.ready()
            boxes = [link.submit(Submit(f"r{i}", [1], 100)) for i in range(3)]
            for box in boxes:
                with pytest.raises(EngineLost, match="restart the server") as error:
                    await read(box)
                assert "secret" not in str(error.value)
            assert link.hello is None
            with pytest.raises(EngineLost):
                link.submit(Submit("late", [1], 1))
    uvloop.run(go())
    assert closed == [True]
    assert "secret details" in caplog.text


def test_a_local_engine_that_cannot_be_made_says_why_to_those_who_wait(caplog):
    def build() -> ScriptedEngine:
        raise ValueError("The model has no weights.")

    async def go() -> None:
        async with local_link(build) as link:
            with pytest.raises(EngineLost, match="no weights"):
                await link.ready()
    uvloop.run(go())


@pytest.mark.parametrize("make", ["local", "socket"])
def test_a_closed_mailbox_aborts_its_request_in_the_engine_within_100_ms(make):
    async def go() -> float:
        opened = (local_link(lambda: ScriptedEngine(0.005)) if make == "local"
                  else socket_link("--step-ms", "5"))
        async with opened as link:
            await link.ready()
            box = link.submit(Submit("r", [1], 100_000))
            await read(box, 3)
            await until(lambda: link.stats.running == 1)
            link.close(box)
            link.close(box)  # twice is safe
            return await until(lambda: link.stats.running == 0)
    assert uvloop.run(go()) < 0.1


def test_a_process_streams_choices_of_many_requests_and_ends_with_its_link():
    async def go() -> int:
        async with socket_link() as link:
            boxes = [link.submit(Submit(f"r{i}", [1], 50)) for i in range(50)]
            assert await asyncio.gather(*[read(box) for box in boxes]) == [letters(50)] * 50
            link.send(Abort("nobody"))
            assert await read(link.submit(Submit("next", [1], 5))) == letters(5)
            assert link.process is not None
            assert alive(link.process.pid)
            folder = link._folder
            pid = link.process.pid
        assert folder is not None
        assert not folder.exists()
        return pid
    assert not alive(uvloop.run(go()))


@pytest.mark.parametrize("seen", [0, 1, 10, 19])
def test_a_killed_engine_ends_read_streams_at_once_and_runs_the_others_again(seen):
    """SIGKILL when the reader has `seen` of 20 tokens; beside it a request that nobody has read."""
    async def go() -> None:
        async with socket_link("--step-ms", "8") as link:
            first = link.hello
            box = link.submit(Submit("read", [1], 20))
            tokens = await read(box, seen) if seen else []
            unread = link.submit(Submit("unread", [1], 400, n=2))
            await unread.admission()
            os.kill(link.process.pid, signal.SIGKILL)
            killed = time.monotonic()
            if seen:
                try:
                    tokens += await read(box)
                except EngineLost:
                    assert len(tokens) < 20
                else:  # the last token left the engine before the signal came
                    assert (seen, len(tokens)) == (19, 20)
                    await until(lambda: link.hello is None)
                assert time.monotonic() - killed < 1.0  # what is promised
                assert tokens == letters(len(tokens))
                assert link.hello is None
                with pytest.raises(EngineLost):
                    link.submit(Submit("while it is down", [1], 1))
            else:
                await until(lambda: link.hello is None)
                assert await read(box) == letters(20)
            outs: dict[int, list[int]] = {0: [], 1: []}
            while len(outs[1]) < 30:
                for out in await unread.outs():
                    outs[out.index] += out.tokens
            assert outs[0][:30] == outs[1][:30] == letters(30)  # no token twice
            assert link.restarts == 1
            assert link.hello is not None
            assert link.hello.version != first.version
    uvloop.run(go())


def test_a_finished_answer_that_waits_to_be_read_survives_the_engine():
    async def go() -> None:
        async with socket_link() as link:
            box = link.submit(Submit("r", [1], 5))
            await until(lambda: box.waiting_tokens == 5)
            os.kill(link.process.pid, signal.SIGKILL)
            await until(lambda: link.hello is None)
            assert await read(box) == letters(5)
            assert link.hello is None  # it was not made a second time
    uvloop.run(go())


def test_a_request_whose_engine_dies_twice_is_not_tried_a_third_time():
    async def go() -> None:
        async with socket_link("--step-ms", "5000") as link:
            box = link.submit(Submit("poison", [1], 5))
            for life in range(2):
                await until(lambda life=life: link.hello is not None and link.restarts == life)
                box._outs.clear()
                os.kill(link.process.pid, signal.SIGKILL)
                await until(lambda: link.hello is None)
            with pytest.raises(EngineLost):
                await read(box)
    uvloop.run(go())


def test_a_request_that_waits_too_long_for_the_next_engine_ends():
    rules = Supervision(boot_s=20, rerun_s=0.1, backoff_s=30, term_s=1)

    async def go() -> float:
        async with socket_link("--step-ms", "5000", rules=rules) as link:
            waits, left = link.submit(Submit("waits", [1], 5)), link.submit(Submit("left", [1], 5))
            os.kill(link.process.pid, signal.SIGKILL)
            await until(lambda: link.hello is None)
            link.close(left)
            at = time.monotonic()
            with pytest.raises(EngineLost, match="did not come back"):
                await read(waits)
            return time.monotonic() - at
    assert uvloop.run(go()) < 1


def test_an_engine_that_keeps_dying_stays_down_and_says_so():
    async def go() -> None:
        downs: list[str] = []
        rules = Supervision(boot_s=20, rerun_s=10, backoff_s=0.01, crashes=3)
        async with socket_link(rules=rules, on_down=downs.append) as link:
            for _ in range(3):
                await until(lambda: link.hello is not None)
                os.kill(link.process.pid, signal.SIGKILL)
                await until(lambda: link.hello is None)
            await until(lambda: bool(downs))
            assert "3 times" in downs[0]
            assert link.restarts == 2
            with pytest.raises(EngineLost, match="3 times"):
                link.submit(Submit("r", [1], 1))
    uvloop.run(go())


def test_an_engine_that_cannot_start_is_not_tried_again():
    async def go() -> None:
        link = SocketLink([sys.executable, "-c", "raise SystemExit(7)"], RULES)
        await link.start()
        with pytest.raises(EngineLost, match=r"could not start \(exit code 7"):
            await link.ready()
        await link.stop()
    uvloop.run(go())


FOREIGN = """
import socket, sys, time
from engine.messages import Hello, frame
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--socket") + 1])
listener.listen(1)
connection, _ = listener.accept()
connection.sendall({sent})
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ("frame(Hello(99, 'm', 1, 1, 64, 1, []))", "protocol 99, this gateway 1"),
        ("b'HTTP/1.1 400 Bad Request'", "garbage"),
        ("b'\\x01\\x00\\x00\\x00\\xc1'", "garbage"),
    ],
)
def test_a_foreign_engine_is_refused_at_start_with_what_it_said(sent, says):
    async def go() -> None:
        link = SocketLink([sys.executable, "-c", FOREIGN.format(sent=sent)], RULES)
        await link.start()
        with pytest.raises(EngineLost, match=says):
            await link.ready()
        assert link.restarts == 0
        await link.stop()
        assert not alive(link.process.pid)
    uvloop.run(go())


def test_a_frozen_engine_is_killed_only_while_requests_are_open():
    rules = Supervision(boot_s=20, beat_s=1.5, rerun_s=10, backoff_s=0.05, term_s=0.1)

    async def go() -> None:
        async with socket_link(rules=rules) as link:
            pid = link.process.pid
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(2.5)
            assert link.stats_age_s > 1.5
            assert alive(pid)
            box = link.submit(Submit("r", [1], 5))
            assert await read(box) == letters(5)  # by the next engine
            assert not alive(pid)
    uvloop.run(go())


def test_hello_is_the_first_thing_a_link_knows():
    async def go() -> None:
        link = SocketLink(command("--boot-ms", "100"), RULES)
        await link.start()
        assert link.hello is None
        with pytest.raises(EngineLost, match="not ready"):
            link.submit(Submit("r", [1], 1))
        assert isinstance(await link.ready(), Hello)
        await link.stop()
        assert link.hello is None
    uvloop.run(go())

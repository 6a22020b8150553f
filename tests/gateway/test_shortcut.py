"""Tokens that reach the socket without waking their reader: order, ends, errors.  Real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from engine.messages import Out, Pause, Step, Submit
from gateway.events import Text
from gateway.link import Bell, Mailbox
from gateway.sse import ChatFrames
from tests.asking import USER, PlayedLink, open_gateway
from tests.auditor import Auditor
from tests.live import Answer, Live, running
from tests.patience import until

CHUNKED_END = b"\r\n0\r\n\r\n"


class Played:
    """A live server whose engine admits, and then gives what the test says, when it says so."""

    def __init__(self, live: Live, link: PlayedLink) -> None:
        self.live = live
        self.link = link
        self.past: dict[str, list[bool]] = {}  # what each sink answered, by request id
        self.socks: list[socket.socket] = []
        self._steps = 0

    def ask(self, headers: str = "", http: str = "1.1", **fields: object) -> socket.socket:
        """Send a request; return when the engine has admitted it and the head was sent."""
        ids = len(self.link.submits)
        body = json.dumps({"model": "tiny", "messages": [USER], "stream": True, **fields}).encode()
        sock = self.live.connect()
        self.socks.append(sock)
        head = f"POST /v1/chat/completions HTTP/{http}\r\nHost: x\r\n{headers}"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: len(self.link.submits) > ids)
        return sock

    @property
    def ids(self) -> list[str]:
        return [submit.id for submit in self.link.submits]

    def give(self, *outs: Out) -> None:
        """Deliver one message a given out, all in one callback, as one read of the link does."""
        self.in_loop(lambda: self.link.boxes.deliver([self._step(out) for out in outs]))

    def give_step(self, *outs: Out) -> None:
        """Deliver one step with these outs."""
        self.in_loop(lambda: self.link.boxes.deliver([self._step(*outs)]))

    def _step(self, *outs: Out) -> Step:
        self._steps += 1
        return Step(self._steps, list(outs))

    def in_loop(self, call: Callable[[], None]) -> None:
        """Run on the server's loop, wait until it has."""
        done = threading.Event()
        self.live.loop.call_soon_threadsafe(lambda: (call(), done.set()))
        assert done.wait(5)

    def first(self, id: str, text: str = "<") -> None:
        """Give the first token, wait until the sink is there, and note what it answers."""
        self.give(out(id, text))
        box = self.box(id)
        until(lambda: box.started and box._bell.asleep)
        sink = box.sink
        if sink is not None:
            answers = self.past[id] = []

            def noted(out: Out) -> bool:
                answers.append(sink(out))
                return answers[-1]

            box.sink = noted

    def box(self, id: str) -> Mailbox:
        return self.link.boxes._open[id]


def out(id: str, text: str, finish: str = "", index: int = 0) -> Out:
    return Out(id, index, list(text.encode()), finish)



def rest(sock: socket.socket) -> bytes:
    """The stream's body, to its end."""
    raw = bytearray()
    while not raw.endswith(CHUNKED_END):
        part = sock.recv(1 << 20)
        assert part, bytes(raw[-200:])
        raw += part
    sock.close()
    return Answer.of(bytes(raw)).body


@pytest.fixture
def played():
    link = PlayedLink(lambda _: [])
    with running(open_gateway(link)) as live:
        one = Played(live, link)
        yield one
        for sock in one.socks:
            sock.close()


def test_a_token_goes_past_the_sleeping_reader_and_a_finish_wakes_it(played):
    sock = played.ask(stream_options={"include_usage": True})
    (id,) = played.ids
    played.first(id)
    for text in ("a", "b", "é"):
        played.give(out(id, text))
        assert played.box(id)._bell.asleep and not played.box(id)._outs
    played.give(out(id, "c"), out(id, "d", "length"))  # the finish lies in the same read
    heard = Auditor(include_usage=True).hear(rest(sock))
    assert (heard.choices[0].content, heard.choices[0].finish) == ("<abécd", "length")
    assert heard.usage["completion_tokens"] == 7
    assert played.past[id] == [True] * 4
    metrics = played.live.gateway.metrics
    assert (sum(metrics._first.counts), sum(metrics._gap.counts)) == (1, 5)
    assert metrics._finished["length"] == 1 and not played.link.boxes.open_boxes()


def test_a_step_feeds_streams_that_end_and_streams_that_go_on(played):
    socks = [played.ask() for _ in range(3)]
    one, two, three = played.ids
    for id in played.ids:
        played.first(id)
    played.give_step(out(one, "1"), out(two, "2", "length"), out(three, "3"))
    played.give_step(out(three, "c", "length"), out(one, "a", "length"))
    said = [Auditor().hear(rest(sock)).choices[0].content for sock in socks]
    assert said == ["<1a", "<2", "<3c"]


def test_half_a_code_point_waits_for_its_other_half(played):
    sock = played.ask()
    (id,) = played.ids
    played.first(id)
    first, second = "é".encode()
    played.give(Out(id, 0, [first]), Out(id, 0, [second]), out(id, "", "length"))
    heard = Auditor().hear(rest(sock)).choices[0]
    assert (heard.content, played.past[id]) == ("<é", [True, True])


def test_a_client_that_reads_now_fast_now_slowly_gets_every_word_in_order(played):
    sock = played.ask()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    (id,) = played.ids
    played.first(id)
    raw, sent, number = bytearray(), ["<"], 0

    def give(count: int) -> None:
        nonlocal number
        for _ in range(count):
            text = f"{number:06}," * 2000
            number += 1
            sent.append(text)
            played.give(out(id, text))

    for _ in range(3):
        give(5)
        noted = len(played.link.notes)
        while not played.link.paused:  # until the sockets are full: it is paused and stays so
            give(20)
            time.sleep(0.05)
        assert any(isinstance(note, Pause) for note in played.link.notes[noted:])
        assert played.box(id)._outs  # give more to a queue that holds some already
        give(3)
        while played.link.paused or not played.box(id)._bell.asleep:
            raw += sock.recv(1 << 20)
        del played.past[id][:-1]
        give(3)
        assert played.past[id][-3:] == [True] * 3  # caught up: past the reader again
    played.give(out(id, ">", "length"))
    while not raw.endswith(CHUNKED_END):
        raw += sock.recv(1 << 20)
    sock.close()
    heard = Auditor().hear(Answer.of(bytes(raw)).body).choices[0]
    assert heard.content == "".join(sent) + ">"


def test_an_error_on_the_way_ends_its_own_stream_with_a_typed_error(played, monkeypatch, caplog):
    batch = ChatFrames.batch

    def breaking(self, said):
        if said[0].events == [Text("é")]:
            raise ValueError("a secret")
        return batch(self, said)

    monkeypatch.setattr(ChatFrames, "batch", breaking)
    socks = [played.ask() for _ in range(2)]
    bad, good = played.ids
    for id in played.ids:
        played.first(id)
    played.give_step(out(bad, "é"), out(good, "a"))
    until(lambda: bad not in played.link.boxes._open)
    assert played.link.closed == [bad]
    played.give_step(out(bad, "b"), out(good, "b", "length"))
    heard = Auditor().hear(rest(socks[0]))
    assert (heard.error["code"], heard.choices[0].content) == ("internal", "<")
    assert Auditor().hear(rest(socks[1])).choices[0].content == "<ab"
    assert "ValueError" in caplog.text and "a secret" not in caplog.text
    assert played.live.gateway.metrics._finished["error"] == 1


@pytest.mark.parametrize("end", ["deadline", "drain", "engine"])
def test_what_ends_a_stream_from_outside_comes_after_all_that_was_said(played, end):
    headers = "X-Request-Deadline-Ms: 600\r\n" if end == "deadline" else ""
    sock = played.ask(headers)
    (id,) = played.ids
    played.first(id)
    played.give(out(id, "a"), out(id, "b"))
    if end == "drain":
        played.in_loop(played.live.gateway.drain.expired.set)
    elif end == "engine":
        played.in_loop(played.link.die)
    heard = Auditor().hear(rest(sock))
    codes = {
        "deadline": "deadline_exceeded", "drain": "server_draining", "engine": "engine_restarted"
    }  # fmt: skip
    assert heard.error["code"] == codes[end]
    assert heard.choices[0].content == "<ab"


def test_a_client_that_leaves_is_noticed_and_later_tokens_go_nowhere(played):
    sock = played.ask()
    (id,) = played.ids
    played.first(id)
    box = played.box(id)
    played.give(out(id, "a"))
    sock.close()
    until(lambda: bool(played.link.closed))
    played.give(out(id, "b"))
    assert played.past[id] == [True] and box.sink is None
    assert played.live.gateway.metrics._left["decode"] == 1


@pytest.mark.parametrize("fields", [{"stop": ["c"]}, {"n": 2}], ids=["stop", "n"])
def test_what_may_end_or_has_several_choices_keeps_to_its_reader(played, fields):
    sock = played.ask(**fields)
    (id,) = played.ids
    played.first(id)
    assert played.box(id).sink is None
    played.give(out(id, "ab"))
    if "n" in fields:
        played.give_step(out(id, "x", "length", 1), out(id, "", "length"))
    else:
        played.give(out(id, "cd"))
    assert Auditor().hear(rest(sock)).choices[0].content == "<ab"


def test_a_response_without_chunks_keeps_to_its_reader(played):
    sock = played.ask(http="1.0")
    (id,) = played.ids
    played.first(id)
    played.give(out(id, "a"))
    played.give(out(id, "b", "length"))
    raw = b""
    while part := sock.recv(65536):
        raw += part
    sock.close()
    assert Auditor().hear(raw.partition(b"\r\n\r\n")[2]).choices[0].content == "<ab"
    assert played.past[id] == [False]


def test_nothing_overtakes_what_waits_in_a_mailbox():
    asyncio.run(_overtaking())


async def _overtaking() -> None:
    box = Mailbox(Submit("r", [1], 99))
    bell = Bell()
    box.watch(bell, lambda _: None)
    past: list[int] = []
    full = False

    def sink(out: Out) -> bool:
        if not full:
            past.extend(out.tokens)
        return not full

    box.sink = sink
    box.put_out(Out("r", 0, [1]))  # nobody sleeps: the reader is busy with what came before
    assert not past
    heard = bell.heard()
    box.put_out(Out("r", 0, [2]))
    assert past == [2]
    full = True
    box.put_out(Out("r", 0, [3]))
    full = False
    assert heard.done()
    box.put_out(Out("r", 0, [4]))  # 3 waits still
    assert past == [2]
    assert [out.tokens for out in box.take()] == [[1], [3], [4]]
    heard = bell.heard()
    box.put_out(Out("r", 0, [5], "length"))
    assert past == [2] and heard.done() and box.running == 0
    heard = bell.heard()
    heard.cancel()  # the reader was cancelled and has not run yet
    box.put_out(Out("r", 0, [6]))
    assert past == [2]

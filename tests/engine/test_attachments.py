"""Several gateways on one engine: whose request is whose, who hears what.  Runs no model."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.attachments import GARBAGE, GONE, STUCK, Attachments
from engine.messages import (
    Abort,
    Admitted,
    Deframer,
    Hello,
    Pause,
    Refused,
    Resume,
    Stats,
    Step,
    Submit,
    ToEngine,
    ToGateway,
    frame,
    to_gateway,
)
from engine.scripted import ScriptedEngine, letter
from tests.patience import PATIENCE_S, until

LONG = 1_000_000


class Deciding(ScriptedEngine):
    """Refuses a second request of an id that runs, as engine/loop.py does."""

    times = 0

    def step(self) -> list[ToGateway]:
        return [
            Refused(reply.id, "duplicate_request", "It runs.")
            if isinstance(reply, Admitted) and reply.id == "twice" and self._seen_twice()
            else reply
            for reply in super().step()
        ]

    def _seen_twice(self) -> bool:
        self.times += 1
        return self.times > 1


class Gateway:
    """A gateway's end of its connection."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(5)
        self.deframer = Deframer()
        self.heard: list[ToGateway] = []
        assert isinstance(self.next(), Hello)

    def say(self, *messages: ToEngine) -> None:
        self.socket.sendall(b"".join(map(frame, messages)))

    def next(self) -> ToGateway:
        while not self.heard:
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise EOFError
            self.heard += [to_gateway(body) for body in self.deframer.feed(chunk)]
        return self.heard.pop(0)

    def until(self, kind: type[ToGateway]) -> ToGateway:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def answer(self, id: str) -> list[int]:
        """The tokens of a request; everything else heard must be ours or nobody's."""
        tokens: list[int] = []
        while True:
            match self.next():
                case Step(outs=outs):
                    assert outs and {out.id for out in outs} == {id}
                    tokens += [token for out in outs for token in out.tokens]
                    if outs[-1].finish:
                        return tokens
                case Admitted(id=admitted):
                    assert admitted == id
                case _:
                    pass


class Board:
    """`Attachments.serve` on a thread, and who attached."""

    def __init__(self, engine: ScriptedEngine, path: str, **options: int) -> None:
        self.engine, self.path = engine, path
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(8)
        self.attachments = Attachments(engine, listener, **options)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.attachments.serve, args=(self.stop,))
        self.thread.start()
        self.gateways: list[Gateway] = []

    def attach(self) -> Gateway:
        self.gateways.append(Gateway(self.path))
        return self.gateways[-1]

    def left(self) -> dict[str, int]:
        return {id: asked.choices_left for id, asked in list(self.attachments._asked.items())}

    def ends(self) -> str:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.attachments.ended



@contextlib.contextmanager
def board(engine: ScriptedEngine | None = None, **options: int) -> Iterator[Board]:
    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        made = Board(engine or Deciding(step_s=0.01), str(Path(folder) / "e"), **options)
        yield made
        made.stop.set()
        made.ends()
        for gateway in made.gateways:
            gateway.socket.close()


class Launching(ScriptedEngine):
    """Has a device: says when it gets a step, and how many bytes its gateway had heard by then."""

    def __init__(self, *given: float, **more: float) -> None:
        super().__init__(*given, **more)
        self.told: list[str] = []

    def step(self) -> list[ToGateway]:
        self.told.append("begins")
        self.meanwhile()
        self.told.append("runs")
        replies = super().step()
        self.exposed = self._step % 2 == 1 and bool(self._running)
        return replies


def test_while_the_device_waits_replies_are_told_behind_the_launch_and_none_is_lost(monkeypatch):
    engine = Launching(step_s=0.001)
    send = Attachments._send

    def noted(self, replies):
        if any(isinstance(reply, Step) for reply in replies):
            engine.told.append("sends")
        send(self, replies)

    monkeypatch.setattr(Attachments, "_send", noted)
    with board(engine) as made:
        gateway = made.attach()
        gateway.say(Submit("a", [1], 30))
        assert gateway.answer("a") == [letter(i) for i in range(30)]
    said = "".join({"begins": "(", "runs": ")", "sends": "s"}[one] for one in engine.told)
    assert said.count("s") == 30
    assert said.count("(s)") >= 10 and said.count(")s") >= 10


def test_an_aborted_request_is_not_remembered_but_one_that_lost_a_choice_is():
    with board() as made:
        gateway = made.attach()
        gateway.say(*[Submit(f"r{i}", [1], LONG, n=2) for i in range(20)])
        until(lambda: made.left() == {f"r{i}": 2 for i in range(20)})
        gateway.say(Abort("r0", 1), *[Abort(f"r{i}") for i in range(1, 20)])
        until(lambda: made.left() == {"r0": 2})
        until(lambda: set(made.engine._running) == {("r0", 0)})


@pytest.mark.parametrize("gateways", [1, 2])
def test_only_running_requests_are_remembered(gateways):
    with board(ScriptedEngine()) as made:
        for number in range(gateways):
            made.attach().say(
                *[Submit(f"r{i}-{number}", [1], 2, n=2) for i in range(20)],
                Submit(f"empty-{number}", [], 2),
            )
        until(lambda: made.engine._generated == 80 * gateways and not made.left())


def test_a_refused_second_request_of_an_id_leaves_the_first_one_to_be_aborted():
    with board() as made:
        gateway = made.attach()
        gateway.say(Submit("twice", [1], LONG, n=3))
        until(lambda: made.left() == {"twice": 3})
        gateway.say(Submit("twice", [1], LONG))
        until(lambda: made.engine.times == 2)
        assert gateway.until(Refused).code == "duplicate_request"
        assert made.left() == {"twice": 3}


def test_each_gateway_hears_of_its_own_requests_only_and_all_hear_the_stats():
    with board(ScriptedEngine(step_s=0.002)) as made:
        gateways = [made.attach() for _ in range(3)]
        for number, gateway in enumerate(gateways):
            gateway.say(Submit(f"r{number}", [1], 30 + number))
        for number, gateway in enumerate(gateways):
            assert gateway.answer(f"r{number}") == [letter(p) for p in range(30 + number)]
        told = [gateway.until(Stats) for gateway in gateways]
        assert all(stats.generated_tokens for stats in told)


def test_a_step_is_one_frame_for_each_gateway_and_keeps_its_number():
    with board(ScriptedEngine(step_s=0.02)) as made:
        first, second = made.attach(), made.attach()
        first.say(*[Submit(f"a{i}", [1], 3) for i in range(5)])
        until(lambda: len(made.engine._running) == 5)
        second.say(Submit("b", [1], LONG))
        numbers: list[int] = []
        while len(numbers) < 3:
            step = first.until(Step)
            assert [out.id for out in step.outs] == [f"a{i}" for i in range(5)]
            numbers.append(step.number)
        assert numbers == [1, 2, 3]
        assert second.until(Step).outs[0].id == "b"


def test_an_id_that_another_gateway_has_running_is_refused_and_its_answer_goes_on():
    with board() as made:
        first, second = made.attach(), made.attach()
        first.say(Submit("same", [1], 20))
        until(lambda: made.left() == {"same": 1})
        second.say(Submit("same", [1], 5))
        assert second.until(Refused) == Refused(
            "same", "duplicate_request", "Request id same is running. Use another."
        )
        assert first.answer("same") == [letter(p) for p in range(20)]
        second.say(Submit("same", [1], 5))  # it is free again
        assert second.answer("same") == [letter(p) for p in range(5)]


def test_no_gateway_can_touch_the_requests_of_another():
    with board() as made:
        first, second = made.attach(), made.attach()
        first.say(Submit("mine", [1], 40))
        until(lambda: made.left() == {"mine": 1})
        second.say(Pause("mine"), Abort("mine"), Abort("mine", 0), Resume("mine"))
        second.say(Submit("own", [1], 3))
        assert second.answer("own") == [letter(p) for p in range(3)]  # all of it was read by now
        assert first.answer("mine") == [letter(p) for p in range(40)]


@pytest.mark.parametrize("end", ["leaves", "garbage"])
def test_a_gateway_that_goes_away_loses_its_own_requests_and_nothing_else(end):
    with board() as made:
        first, second = made.attach(), made.attach()
        first.say(Submit("a", [1], LONG, n=2), Submit("b", [1], LONG))
        second.say(Submit("c", [1], 60))
        until(lambda: len(made.engine._running) == 4)
        if end == "leaves":
            first.socket.close()
        else:
            first.socket.sendall(b"\xff" * 8)
        until(lambda: set(made.engine._running) == {("c", 0)})
        assert second.answer("c") == [letter(p) for p in range(60)]
        assert made.attachments.dropped == (end == "garbage")
        assert made.attachments.ended == ""


def test_one_that_never_reads_is_cut_off_while_another_is_served():
    with board(ScriptedEngine(), unsent_limit=1 << 16) as made:
        deaf, second = made.attach(), made.attach()
        deaf.say(*[Submit(f"r{i}", [1], LONG) for i in range(50)])
        until(lambda: len(made.engine._running) == 50)
        until(lambda: not made.engine._running)
        second.say(Submit("b", [1], 5))
        assert second.answer("b") == [letter(p) for p in range(5)]


class Slow(ScriptedEngine):
    """Hears of no end: what it computes for a gateway that left goes on coming."""

    def _take(self, message: ToEngine, replies: list[ToGateway]) -> None:
        if not isinstance(message, Abort):
            super()._take(message, replies)


def test_what_still_comes_for_one_that_left_goes_to_nobody():
    with board(Slow(step_s=0.005)) as made:
        first, second = made.attach(), made.attach()
        first.say(Submit("a", [1], LONG))
        until(lambda: ("a", 0) in made.engine._running)
        first.socket.close()
        until(lambda: len(made.attachments._attached) == 1)
        second.say(Submit("b", [1], 5))
        assert second.answer("b") == [letter(p) for p in range(5)]
        assert ("a", 0) in made.engine._running


def test_the_engine_ends_with_the_last_gateway_that_leaves():
    with board() as made:
        first, second = made.attach(), made.attach()
        first.socket.close()
        second.say(Submit("a", [1], 3))
        assert second.answer("a") == [letter(p) for p in range(3)]
        assert made.thread.is_alive()
        second.socket.close()
        assert made.ends() == GONE


def test_the_last_gateway_that_stops_reading_ends_the_engine():
    with board(ScriptedEngine(), unsent_limit=1 << 16) as made:
        first, deaf = made.attach(), made.attach()
        first.socket.close()
        deaf.say(*[Submit(f"r{i}", [1], LONG) for i in range(50)])
        assert made.ends() == STUCK


def test_the_last_one_that_sends_garbage_leaves_room_for_another():
    with board() as made:
        made.attach().socket.sendall(b"\xff" * 8)
        until(lambda: made.attachments.dropped == 1)
        good = made.attach()
        good.say(Submit("a", [1], 3))
        assert good.answer("a") == [letter(p) for p in range(3)]
        assert made.attachments.ended != GARBAGE


def test_one_that_left_while_the_engine_loaded_does_not_end_it_for_the_next():
    with tempfile.TemporaryDirectory(prefix="slip-") as folder:
        path = str(Path(folder) / "e")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(8)
        early, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        early.connect(path)
        early.close()
        second.connect(path)
        attachments = Attachments(ScriptedEngine(), listener)
        stop = threading.Event()
        thread = threading.Thread(target=attachments.serve, args=(stop,))
        thread.start()
        second.settimeout(5)
        assert second.recv(100)
        assert attachments.ended == ""
        stop.set()
        thread.join(PATIENCE_S)
        second.close()

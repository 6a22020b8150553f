"""Which requests of a gateway an engine process still owes an end.  Runs no process, no model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine.messages import Abort, Admitted, Refused, Submit, ToGateway, frame
from engine.scripted import ScriptedEngine
from engine.server import Attachment


class Deciding(ScriptedEngine):
    """Refuses a second request of an id that runs, as engine/loop.py does."""

    def step(self) -> list[ToGateway]:
        return [
            Refused(reply.id, "duplicate_request", "It runs.")
            if isinstance(reply, Admitted) and reply.id == "twice" and self._seen_twice()
            else reply
            for reply in super().step()
        ]

    def _seen_twice(self) -> bool:
        self.times = getattr(self, "times", 0) + 1
        return self.times > 1


@pytest.fixture
def attached() -> Iterator[tuple[Attachment, socket.socket]]:
    """A gateway's connection to a slow engine, and the gateway's end."""
    ours, theirs = socket.socketpair()
    attachment = Attachment(Deciding(step_s=0.01), ours, 1 << 20)
    stop = threading.Event()
    thread = threading.Thread(target=attachment.serve, args=(stop,), daemon=True)
    thread.start()
    yield attachment, theirs
    stop.set()
    thread.join(5)
    theirs.close()


def settle(attachment: Attachment, left: dict[str, int]) -> None:
    deadline = time.monotonic() + 5
    while attachment._choices_left != left or not attachment._engine.inbox.empty():
        assert time.monotonic() < deadline, attachment._choices_left
        time.sleep(0.005)


def test_an_aborted_request_is_not_remembered_but_one_that_lost_a_choice_is(attached):
    attachment, gateway = attached
    for i in range(20):
        gateway.sendall(frame(Submit(f"r{i}", [1], 1_000_000, n=2)))
    settle(attachment, {f"r{i}": 2 for i in range(20)})
    gateway.sendall(frame(Abort("r0", 1)))
    for i in range(1, 20):
        gateway.sendall(frame(Abort(f"r{i}")))
    settle(attachment, {"r0": 2})


def test_a_refused_second_request_of_an_id_leaves_the_first_one_to_be_aborted(attached):
    attachment, gateway = attached
    gateway.sendall(frame(Submit("twice", [1], 1_000_000, n=3)))
    settle(attachment, {"twice": 3})
    gateway.sendall(frame(Submit("twice", [1], 1_000_000)))
    deadline = time.monotonic() + 5
    while getattr(attachment._engine, "times", 0) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.05)
    assert attachment._choices_left == {"twice": 3}

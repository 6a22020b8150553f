"""A machine that lets no schema be tried: said as that, and never of the schema.  No model."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
from typing import Any

import msgspec
import pytest

import engine.grammar.forks as made
import engine.grammar.trial as trials
from engine.grammar import costly, schema
from engine.grammar.trial import Died, Limits, NoRoom, Passed, Setup, receive
from engine.messages import Grammar, Refused
from gateway.errors import refused
from tests.engine.test_trial import SLOW, in_long, job, kept, trial  # noqa: F401 a fixture


def test_who_is_killed_from_outside_hears_that_there_was_no_room(trial) -> None:  # noqa: F811
    """As where a machine's memory is short; nothing of that is remembered."""
    future, fork = in_long(trial, job(**SLOW))
    before = trial.pid
    fork.send_signal(signal.SIGKILL)
    assert isinstance(future.exception(trials.WALL_S), NoRoom)
    assert job(**SLOW) not in kept(trial)
    assert trial.ask(job(type="string")) == Passed() and trial.pid == before


@pytest.mark.parametrize(("where", "name"), [(made.tempfile, "TemporaryFile"), (made.os, "fork")])
def test_a_job_that_cannot_be_forked_is_answered_and_the_process_goes_on(
    monkeypatch, where: Any, name: str
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(where, name, full)
    control, asking = socket.socketpair()
    ours, theirs = socket.socketpair()
    with control, asking, ours:
        with theirs:
            socket.send_fds(asking, [struct.pack("!d", 1.0)], [theirs.fileno()])
        forks: dict[int, Any] = {}
        assert made._begin(control, forks, lambda job: Passed()) and not forks
        ours.settimeout(5)
        said = msgspec.msgpack.decode(receive(ours), type=Died)
        assert said.how == "room" and "No space left" in said.detail
        assert ours.recv(1) == b"", "the descriptor that came with the job stays open"


def test_an_engine_refuses_it_with_a_503_that_may_be_sent_again(monkeypatch) -> None:
    tried = costly.Costly(Setup(), Limits())
    monkeypatch.setattr(tried._trial, "_tried", lambda job, cpu_s: Died("room"))
    heard: list[Any] = []
    tried._try(Grammar("start: /a/"), heard.append)
    tried.close()
    ((code, message, status),) = heard
    assert (code, status) == ("engine_unavailable", 503) and "again" in message
    error = refused(Refused("r", code, message, "", status))
    assert (error.status, error.code, error.retry) == (503, code, True)
    assert int(error.headers["retry-after"]) >= 1


def test_threads_that_come_at_once_share_one_process(monkeypatch) -> None:
    inside, go = threading.Event(), threading.Event()
    count: list[int] = []

    def slow(setup: Setup) -> object:
        count.append(1)
        inside.set()
        go.wait(5)
        return object()

    monkeypatch.setattr(schema, "Trial", slow)
    schema._only_trial.cache_clear()
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(schema._trial())) for _ in range(2)]
    try:
        threads[0].start()
        assert inside.wait(5)
        threads[1].start()
        threads[1].join(0.2)  # it gets to where it would make another one
        go.set()
        for thread in threads:
            thread.join(5)
    finally:
        schema._only_trial.cache_clear()
    assert len(count) == 1 and found[0] is found[1]

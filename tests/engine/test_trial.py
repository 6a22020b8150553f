"""Costly schemas in a process that can be killed: limits, crashes, lanes, no orphans.  No model.

What is slow or large here is what work.py would not let through; nobody counted it.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import engine.grammar.forks as made
import engine.grammar.trial as trials
from engine.grammar import schema as schemas
from engine.grammar.schema import BadSchema, Judge, check, check_apart, embed
from engine.grammar.trial import (
    WAITING,
    Bad,
    Busy,
    CompileJob,
    Died,
    Limits,
    NoRoom,
    Order,
    Passed,
    Setup,
    Trial,
    Unavailable,
    plain,
)
from engine.messages import Grammar, Submit
from tests.driver import Run, make
from tests.patience import until
from tests.schemas import FAMILIES, ODD, record
from tests.scripted import EOS, byte_tokenizer_json
from tests.tiny import write_llama

ROOT = Path(__file__).parent.parent.parent
LONG = Limits(1_000.0, 8 << 30)  # more than a test takes
SETUP = Setup(byte_tokenizer_json(), EOS + 1, [EOS])


def lark(schema: dict[str, Any]) -> str:
    return f"start: %json {embed(schema)}\n"


def job(**keywords: Any) -> CompileJob:
    return CompileJob(lark(record({"x": keywords}, ["x"])), "", "")


# The time grows with the square of the divisor: minutes, and 100 MB a second.
SLOW = {"multipleOf": 99_999_989}
# Memory doubles with each pattern.
HOG = {"allOf": [{"pattern": f".*{c}.{{{20 + i}}}$"} for i, c in enumerate("abcdefghijklmnop")]}


@pytest.fixture
def trial() -> Iterator[Trial]:
    made = Trial(SETUP, LONG)
    yield made
    made.close()


def forks(of: Trial) -> list[psutil.Process]:
    try:
        return psutil.Process(of.pid).children() if of.pid else []
    except psutil.NoSuchProcess:
        return []


def alive(pid: int) -> bool:
    """Whether it runs; in a container nobody may bury what has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kept(of: Trial) -> list[CompileJob]:
    """The jobs of SLOW and of nothing else, if its verdict is remembered."""
    return [what for what in (job(**SLOW),)
            if of._known(hashlib.sha256(msgspec.msgpack.encode(what)).digest())]


def ask(of: Trial, what: CompileJob) -> Future[Passed | Bad]:
    """In a thread of its own; nobody waits for it at the end."""
    future: Future[Passed | Bad] = Future()

    def run() -> None:
        try:
            future.set_result(of.ask(what))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_long(of: Trial, what: CompileJob) -> tuple[Future[Passed | Bad], psutil.Process]:
    """Ask, and wait until that is in the long lane; its fork."""
    future = ask(of, what)
    until(lambda: of._waiting_long > 0 and len(forks(of)) == 1)
    (fork,) = forks(of)
    return future, fork


def test_what_passes_passes_and_what_the_compiler_refuses_is_refused_in_its_words(trial) -> None:
    assert trial.ask(job(type="string")) == Passed()
    faulty = trial.ask(CompileJob("start: (", "", ""))
    assert isinstance(faulty, Bad) and faulty.code == "invalid_schema"
    endless = trial.ask(job(type="string", pattern="^(a{1000}){40}$"))
    assert isinstance(endless, Bad) and endless.code == "no_finite_instance"
    until(lambda: forks(trial) == [])


def test_cpu_time_is_limited_and_the_verdict_kept(trial) -> None:
    trial.limits = Limits(0.5)
    said = trial.ask(job(**SLOW))
    assert isinstance(said, Bad) and said.code == "grammar_too_complex"
    assert "0.5 s of CPU time" in said.message and "--engine.compile-cpu-s" in said.message
    assert trial.ask(job(type="string")) == Passed()
    trial.close()  # nothing can be tried any more
    assert trial.ask(job(**SLOW)) is said
    assert trial.ask(job(type="string")) == Passed()
    with pytest.raises(Unavailable):
        trial.ask(job(type="integer"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited on Linux only")
def test_memory_is_limited(trial) -> None:
    trial.limits = Limits(LONG.cpu_s, 64 << 20)
    said = trial.ask(job(**HOG))
    assert isinstance(said, Bad) and said.code == "grammar_too_complex"
    assert "64 MiB" in said.message and "--engine.compile-memory-bytes" in said.message


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_a_refusal_and_the_process_goes_on(trial, number: signal.Signals) -> None:
    future, fork = in_long(trial, job(**SLOW))
    before = trial.pid
    fork.send_signal(number)
    said = future.result(trials.WALL_S)
    assert isinstance(said, Bad) and said.code == "grammar_failed"
    assert job(**SLOW) in kept(trial)
    assert trial.ask(job(type="string")) == Passed() and trial.pid == before


def test_a_process_that_was_killed_is_replaced(trial) -> None:
    trial.ask(job(type="string"))
    before = trial.pid
    future, fork = in_long(trial, job(**SLOW))
    os.kill(before, signal.SIGKILL)
    until(lambda: not alive(fork.pid))
    until(lambda: trial.pid != before and len(forks(trial)) == 1)  # it is tried once more
    assert trial.ask(job(type="integer")) == Passed() and not future.done()
    os.kill(trial.pid or 0, signal.SIGKILL)
    assert isinstance(future.exception(trials.WALL_S), NoRoom)
    assert job(**SLOW) not in kept(trial)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_the_second_limit_of_cpu_time_ends_a_fork_by_a_signal_of_its_own() -> None:
    pid = os.fork()
    if pid == 0:
        made._limit(Order(job(), 1.0, 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        os._exit(0 if 1 < soft < hard else 1)  # where they are equal SIGKILL comes
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_holds_no_socket_of_another_job(trial) -> None:
    _, fork = in_long(trial, job(**SLOW))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(trial.ask, job(**(SLOW | {"minimum": 1})))
        until(lambda: len(forks(trial)) == 2)
        (other,) = (one for one in forks(trial) if one.pid != fork.pid)

        def sockets() -> int:
            other.suspend()
            links = [os.readlink(one) for one in Path(f"/proc/{other.pid}/fd").iterdir()]
            other.resume()
            return sum(link.startswith("socket:") for link in links)

        # Its own, and both ends of what wakes the process, once it has closed the others.
        until(lambda: sockets() == 3)
        trial.close()
        assert isinstance(second.exception(trials.WALL_S), Unavailable)


def test_a_hung_fork_is_ended_by_the_wall_clock(trial, monkeypatch) -> None:
    monkeypatch.setattr(trials, "WALL_FACTOR", 0)
    trial.ask(job(type="string"))
    monkeypatch.setattr(trials, "WALL_S", 1.0)
    said = trial.ask(job(**SLOW))
    assert isinstance(said, Bad) and said.code == "grammar_too_complex"


def test_what_takes_long_holds_up_only_its_own_kind(trial) -> None:
    future, fork = in_long(trial, job(**SLOW))
    for kind in ("string", "integer", "null"):
        assert trial.ask(job(type=kind)) == Passed()
    assert not future.done() and fork.is_running()


def test_at_most_so_many_wait_and_of_the_long_ones_fewer(trial) -> None:
    trial.ask(job(type="string"))
    with trial._brief:
        waiting = [ask(trial, job(type="integer", maximum=i)) for i in range(WAITING)]
        until(lambda: trial._waiting == WAITING)
        with pytest.raises(Busy, match="again"):
            trial.ask(job(type="null"))
    assert all(future.result(trials.WALL_S) == Passed() for future in waiting)
    trial._waiting_long = trials.WAITING_LONG
    with pytest.raises(Busy):
        trial.ask(job(**SLOW))
    assert trial.ask(job(type="null")) == Passed()


def test_closing_ends_the_process_and_what_it_runs() -> None:
    trial = Trial(SETUP, LONG)
    future, fork = in_long(trial, job(**SLOW))
    server = trial.pid or 0
    trial.close()
    until(lambda: not alive(fork.pid) and not alive(server))
    assert isinstance(future.exception(trials.WALL_S), Unavailable)


KILLED = """
import sys, threading, time
from tests.engine.test_trial import SLOW, job, in_long, SETUP, LONG
from engine.grammar.trial import Trial
trial = Trial(SETUP, LONG)
_, fork = in_long(trial, job(**SLOW))
print(trial.pid, fork.pid, flush=True)
time.sleep(1000)
"""


def test_no_process_outlives_a_killed_engine() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE,
                          text=True) as parent:  # fmt: skip
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        parent.kill()
    until(lambda: not any(map(alive, pids)))


def test_where_no_process_can_be_started_nothing_is_tried(monkeypatch) -> None:
    trial = Trial(SETUP)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable):
        trial.ask(job(type="string"))
    assert check_apart(record({"x": {}}), strict=True, root="object", judge=Judge()).dropped == ()


def test_ordinary_tools_are_plain_and_what_multiplies_or_is_large_is_not() -> None:
    assert all(plain(lark(schema)) for schema in FAMILIES.values())
    assert plain("\n".join(lark({"anyOf": [{}] * 3}) for _ in range(100)))
    assert not plain(lark(record({"x": HOG}))) and not plain(lark(record({"x": SLOW})))
    assert not plain(lark({"enum": ["a" * 30_000, "b" * 30_000]}))
    assert not plain(lark({"pattern": "a{0,900}"})) and plain(lark({"pattern": "a{0,90}"}))
    assert not plain("\n".join(lark({"anyOf": [{"format": "date"}] * 3}) for _ in range(100)))


def outcome(checked: Any, schema: Any, strict: bool) -> Any:
    try:
        return checked(schema, strict=strict, root="any", judge=Judge())
    except BadSchema as bad:
        return bad.code, bad.message, bad.pointer, bad.keyword


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_checked_apart_comes_out_as_here(monkeypatch, strict: bool) -> None:
    monkeypatch.setattr(schemas, "plain", lambda text: False)
    for schema in [*FAMILIES.values(), *(schema for schema, _ in ODD.values())]:
        here, apart = (outcome(how, schema, strict) for how in (check, check_apart))
        assert here == apart
        if not isinstance(here, tuple):
            assert json.dumps(here.schema) == json.dumps(apart.schema)


def test_a_schema_that_is_not_done_is_refused_where_it_is_checked(monkeypatch) -> None:
    trial = Trial(Setup(), Limits(0.2))
    monkeypatch.setattr(schemas, "_trial", lambda: trial)
    monkeypatch.setattr(trial, "_tried", lambda job, cpu_s: Died("time"))
    with pytest.raises(BadSchema, match=r"0\.2 s of CPU time") as caught:
        check_apart({"anyOf": [HOG]}, strict=True, root="any", judge=Judge())
    assert caught.value.code == "grammar_too_complex" and "--engine" not in caught.value.message


# ---- in an engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("trial") / "model", max_len=2048)


def test_other_requests_go_on_while_one_is_tried(folder) -> None:
    engine = make(folder, compile_cpu_s=2.0)
    slow = Grammar(lark(record({"x": SLOW})), param="tools")
    quick = Grammar(lark(record({"x": {"type": "integer"}}, ["x"])))
    run = Run(engine).put(Submit("slow", [1], 4, grammar=slow))
    steps = gaps = streams = 0
    while "slow" not in run.refused:
        if not run.finish((f"long{streams}", 0)):
            before = len(run.tokens.get((f"long{streams}", 0), ()))
        else:  # a stream is short beside the trial
            streams, before = streams + 1, 0
        if not before:
            run.put(Submit(f"long{streams}", [1, 2], 2_000))
        if steps == 10:
            run.put(Submit("quick", [1], 40, grammar=quick))
        run.step()
        steps += 1
        gaps += len(run.tokens[f"long{streams}", 0]) == before
    assert steps > 50 and not gaps and run.finish(("quick", 0))
    refused = run.refused["slow"]
    assert (refused.code, refused.param, refused.status) == ("grammar_too_complex", "tools", 400)
    engine.close()


def test_a_request_that_was_tried_runs_and_one_too_many_hears_so(folder, monkeypatch) -> None:
    engine = make(folder)
    costly = Grammar(lark(record({"x": {"type": "string", "maxLength": 9_000_000}}, ["x"])))
    assert not plain(costly.lark)
    run = Run(engine).put(Submit("r", [1], 40, grammar=costly)).drain()
    assert run.finish(("r", 0))

    def busy(self: Trial, job: CompileJob) -> Passed:
        raise Busy

    monkeypatch.setattr(Trial, "ask", busy)
    other = Grammar(lark(record({"x": {"type": "string", "maxLength": 9_000_001}}, ["x"])))
    run = Run(engine).put(Submit("r", [1], 40, grammar=other)).drain()
    assert (run.refused["r"].code, run.refused["r"].status) == ("engine_overloaded", 429)
    engine.close()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("odd")])
def test_a_request_is_answered_whatever_keeps_its_grammar_from_being_tried(
    folder, monkeypatch, error: Exception
) -> None:
    def fails(*given: Any) -> None:
        raise error

    monkeypatch.setattr(trials.socket, "socketpair", fails)
    engine = make(folder)
    costly = Grammar(lark(record({"x": {"type": "string", "maxLength": 9_000_002}}, ["x"])))
    run = Run(engine).put(Submit("r", [1], 40, grammar=costly))
    until(lambda: run.step() or bool(run.finish(("r", 0))))
    engine.close()


def test_a_schema_is_checked_here_where_no_descriptor_is_left(monkeypatch) -> None:
    def fails(*given: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(trials.socket, "socketpair", fails)
    monkeypatch.setattr(schemas, "plain", lambda text: False)
    assert check_apart(record({"x": {}}), strict=True, root="object", judge=Judge()).dropped == ()


def test_without_a_limit_nothing_is_tried(folder, monkeypatch) -> None:
    monkeypatch.setattr(Trial, "ask", lambda self, job: pytest.fail("it was tried"))
    engine = make(folder, compile_cpu_s=0.0)
    costly = Grammar(lark(record({"x": {"type": "string", "maxLength": 9_000_000}}, ["x"])))
    assert Run(engine).put(Submit("r", [1], 40, grammar=costly)).drain().finish(("r", 0))


def test_many_threads_may_ask_at_once(trial) -> None:
    kinds = [job(type="integer", maximum=i) for i in range(WAITING)]
    with ThreadPoolExecutor(WAITING) as pool:
        assert list(pool.map(trial.ask, kinds)) == [Passed()] * WAITING

"""The process that costly schemas are tried in: forks once a job.  Started by trial.py only.

    python -m engine.grammar.forks FD

It builds the vocabulary once and has one thread, so a fork costs two milliseconds and starts from
the same memory each time.  A fork limits itself, answers on the socket that came with its job and
ends.  This process reads no job; it buries forks, and tells whoever waits for one that died.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

import msgspec

from engine.grammar.trial import (
    Answer,
    Bad,
    CheckJob,
    CompileJob,
    Died,
    Order,
    Passed,
    Setup,
    receive,
    send,
)
from engine.parent import die_with_parent

NICE = 5  # beside an engine's steps
_NO_MEMORY = b"memory allocation of"  # how Rust says it before it aborts
_WALL = struct.Struct("!d")

Runner = Callable[[CompileJob | CheckJob], Answer]


@dataclass(slots=True)
class _Fork:
    """A job that runs."""

    caller: socket.socket
    ends: float  # monotonic: hung by then
    said: IO[bytes]  # what it writes to stderr
    killed: bool = field(default=False)


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICE)
    setup = msgspec.msgpack.decode(receive(control), type=Setup)
    runner = _compiler(setup) if setup.tokenizer_json else _checker()
    gc.collect()
    gc.freeze()  # forks leave these pages alone
    send(control, b"")  # ready
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, at: None)
    forks: dict[int, _Fork] = {}
    try:
        while True:
            ends = min((fork.ends for fork in forks.values()), default=math.inf)
            wait = None if ends == math.inf else max(ends - time.monotonic(), 0.0)
            ready, _, _ = select.select([control, wake], [], [], wait)
            if wake in ready:
                wake.recv(4096)
            _bury(forks)
            if control in ready and not _begin(control, forks, runner):
                return 0
    finally:
        for pid in forks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _begin(control: socket.socket, forks: dict[int, _Fork], runner: Runner) -> bool:
    """Fork for the job that has come; False when who started us has gone."""
    raw, handles, _, _ = socket.recv_fds(control, _WALL.size, 1)
    if len(raw) < _WALL.size or not handles:
        return False
    caller = socket.socket(fileno=handles[0])
    parent = os.getpid()
    with contextlib.ExitStack() as undone:
        undone.enter_context(caller)
        try:
            said = undone.enter_context(tempfile.TemporaryFile())
            pid = os.fork()
        except OSError as error:  # a full disk, no descriptor or process left
            with contextlib.suppress(OSError):
                send(caller, msgspec.msgpack.encode(Died("room", f"no fork: {error}")))
            return True
        undone.pop_all()
    if pid == 0:
        control.close()
        for other in forks.values():  # no job can answer for another one
            other.caller.close()
        _run(caller, said, runner, parent)
    forks[pid] = _Fork(caller, time.monotonic() + _WALL.unpack(raw)[0], said)
    return True


def _bury(forks: dict[int, _Fork]) -> None:
    """Tell the callers of forks that died; kill those that hang."""
    now = time.monotonic()
    for pid, fork in list(forks.items()):
        if fork.ends < now and not fork.killed:
            os.kill(pid, signal.SIGKILL)
            fork.killed, fork.ends = True, math.inf
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            continue
        del forks[pid]
        with fork.caller, fork.said, contextlib.suppress(OSError):
            if status:
                send(fork.caller, msgspec.msgpack.encode(_death(status, fork)))


def _death(status: int, fork: _Fork) -> Died:
    code = os.waitstatus_to_exitcode(status)
    fork.said.seek(0)
    said = fork.said.read(4096)
    detail = f"ended with {code}: {said.decode(errors='replace')}"
    if fork.killed or -code in (signal.SIGPROF, signal.SIGXCPU):
        return Died("time", detail)
    if code == -signal.SIGKILL:  # as a machine without memory does
        return Died("room", detail)
    return Died("memory" if _NO_MEMORY in said else "crash", detail)


def _run(caller: socket.socket, said: IO[bytes], runner: Runner, parent: int) -> None:
    """In a fork: take the job, answer it, end."""
    code = 1
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        os.dup2(said.fileno(), 2)
        order = msgspec.msgpack.decode(receive(caller), type=Order)
        _limit(order)
        try:
            answer = runner(order.job)
        except MemoryError:
            answer = Died("memory", "MemoryError")
        send(caller, msgspec.msgpack.encode(answer))
        code = 0
    except BaseException as error:  # the library may panic, and no exception may leave a fork
        os.write(2, repr(error).encode()[:1000])
    finally:
        os._exit(code)


def _limit(order: Order) -> None:
    """CPU time by a timer whose signal ends this process, memory by what it may map."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
    seconds = math.ceil(order.cpu_s) + 2  # in case that somebody takes the timer
    # Not the same twice: then it is the hard limit's SIGKILL that comes, and says nothing.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if order.memory_bytes and sys.platform.startswith("linux"):  # elsewhere it is not kept
        with open("/proc/self/statm", encoding="ascii") as sizes:
            now = int(sizes.read().split()[0]) * resource.getpagesize()
        most = now + order.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _compiler(setup: Setup) -> Runner:
    from engine.grammar.matcher import Compiler, GrammarRefused
    from engine.messages import Grammar

    compiler = Compiler(setup.tokenizer_json, setup.vocab, setup.stop_ids)

    def run(job: CompileJob | CheckJob) -> Answer:
        assert isinstance(job, CompileJob), "this process compiles"
        try:
            compiler.compile(Grammar(job.lark, trigger=job.trigger, opening=job.opening))
        except GrammarRefused as refused:
            return Bad(refused.code, refused.message)
        return Passed()

    return run


def _checker() -> Runner:
    from engine.grammar.schema import BadSchema, Judge, check

    def run(job: CompileJob | CheckJob) -> Answer:
        assert isinstance(job, CheckJob), "this process checks"
        judge = Judge(job.left)
        try:
            found = check(json.loads(job.schema), strict=job.strict, root=job.root, judge=judge)
        except BadSchema as bad:
            return Bad(bad.code, bad.message, bad.pointer, bad.keyword, judge.left)
        dropped = [(gone.pointer, gone.keyword, gone.why) for gone in found.dropped]
        return Passed(json.dumps(found.schema), dropped, list(found.rewritten), judge.left)

    return run


if __name__ == "__main__":
    sys.exit(main())

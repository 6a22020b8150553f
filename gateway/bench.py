"""`slipstream bench gateway`: HTTP and SSE over a scripted engine, with targets.  Loads no model.

Three processes: this one is the client (gateway/load.py), `python -m gateway.bench` the server,
`python -m engine.scripted` its engine.  All figures include the client's own share of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.messages import Hello
from gateway import http, load
from gateway.app import build
from gateway.config import GatewayConfig
from gateway.processes import children, command_line, cpu_s, resident
from gateway.prompt import Prompts
from gateway.socket_link import SocketLink
from gateway.state import Gateway
from gateway.tools import pick
from gateway.worker import Part
from gateway.workers import Program, Workers

Row = dict[str, object]  # what, value, unit, beside
STREAMS, STEP_MS = 200, 20.0  # 200 streams of 50 tokens a second
IDLE = 10_000
MODEL = "scripted"
ROOT = str(Path(__file__).resolve().parent.parent)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def measure(seconds: float, workers: int = 1) -> Iterator[Row]:
    """All rows, one after the other; about `seconds` for each that is timed.

    With several workers the gateway's CPU and memory are those of all its processes.
    """
    options = ["--workers", str(workers)]
    quick, paced = asyncio.run(_quick(seconds, options)), asyncio.run(_paced(seconds, options))
    yield from quick
    yield from paced
    yield asyncio.run(_idle(options))


async def _quick(seconds: float, options: list[str]) -> list[Row]:
    """With an engine that answers in one step: requests a second, and what one request costs."""
    async with served(*options, "--per-step", "8") as server:
        await load.many(server.port, 0.5, 4)  # warm
        rate = await load.many(server.port, seconds, 32)
        times = await load.one_by_one(server.port, seconds)
    return [
        at_least("requests, not streamed, 32 clients", rate, "req/s", 400),
        at_most("overhead of one request, p50", 1e3 * load.percentile(times, 50), "ms", 2),
        at_most("overhead of one request, p99", 1e3 * load.percentile(times, 99), "ms", 10),
    ]


async def _paced(seconds: float, options: list[str]) -> list[Row]:
    """With an engine that gives each stream 50 tokens a second."""
    async with served(*options, "--step-ms", str(STEP_MS)) as server:
        tokens = int(seconds * 1e3 / STEP_MS)
        gaps, user, system = await _events(server, tokens)
        closes = await load.disconnects(server.port, 20)
    late = 1e3 * load.percentile(gaps, 99) - STEP_MS
    return [
        at_most(f"{STREAMS} streams x 50 tok/s: p99 gap beyond the engine's", late, "ms", 20),
        at_most("gateway CPU for a million events", user + system, "s", 20),
        {"what": "  of it in Python", "value": user, "unit": "s", "beside": "user time"},
        {"what": "  of it in the kernel", "value": system, "unit": "s", "beside": "system time"},
        at_most("disconnect to engine free, worst of 20", 1e3 * max(closes), "ms", 100),
    ]


async def _events(server: Server, tokens: int) -> tuple[list[float], float, float]:
    """Gaps of the longer run; user and system seconds that a million events take.

    Two runs that differ in length only: their difference holds no request's set-up, no imports.
    The clock of /proc has 10 ms, so the difference should be tens of thousands of events.
    """
    short = max(2, tokens // 5)
    await load.streams(server.port, STREAMS, short)  # warm
    runs: list[tuple[int, float, float]] = []
    gaps: list[float] = []
    for length in (short, tokens):
        user, system = server.cpu_s()
        gaps, events = await load.streams(server.port, STREAMS, length)
        user_after, system_after = server.cpu_s()
        runs.append((events, user_after - user, system_after - system))
    (few, *less), (many, *more) = runs
    if many <= few:
        raise RuntimeError(f"{tokens} tokens a stream are too few to measure; give more seconds.")
    user, system = ((b - a) / (many - few) * 1e6 for a, b in zip(less, more, strict=True))
    return gaps, user, system


async def _idle(options: list[str]) -> Row:
    """Memory that idle connections take."""
    count = min(IDLE, _raise_file_limit() - 200)
    async with served(*options) as server:
        await load.many(server.port, 0.3, 4)
        before = server.resident()
        async with load.idle(server.port, count):
            grown = server.resident() - before
    return at_most(f"{count:,} idle connections", grown / 1e6, "MB", 100)


def _raise_file_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(hard, IDLE + 1000) if hard != resource.RLIM_INFINITY else IDLE + 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def at_least(what: str, value: float, unit: str, target: float) -> Row:
    """A row whose value should be no lower than its target."""
    return _row(what, value, unit, f"target >= {target:g}", value >= target)


def at_most(what: str, value: float, unit: str, target: float) -> Row:
    """A row whose value should be no higher than its target."""
    return _row(what, value, unit, f"target <= {target:g}", value <= target)


def _row(what: str, value: float, unit: str, target: str, met: bool) -> Row:
    return {"what": what, "value": value, "unit": unit,
            "beside": f"{target}: {'met' if met else 'missed'}"}


def with_ours() -> dict[str, str]:
    """The environment of a Python process that imports our rooms, and all that we may import."""
    paths = filter(None, (ROOT, os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Server:
    """The gateway's processes of a measurement: the server's own, and its workers."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port
        workers = [child for child in children(pid) if "--control" in command_line(child)]
        self._pids = [pid, *workers]

    def cpu_s(self) -> tuple[float, float]:
        """User and system CPU seconds of all."""
        user, system = zip(*map(cpu_s, self._pids), strict=True)
        return sum(user), sum(system)

    def resident(self) -> int:
        """Resident bytes of all."""
        return sum(map(resident, self._pids))


@asynccontextmanager
async def served(*engine_options: str) -> AsyncIterator[Server]:
    """A gateway process over a scripted engine with these options."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "gateway.bench", *engine_options,
        stdout=subprocess.PIPE, env=with_ours(),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        found = re.fullmatch(r"port (\d+)\n", line)
        if found is None:
            raise RuntimeError(f"The gateway of the benchmark did not start; it said {line!r}.")
        yield Server(process.pid, int(found[1]))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def byte_tokenizer() -> str:
    """A tokenizer JSON with one token a byte (printable ASCII under its own number), 3 specials."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: ord(letter) for letter in letters if 33 <= ord(letter) <= 126}
    free = (id for id in range(256) if not 33 <= id <= 126)
    vocab.update({letter: next(free) for letter in sorted(letters) if letter not in vocab})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer.to_str()


def main() -> int:
    """`python -m gateway.bench OPTIONS`: serve a scripted engine that gets the other options."""
    parser = argparse.ArgumentParser(prog="gateway.bench", allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--control", type=int, help="given to a worker by its server")
    given, options = parser.parse_known_args()
    _raise_file_limit()
    config = GatewayConfig(port=0, access_log=False, drain_delay_s=0, drain_timeout_s=1)
    engine = Program([sys.executable, "-P", "-m", "engine.scripted", *options])
    if given.control is not None:
        return _work(config, Part.receive(given.control))
    if given.workers > 1:
        worker = Program([sys.executable, "-P", "-m", "gateway.bench"])
        sockets = http.bind_shared(config.host, 0, given.workers, config.backlog)
        on_ready = _say(sockets[0].getsockname()[1])
        return Workers(config, engine, worker, sockets, on_ready=on_ready).run()
    sock = http.bind(config.host, config.port, config.backlog)
    link = SocketLink(engine.command, on_ready=_say(sock.getsockname()[1]))
    gateway = Gateway.open(config, link, _prompts(), MODEL)
    return http.serve(build(gateway), gateway, sock=sock)


def _say(port: int) -> Callable[[Hello], None]:
    def on_ready(_: Hello) -> None:
        sys.stdout.write(f"port {port}\n")
        sys.stdout.flush()

    return on_ready


def _prompts() -> Prompts:
    return Prompts(byte_tokenizer(), None, max_len=1 << 20, format=pick(None, None))


def _work(config: GatewayConfig, part: Part) -> int:
    link = part.link()
    gateway = Gateway.open(part.config(config), link, _prompts(), MODEL, shared=part.shared())
    return part.serve(build(gateway), gateway, link)


if __name__ == "__main__":
    sys.exit(main())

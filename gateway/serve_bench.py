"""`slipstream bench serve`: streaming clients in a closed loop against an OpenAI-compatible server.

This process starts the client processes (gateway/serve_client.py), each with its share of the
clients and requests, lets them go at once, and sums up.  It starts and stops no server.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.parse
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway import processes
from gateway.bench import with_ours
from gateway.load import percentile
from gateway.serve_client import CHAT, COMPLETIONS, Answer, Report, Share

PATHS = {"completions": COMPLETIONS, "chat": CHAT}
SHARE_OF_CORES, MOST_PROCESSES = 2, 8  # half the cores: the server needs the others
START_S = 60.0  # for all client processes to be ready
WARM_OUTPUT = 16  # tokens of a warming request


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, whatever the number of clients."""

    base_url: str  # http://host:port, with or without /v1
    model: str
    endpoint: str = "completions"
    input: int = 512  # prompt tokens, random; for chat that many words
    output: int = 128  # max_tokens
    ids: tuple[int, int] = (1000, 30_000)  # of random prompts: no control tokens among them
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    issue_s: float = 600.0  # of one row: no request begins later
    limit_s: float = 120.0  # of one request
    headers: dict[str, str] = field(default_factory=dict)
    prompts: str = ""  # JSONL file, see serve_client.Prompt; needs endpoint "chat"


class Row(msgspec.Struct):
    """One number of clients.  Times in milliseconds, rates in tokens a second of wall time."""

    clients: int
    requests: int  # that were answered whole
    errors: int
    wall_s: float
    output_tokens: int
    output_tok_s: float
    total_tok_s: float  # prompts too
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float  # of each request: first token to last, over its tokens but the first
    tpot_p50_ms: float
    itl_p99_ms: float  # between events, as `vllm bench serve` counts: nothing for merged ones
    gap_p99_ms: float  # between reads that brought tokens: what a reader waits
    events: int
    cached_share: float  # of prompt tokens
    server_cpu_ms: float | None  # of its process tree, for each output token
    root_cpu_ms: float | None  # the same of the given process alone: our gateway
    server_rss_mb: float | None
    client_cpu_us: float  # of all client processes, for each event
    client_busy: float  # share of its time that the busiest client process computed
    first_error: str = ""


def default_processes() -> int:
    """How many client processes run beside a server on this machine."""
    return min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // SHARE_OF_CORES))


def measure(
    load: Load, clients: Sequence[int], requests: int, workers: int, *,
    server_pid: int | None = None, warmup: int | None = None,
) -> Iterator[Row]:
    """One row for each number of clients, each warmed first.

    `requests` of a row, 0 = ten for each client and at least 16; `warmup` as many before it, None =
    one for each client.  Raises RuntimeError when a client process fails, ProcessLookupError.
    """
    done = 0
    for count in clients:
        warm = count if warmup is None else warmup
        if warm:
            few = msgspec.structs.replace(_share(load, 1, []), output=min(WARM_OUTPUT, load.output))
            asyncio.run(_run(few, count, range(done, done + warm), workers))
            done += warm
        wanted = requests or max(16, 10 * count)
        before = None if server_pid is None else processes.tree(server_pid)
        numbers = range(done, done + wanted)
        reports = asyncio.run(_run(_share(load, 1, []), count, numbers, workers))
        after = None if server_pid is None else processes.tree(server_pid)
        done += wanted
        yield summary(count, reports, before, after)


def _share(load: Load, clients: int, numbers: list[int]) -> Share:
    parts = urllib.parse.urlsplit(load.base_url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"--base-url is {load.base_url}; give http://host:port.")
    if load.prompts and load.endpoint != "chat":
        raise ValueError("--prompts holds messages; add --endpoint chat.")
    path = parts.path.rstrip("/").removesuffix("/v1") + PATHS[load.endpoint]
    return Share(
        parts.hostname, parts.port or 80, path, load.endpoint == "chat", load.model, clients,
        numbers, load.input, load.output, load.ids, load.seed, load.temperature, load.ignore_eos,
        load.issue_s, load.limit_s, load.headers, load.prompts,
    )


def shares(whole: Share, clients: int, numbers: Sequence[int], workers: int) -> list[Share]:
    """The same work cut for at most `workers` processes: each client in one, each number once."""
    count = max(1, min(workers, clients, len(numbers)))
    return [
        msgspec.structs.replace(
            whole, clients=clients // count + (place < clients % count),
            numbers=list(numbers[place::count]),
        )
        for place in range(count)
    ]


async def _run(
    whole: Share, clients: int, numbers: Sequence[int], workers: int
) -> list[Report]:
    """Start the processes, let them go at once, collect what they measured."""
    started = [await _start(one) for one in shares(whole, clients, numbers, workers)]
    try:
        async with asyncio.timeout(START_S):
            for process in started:
                assert process.stdout is not None
                if await process.stdout.readline() != b"ready\n":
                    raise RuntimeError("A client process did not start; see its error above.")
        async with asyncio.timeout(whole.issue_s + whole.limit_s + START_S):
            ended = await asyncio.gather(*[process.communicate(b"go\n") for process in started])
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if any(process.returncode for process in started):
        raise RuntimeError("A client process failed; see its error above.")
    return [msgspec.msgpack.decode(out, type=Report) for out, _ in ended]


async def _start(share: Share) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "gateway.serve_client",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=with_ours(),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(share) + b"\n")
    await process.stdin.drain()
    return process


def summary(
    clients: int, reports: Sequence[Report],
    before: processes.Use | None = None, after: processes.Use | None = None,
) -> Row:
    """Sum up; raise RuntimeError when nothing was answered whole."""
    answers = [one for report in reports for one in report.answers]
    good = [one for one in answers if not one.error and one.first]
    errors = [one.error or "No token came." for one in answers if one.error or not one.first]
    if not good:
        why = errors[0] if errors else "no request was sent"
        raise RuntimeError(f"No request of {clients} clients was answered: {why}")
    wall = max(one.end for one in answers) - min(one.start for one in answers)
    output = sum(one.tokens for one in good)
    prompt = sum(one.prompt for one in good)
    ttft = [1e3 * (one.first - one.start) for one in good]
    tpot = [_tpot_ms(one) for one in good if one.tokens > 1] or [0.0]
    gaps = sorted(1e3 * gap for report in reports for gap in _seconds(report)) or [0.0]
    merged = sum(report.merged for report in reports)
    events = max(1, sum(one.events for one in answers))
    used = own = None
    if before is not None and after is not None:
        used, own = after.cpu_s - before.cpu_s, after.own_cpu_s - before.own_cpu_s
    return Row(
        clients=clients, requests=len(good), errors=len(errors), wall_s=wall,
        output_tokens=output, output_tok_s=output / wall, total_tok_s=(output + prompt) / wall,
        ttft_p50_ms=percentile(ttft, 50), ttft_p99_ms=percentile(ttft, 99),
        tpot_mean_ms=sum(tpot) / len(tpot), tpot_p50_ms=percentile(tpot, 50),
        itl_p99_ms=_behind_zeros(gaps, merged, 99), gap_p99_ms=percentile(gaps, 99),
        events=events, cached_share=sum(one.cached for one in good) / max(1, prompt),
        server_cpu_ms=None if used is None else 1e3 * used / max(1, output),
        root_cpu_ms=None if own is None else 1e3 * own / max(1, output),
        server_rss_mb=None if after is None else after.resident / 1e6,
        client_cpu_us=1e6 * sum(report.cpu_s for report in reports) / events,
        client_busy=max(report.cpu_s / report.wall_s for report in reports),
        first_error=errors[0] if errors else "",
    )


def _tpot_ms(answer: Answer) -> float:
    return 1e3 * (answer.last - answer.first) / (answer.tokens - 1)


def _seconds(report: Report) -> array[float]:
    gaps = array("f")
    gaps.frombytes(report.gaps)
    return gaps


def _behind_zeros(ordered: Sequence[float], zeros: int, percent: float) -> float:
    """The percentile of these sorted values and as many zeros."""
    place = min(len(ordered) + zeros - 1, int((len(ordered) + zeros) * percent / 100))
    return ordered[place - zeros] if place >= zeros else 0.0

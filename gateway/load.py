"""The client of `slipstream bench gateway`: HTTP/1.1 by hand, to cost little.  Judges nothing."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

HOST = "127.0.0.1"
LIMIT_S = 60.0  # nothing here may take longer
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hello, how are you?"}]}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int) -> Connection:
    """A new connection."""
    return await asyncio.open_connection(HOST, port)


def request(max_tokens: int, stream: bool) -> bytes:
    """A short chat request, head and body."""
    body = json.dumps({**BODY, "stream": stream, "max_tokens": max_tokens}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The body of a response that has a length; raise RuntimeError unless it is a 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"The server answered {head[:40]!r} where 200 was due.")
    found = re.search(rb"content-length: (\d+)", head, re.I)
    if found is None:
        raise RuntimeError("The response has no length.")
    return await reader.readexactly(int(found[1]))


async def many(port: int, seconds: float, clients: int) -> float:
    """Requests a second of `clients` that each send one after the other."""
    wanted = request(8, False)
    start = time.perf_counter()
    end = start + seconds

    async def client() -> int:
        reader, writer = await connect(port)
        count = 0
        while time.perf_counter() < end:
            writer.write(wanted)
            await answer(reader)
            count += 1
        writer.close()
        return count

    async with asyncio.timeout(LIMIT_S + seconds):
        counts = await asyncio.gather(*[client() for _ in range(clients)])
    return sum(counts) / (time.perf_counter() - start)


async def one_by_one(port: int, seconds: float) -> list[float]:
    """Seconds of each of up to 2,000 requests sent alone."""
    reader, writer = await connect(port)
    wanted = request(8, False)
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds and len(times) < 2000:
        start = time.perf_counter()
        writer.write(wanted)
        await answer(reader)
        times.append(time.perf_counter() - start)
    writer.close()
    return times


async def streams(port: int, count: int, tokens: int) -> tuple[list[float], int]:
    """Gaps between the token frames of `count` streams at once, and how many frames came."""
    gaps: list[float] = []
    frames = 0

    async def one(number: int) -> None:
        nonlocal frames
        await asyncio.sleep(number * 0.002)  # clients do not arrive in one instant
        reader, writer = await connect(port)
        writer.write(request(tokens, True))
        last = 0.0
        while chunk := await reader.read(1 << 16):
            frames += chunk.count(b"data: ")
            if b'"content":' in chunk:
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
            if b"[DONE]" in chunk:
                break
        writer.close()

    async with asyncio.timeout(LIMIT_S + tokens):
        await asyncio.gather(*[one(number) for number in range(count)])
    return gaps, frames


async def disconnects(port: int, count: int) -> list[float]:
    """Seconds from closing a stream's socket until the engine runs nothing, `count` times."""
    probe = await connect(port)
    times: list[float] = []
    async with asyncio.timeout(LIMIT_S):
        for _ in range(count):
            reader, writer = await connect(port)
            writer.write(request(100_000, True))
            await reader.readuntil(b'"content":')
            await _until_running(probe, 1)
            start = time.perf_counter()
            writer.transport.abort()
            await _until_running(probe, 0)
            times.append(time.perf_counter() - start)
    probe[1].close()
    return times


async def _until_running(probe: Connection, count: int) -> None:
    while await running(probe) != count:  # noqa: ASYNC110 it happens in another process
        await asyncio.sleep(0.001)


async def running(probe: Connection) -> int:
    """Requests that run in the engine, by the gateway's own page."""
    probe[1].write(b"GET /metrics HTTP/1.1\r\nhost: bench\r\n\r\n")
    page = await answer(probe[0])
    found = re.search(rb"^vllm:num_requests_running\S* (\d+)", page, re.M)
    assert found is not None, "the page has no such gauge"
    return int(found[1])


@asynccontextmanager
async def idle(port: int, count: int) -> AsyncIterator[None]:
    """Hold `count` connections that send nothing."""
    held: list[Connection] = []
    async with asyncio.timeout(LIMIT_S):
        while len(held) < count:
            wave = min(200, count - len(held))
            held += await asyncio.gather(*[connect(port) for _ in range(wave)])
        await asyncio.sleep(0.5)
    try:
        yield
    finally:
        for _, writer in held:
            writer.transport.abort()


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent of the values lie."""
    assert values, "nothing was measured"
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

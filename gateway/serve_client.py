"""One client process of `slipstream bench serve`: HTTP/1.1 and SSE by hand.  Sums up nothing.

    stdin: one Share as JSON, later "go"        stdout: "ready", later one Report as msgpack

It must cost little beside the server that it measures, so the usual read is two searches and a
clock: events are counted by the blank line that ends them ("\\n\\n", as OpenAI, vLLM, SGLang and
llama.cpp write it), and their JSON is looked at only until the first token and at the end.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from array import array
from collections import deque
from typing import cast

import msgspec
import uvloop

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# By `chat`: an event that shows a token.  The first and the last of a stream may hold no text.
_SHOWN = {
    False: re.compile(rb'"text": ?"[^"]'),
    True: re.compile(rb'"(?:content|reasoning_content|reasoning|arguments|name)": ?"[^"]'),
}
_CHUNK = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")  # never inside an event's JSON: that has no bare CR
_LAST = b"data: [DONE]"
_END = b"\n" + _LAST  # a raw line break: no text of a model can hold it
_WORDS = ("time", "people", "water", "light", "house", "number", "music", "story", "paper", "world")


class Share(msgspec.Struct, frozen=True):
    """What one process does of a run."""

    host: str
    port: int
    path: str
    chat: bool  # messages in, deltas out; else a prompt of ids in, texts out
    model: str
    clients: int
    numbers: list[int]  # of its requests; each number has its own prompt
    input: int  # prompt tokens
    output: int  # max_tokens
    ids: tuple[int, int]  # lowest and highest token id of a prompt
    seed: int
    temperature: float
    ignore_eos: bool
    issue_s: float  # no request begins later than this after the go
    limit_s: float  # one request may take so long
    headers: dict[str, str] = {}
    prompts: str = ""  # JSONL file of Prompt, used in turn instead of random ones; chat only


class Prompt(msgspec.Struct):
    """One line of a file of prompts."""

    messages: list[dict[str, object]]
    max_tokens: int
    more: dict[str, object] = {}  # other fields of the body, such as tools; they win


class Answer(msgspec.Struct, array_like=True):
    """One request as its client saw it; times in seconds of the monotonic clock."""

    start: float = 0.0
    first: float = 0.0  # the first token; 0 = none came
    last: float = 0.0  # the last token
    end: float = 0.0
    events: int = 0  # that hold a token or several
    tokens: int = 0  # by the server's own count
    prompt: int = 0  # tokens
    cached: int = 0  # of the prompt
    error: str = ""


class Report(msgspec.Struct, array_like=True):
    """What one process measured."""

    answers: list[Answer]
    gaps: bytes  # float32 seconds between reads that brought tokens, of all streams
    merged: int  # events that came in a read with another: a gap of nothing each
    cpu_s: float  # of this process, from go to end
    wall_s: float


class Usage(msgspec.Struct):
    """The part of the server's usage that is read."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int | None] | None = None


class Event(msgspec.Struct):
    """The part of a last event that is read."""

    usage: Usage | None = None
    error: dict[str, object] | None = None


_event = msgspec.json.Decoder(Event)


class Gaps:
    """Times between tokens, of all streams of this process."""

    __slots__ = ("merged", "seconds")

    def __init__(self) -> None:
        self.seconds = array("f")
        self.merged = 0


class Line(asyncio.Protocol):
    """One kept connection that asks one thing at a time and reads the stream of its answer."""

    def __init__(self, chat: bool, gaps: Gaps) -> None:
        self.alive = False
        self._shown = _SHOWN[chat]
        self._gaps = gaps
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._begin(Answer())

    def _begin(self, answer: Answer) -> None:
        self._answer = answer
        self._tail = b""  # of an event, or of the head, that is not whole yet
        self._before = b""  # the events of the last read: usage comes right before the end
        self._open = False  # the head was read: events follow
        self._chunked = False
        self._over = False  # [DONE] was read

    async def ask(self, wanted: bytes) -> Answer:
        """Send a request and read all of its answer; an Answer with an error never raises."""
        assert self._transport is not None, "not connected"
        self._begin(Answer(start=time.perf_counter()))
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(wanted)
        return await self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self._transport = cast(asyncio.Transport, transport)
        self.alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the server closed; the proper end of an answer without chunks."""
        self.alive = False
        if self._over:
            self._finish()
        else:
            self._fail(f"The connection closed after {self._answer.events} events.")

    def drop(self, why: str) -> None:
        """Give up on the request that runs."""
        self._fail(why)

    def close(self) -> None:
        """Close the connection."""
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """asyncio: the hot path."""
        now = time.perf_counter()
        if self._tail:
            data = self._tail + data
        if not self._open:
            data = self._head(data)
            if not self._open:
                return
        cut = data.rfind(b"\n\n") + 2
        if cut == 1:
            self._tail = data
            if self._over and data.endswith(b"0\r\n\r\n"):
                self._finish()
            return
        self._tail = data[cut:]
        answer = self._answer
        if answer.first and _END not in data and not data.startswith(_LAST):
            events = data.count(b"\n\n")
            self._before = data
            if events > 1:
                self._gaps.merged += events - 1
            self._gaps.seconds.append(now - answer.last)
            answer.events += events
            answer.last = now
            return
        self._look(data[:cut], now)

    def _head(self, data: bytes) -> bytes:
        """Read the response's head; return what follows it, or keep it when it is not whole."""
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            self._tail = data
            return b""
        lower = head.lower()
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
            length = re.search(rb"content-length: *(\d+)", lower)
            if length is not None and len(rest) < int(length[1]):
                self._tail = data
            else:
                status = head.partition(b"\r\n")[0].decode("latin-1")
                self._fail(f"{status}: {rest[:300].decode('utf-8', 'replace')}")
            return b""
        self._open = True
        self._chunked = b"transfer-encoding: chunked" in lower
        self._tail = b""
        return rest

    def _look(self, events: bytes, now: float) -> None:
        """Events up to the first token, or the last ones."""
        answer = self._answer
        count = sum(map(bool, map(self._shown.search, events.split(b"\n\n"))))
        if count:
            if answer.first:
                self._gaps.seconds.append(now - answer.last)
            else:
                answer.first = now
            self._gaps.merged += count - 1
            answer.events += count
            answer.last = now
        if _END in events or events.startswith(_LAST):
            self._over = True
            self._read_end(_CHUNK.sub(b"", self._before + events))
            if not self._chunked or self._tail.endswith(b"0\r\n\r\n"):
                self._finish()
        self._before = events

    def _read_end(self, events: bytes) -> None:
        """Usage, or the error that ended the stream."""
        answer = self._answer
        for event in events.split(b"\n\n"):
            _, found, text = event.partition(b"data: ")
            if not found or not text.startswith(b"{"):
                continue
            try:
                end = _event.decode(text)
            except msgspec.DecodeError:
                continue  # the rest of an event that began in the read before
            if end.error is not None:
                answer.error = str(end.error)[:300]
            if end.usage is not None:
                answer.tokens, answer.prompt = end.usage.completion_tokens, end.usage.prompt_tokens
                answer.cached = (end.usage.prompt_tokens_details or {}).get("cached_tokens") or 0
        if not answer.tokens and not answer.error:
            answer.error = "The stream ended without usage."

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._answer.end = time.perf_counter()
            self._done.set_result(self._answer)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._answer.error = why
            self._finish()
        self.close()


def requests(share: Share) -> deque[bytes]:
    """Head and body of every request, ready to be sent; raise OSError or msgspec.DecodeError."""
    if not share.prompts:
        return deque(
            _request(share, share.output, _prompt(share, number)) for number in share.numbers)
    with open(share.prompts, "rb") as file:
        given = [msgspec.json.decode(line, type=Prompt) for line in file]
    turns = (given[number % len(given)] for number in share.numbers)
    return deque(_request(share, one.max_tokens, one.messages, one.more) for one in turns)


def _prompt(share: Share, number: int) -> list[int] | list[dict[str, object]]:
    """Random ids, exactly `input`; for chat as many words of one token in most vocabularies."""
    source = random.Random(f"{share.seed}-{number}")
    if not share.chat:
        low, high = share.ids
        return [source.randint(low, high) for _ in range(share.input)]
    said: dict[str, object] = {"role": "user"}
    said["content"] = " ".join(source.choices(_WORDS, k=share.input))
    return [said]


def _request(
    share: Share, max_tokens: int, prompt: list[int] | list[dict[str, object]],
    other: dict[str, object] | None = None,
) -> bytes:
    asked: dict[str, object] = {
        "model": share.model, "max_tokens": max_tokens, "temperature": share.temperature,
        "stream": True, "stream_options": {"include_usage": True},
        "messages" if share.chat else "prompt": prompt,
    }
    if share.ignore_eos:
        asked["ignore_eos"] = True
    body = msgspec.json.encode(asked | (other or {}))
    more = "".join(f"{name}: {value}\r\n" for name, value in share.headers.items())
    head = (f"POST {share.path} HTTP/1.1\r\nhost: {share.host}:{share.port}\r\n{more}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n")
    return head.encode() + body


async def run(share: Share, waiting: deque[bytes], gaps: Gaps) -> list[Answer]:
    """Each client sends its next request when its last one has ended, until none waits."""
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + share.issue_s
    answers: list[Answer] = []

    async def client() -> None:
        line = Line(share.chat, gaps)
        while waiting and time.perf_counter() < until:
            wanted = waiting.popleft()
            if not line.alive:
                _, line = await loop.create_connection(
                    lambda: Line(share.chat, gaps), share.host, share.port)
            clock = loop.call_later(
                share.limit_s, line.drop, f"It took longer than {share.limit_s:g} s.")
            answers.append(await line.ask(wanted))
            clock.cancel()
        line.close()

    await asyncio.gather(*[client() for _ in range(share.clients)])
    return answers


def main() -> int:
    """The process: see the head of this file."""
    share = msgspec.json.decode(sys.stdin.buffer.readline(), type=Share)
    waiting = requests(share)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.buffer.readline() != b"go\n":
        return 1
    gaps = Gaps()
    cpu, wall = time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(run(share, waiting, gaps))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    report = Report(answers, gaps.seconds.tobytes(), gaps.merged, cpu, wall)
    sys.stdout.buffer.write(msgspec.msgpack.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

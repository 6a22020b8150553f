"""Servers as processes: the benchmark's gateway over a scripted engine.  Tests nothing itself."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from engine.scripted import letter
from gateway.bench import with_ours
from tests.live import Answer, Live, drain

TOKEN = b'"content":"'
LONG = 1_000_000


class Served(Live):
    """The gateway's process and the engine that it started."""

    process: subprocess.Popen[str]
    clients: list[Client]

    def send(self, max_tokens: int, stream: bool = True) -> Client:
        """A chat request on its own connection."""
        body = json.dumps({
            "model": "scripted", "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": max_tokens, "stream": stream,
        }).encode()  # fmt: skip
        sock = self.connect(15)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.clients.append(Client(sock))
        return self.clients[-1]

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = [one for one in self._children() if "engine.scripted" in one.cmdline()]
        return child

    def workers(self) -> list[psutil.Process]:
        """The gateway's workers, where there are several."""
        return [one for one in self._children() if "--control" in one.cmdline()]

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric of /metrics over the series whose labels match."""
        page = self.ask("GET", "/metrics").body.decode()
        found = re.findall(rf"^{name}\{{[^}}]*{label}[^}}]*\}} (\S+)", page, re.M)
        assert found, name
        return sum(map(float, found))


class Client:
    """One connection, and what it has received."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.raw = b""
        self.ended = 0.0  # when the last byte was here

    def until(self, wanted: bytes) -> Client:
        """Read until this has come."""
        while wanted not in self.raw:
            chunk = self.sock.recv(65536)
            assert chunk, self.raw
            self.raw += chunk
        return self

    def rest(self) -> Answer:
        """Read to the end."""
        self.raw += drain(self.sock)
        self.ended = time.monotonic()
        self.sock.close()
        return Answer.of(self.raw)


def letters(count: int) -> str:
    return bytes(letter(position) for position in range(count)).decode()


def content(answer: Answer) -> str:
    """The text of an unstreamed answer."""
    assert answer.status == 200, answer.body
    text: str = json.loads(answer.body)["choices"][0]["message"]["content"]
    return text



@contextlib.contextmanager
def served(*engine_options: str) -> Iterator[Served]:
    """A server whose scripted engine has these options."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "gateway.bench", *engine_options], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=with_ours(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().removeprefix("port "))
            live = Served(port, None, None, None)  # type: ignore[arg-type]
            live.process, live.clients = process, []
            yield live
            for client in live.clients:
                client.sock.close()
        finally:
            process.kill()

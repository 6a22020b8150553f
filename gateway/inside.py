"""Call the gateway's app without a socket: one event loop on a thread, requests from any other.

The same endpoints, checks and frames as over HTTP.  Opens no port and starts no process.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.types import Message, Scope

from gateway.events import CallArgs, CallEnd, CallStart, Event, Finish, Reasoning, Text

_END = b""


class RequestFailed(Exception):
    """The server refused the request, or ended its stream with an error; `error` is its object."""

    def __init__(self, error: Mapping[str, Any], status: int = 0) -> None:
        super().__init__(error.get("message", "The request failed."))
        self.error = error
        self.status = status  # HTTP status; 0 = it was an error inside a stream


class Inside:
    """An app that runs on a thread of its own, from `open` to `close`."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._over = asyncio.Event()
        self._life: Any = None

    def open(self) -> None:
        """Start the loop and the app's lifespan (which starts the engine)."""
        self._thread.start()
        started = threading.Event()
        self._life = asyncio.run_coroutine_threadsafe(self._live(started), self._loop)
        started.wait()
        if self._life.done():
            self._life.result()

    def wait(self, coroutine: Any, timeout_s: float | None = None) -> Any:
        """The result of a coroutine that runs on the app's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        """End the lifespan and the loop; safe to call twice."""
        if self._loop.is_closed():
            return
        if self._life is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._life.result()
            self.wait(_end_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _live(self, started: threading.Event) -> None:
        try:
            async with self.app.router.lifespan_context(self.app):
                started.set()
                await self._over.wait()
        finally:
            started.set()

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[bytes]:
        """The response's body as it comes; raise RequestFailed unless the status is 200.

        Leaving the iteration early is a disconnect: the engine drops the request.
        """
        call = _Call(path, json.dumps(body).encode(), headers or {})
        running = asyncio.run_coroutine_threadsafe(call.run(self.app), self._loop)
        try:
            chunks = iter(call.chunks.get, _END)
            if call.status_of(chunks) != 200:
                raise RequestFailed(_error(b"".join(chunks)), call.status)
            yield from chunks
            running.result()
        finally:
            self._loop.call_soon_threadsafe(call.gone.set)


async def _end_tasks() -> None:
    """Cancel what still runs: sse-starlette keeps a watcher for as long as the loop lives."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Call:
    """One request of the ASGI kind."""

    def __init__(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.chunks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.status = 0
        self.gone = asyncio.Event()  # the reader left
        self._body: bytes | None = body
        sent = {"host": "inside", "content-type": "application/json", **headers}
        self._scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "client": ("inside", 0), "server": ("inside", 0),
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
        }  # fmt: skip

    async def run(self, app: Starlette) -> None:
        """On the app's loop: serve, and always end the chunks."""
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self.chunks.put(_END)

    def status_of(self, chunks: Iterator[bytes]) -> int:
        """Wait for the head of the response."""
        next(chunks, None)
        return self.status

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.chunks.put(b"\n")  # tells the reader that the status is known
        elif chunk := message.get("body", b""):
            self.chunks.put(chunk)


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": "The server answered without an error object."}
    assert isinstance(error, dict)
    return error


def frames(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of `data:` frames, up to `[DONE]`; raise RequestFailed."""
    waiting = b""
    for chunk in chunks:
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            frame = json.loads(line[6:])
            if "error" in frame:
                raise RequestFailed(frame["error"])
            yield frame


def _said(delta: dict[str, Any]) -> Iterator[Event]:
    """What a delta says beside calls."""
    if delta.get("reasoning_content"):
        yield Reasoning(delta["reasoning_content"])
    if delta.get("content"):
        yield Text(delta["content"])


def events(chunks: Iterator[dict[str, Any]]) -> Iterator[Event]:
    """A chat stream's chunks (one choice) as events."""
    call = -1  # the index of the call that is open
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            yield from _said(delta)
            for part in delta.get("tool_calls") or ():
                if part.get("id"):
                    if call >= 0:
                        yield CallEnd(call)
                    call = part["index"]
                    yield CallStart(call, part["id"], part["function"]["name"])
                if part["function"].get("arguments"):
                    yield CallArgs(call, part["function"]["arguments"])
            if choice.get("finish_reason"):
                if call >= 0:
                    yield CallEnd(call)
                yield Finish(choice["finish_reason"])

"""What a request may cost before it is understood: body and queue place.  Decodes nothing.

Header limits and slow senders are guard.py's, at the socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from gateway.errors import BadRequest, PayloadTooLarge, QueueFull, UnsupportedMediaType
from gateway.sheet import Share

_BOM = b"\xef\xbb\xbf"
_syntax = msgspec.json.Decoder(msgspec.Raw)  # walks the whole text, builds nothing


async def read_body(request: Request) -> bytes:
    """The whole body: valid JSON in UTF-8, within the size limit.

    Raises UnsupportedMediaType, PayloadTooLarge or BadRequest, and starlette's ClientDisconnect
    when the caller leaves during the upload.
    """
    limit = request.app.state.gateway.config.max_body_bytes
    check_type(request.headers)
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or (declared.isdecimal() and int(declared) > limit):
        raise PayloadTooLarge(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:  # a chunked body declares no length
            raise PayloadTooLarge(limit)
        chunks.append(chunk)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    check_json(body)
    return body


def check_type(headers: Headers) -> None:
    """Raise UnsupportedMediaType unless the body is plain JSON; no content-type counts as JSON."""
    declared = headers.get("content-type", "").lower()
    kind, *parameters = (part.strip() for part in declared.split(";"))
    if kind not in ("", "application/json") and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise UnsupportedMediaType(
            "The body's content-type is not JSON. Send `content-type: application/json`."
        )
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaType("The body's charset must be utf-8. Send JSON as UTF-8.")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(
            "Compressed bodies are not taken. Send the JSON without content-encoding."
        )


def check_json(body: bytes) -> None:
    """Raise BadRequest, with the byte offset where it is known, unless `body` is one JSON text."""
    if not body:
        raise BadRequest("The request body is empty. Send a JSON object.", code="invalid_json")
    if body.startswith(_BOM):
        raise BadRequest(
            "The body begins with a byte order mark (byte 0). Send JSON without it.",
            code="invalid_json",
        )
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(
                f"The body is not valid UTF-8 (byte {error.start}). Send JSON as UTF-8.",
                code="invalid_json",
            ) from None
    try:
        _syntax.decode(body)
    except RecursionError:
        raise BadRequest(
            "The JSON is nested too deeply. Send at most a few hundred levels.",
            code="invalid_json",
        ) from None
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"The body is not valid JSON: {_where(str(error))}. Check quotes, commas and escapes.",
            code="invalid_json",
        ) from None


def _where(said: str) -> str:
    """The decoder's own words; they hold positions and categories, never the body's text."""
    said = said.removeprefix("JSON is malformed: ")
    return "it ends too early, or an escape is cut" if "truncated" in said else said


class Admission:
    """The bounded queue: requests that wait for their first token, and all that are open.

    The decision falls before the 200.  One event loop only: it takes no locks.  The limits are the
    server's: with several workers the places that the others hold count too.  Two of them may take
    the last place at the same moment, so a limit can be passed by the number of workers less one.
    """

    def __init__(
        self,
        requests: int,
        tokens: int,
        open_requests: int,
        clock: Callable[[], float] = time.monotonic,
        share: Share | None = None,
    ) -> None:
        """`share` is a worker's view of the others."""
        self.queued = 0  # requests without a token
        self.queued_tokens = 0  # prompt tokens of those
        self.open = 0  # all requests that hold a ticket
        self._requests = requests
        self._tokens = tokens
        self._open_requests = open_requests
        self._clock = clock
        self._share = share
        self._wait_s = 0.5  # smoothed time to the first token; tells refused callers when to return

    def enter(self, prompt_tokens: int) -> Ticket:
        """Take a place for a prompt of this many tokens, or raise QueueFull and change nothing."""
        self.check_room(prompt_tokens)
        self.queued += 1
        self.queued_tokens += prompt_tokens
        self.open += 1
        self._tell()
        return Ticket(self, prompt_tokens, self._clock())

    def check_room(self, prompt_tokens: int = 1) -> None:
        """Raise QueueFull when such a prompt would find no place now; cheap, takes none."""
        queued, tokens, opened = self.queued, self.queued_tokens, self.open
        if self._share is not None:
            elsewhere = self._share.places_elsewhere()
            queued, tokens = queued + elsewhere[0], tokens + elsewhere[1]
            opened += elsewhere[2]
        if queued >= self._requests:
            self._refuse(f"{self._requests:,} requests wait already, the limit of this server")
        # An empty queue takes any prompt: a limit below the context must not lock a request out.
        if queued and tokens + prompt_tokens > self._tokens:
            self._refuse(f"the waiting prompts would exceed {self._tokens:,} tokens, the limit")
        if opened >= self._open_requests:
            self._refuse(f"{self._open_requests:,} requests are open already, the limit")

    def _tell(self) -> None:
        if self._share is not None:
            self._share.tell_places(self.queued, self.queued_tokens, self.open)

    def _refuse(self, why: str) -> None:
        wait = min(max(self._wait_s, 0.25), 30.0)
        raise QueueFull(f"The queue is full: {why}. Try again after the time in retry-after.", wait)

    def _dequeue(self, prompt_tokens: int) -> None:
        self.queued -= 1
        self.queued_tokens -= prompt_tokens
        assert self.queued >= 0 and self.queued_tokens >= 0, "a ticket left the queue twice"
        self._tell()

    def _close(self) -> None:
        self.open -= 1
        self._tell()

    def _observe(self, entered: float) -> float:
        waited = self._clock() - entered
        self._wait_s += 0.1 * (waited - self._wait_s)
        return waited

    def check(self) -> None:
        """The counts agree."""
        assert 0 <= self.queued <= self.open, f"{self.queued} queued, {self.open} open"
        assert self.queued or not self.queued_tokens, f"{self.queued_tokens} tokens of nobody"


class Ticket:
    """One request's place; `started()` at its first token, `release()` at its end, both repeatable.

    As a (plain or async) context manager it releases itself.
    """

    __slots__ = ("_admission", "_entered", "_open", "_prompt_tokens", "_waiting")

    def __init__(self, admission: Admission, prompt_tokens: int, entered: float) -> None:
        self._admission = admission
        self._prompt_tokens = prompt_tokens
        self._entered = entered
        self._waiting = True
        self._open = True

    def started(self) -> None:
        """The first token came: the request no longer counts as queued."""
        if self._waiting:
            self._waiting = False
            self._admission._dequeue(self._prompt_tokens)
            self._admission._observe(self._entered)

    def release(self) -> None:
        """The request is over, however it ended."""
        if self._waiting:
            self._waiting = False
            self._admission._dequeue(self._prompt_tokens)
        if self._open:
            self._open = False
            self._admission._close()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

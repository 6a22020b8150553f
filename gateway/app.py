"""The ASGI app: routes, lifespan, request ids, keys, one error handler.  Does no endpoint's work.

    socket -> guard -> Shell (id, key, drain, errors) -> router -> endpoint
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import ops
from gateway.drain import own_the_shutdown
from gateway.errors import (
    ApiError,
    BadRequest,
    Draining,
    Internal,
    MethodNotAllowed,
    UnknownUrl,
)
from gateway.state import Gateway

Endpoint = Callable[[Request], Awaitable[Response]]

# Paths that need no key; compared with the raw scope path, never with a URL built from Host.
OPEN = frozenset({"/health", "/ready"})
# Paths that still answer while the server drains.
PROBES = frozenset({"/health", "/ready", "/metrics", "/version"})
_ID_LIMIT = 128  # characters of a caller's request id

_log = logging.getLogger("slipstream.gateway.app")

ENDPOINTS = {
    "/v1/chat/completions": "gateway.chat:create",
    "/v1/completions": "gateway.completions:create",
}


def build(gateway: Gateway) -> Starlette:
    """The app for this gateway; its lifespan starts and stops the link."""
    own_the_shutdown()
    routes = [
        *(Route(path, _late(where), methods=["POST"]) for path, where in ENDPOINTS.items()),
        Route("/v1/models", ops.models),
        Route("/v1/models/{id:path}", ops.model),
        Route("/v1/sessions/{value:path}", ops.end_session, methods=["DELETE"]),
        Route("/health", ops.health),
        Route("/ready", ops.ready),
        Route("/metrics", ops.metrics),
        Route("/version", ops.version),
        Route("/", ops.root),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Shell, gateway=gateway)],
        exception_handlers={HTTPException: _unrouted},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would be built from the caller's Host
    app.state.gateway = gateway
    return app


def _late(where: str) -> Endpoint:
    """An endpoint that is imported at its first request: "module:function"."""
    found: list[Endpoint] = []

    async def endpoint(request: Request) -> Response:
        if not found:
            module, _, name = where.partition(":")
            found.append(getattr(importlib.import_module(module), name))
        return await found[0](request)

    return endpoint


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    await gateway.link.start()
    watch = asyncio.create_task(gateway.metrics.watch(gateway.link))
    try:
        yield
    finally:
        watch.cancel()
        await gateway.link.stop()


async def _unrouted(request: Request, error: Exception) -> Response:
    """What the router says when no route fits, in our words."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return respond(MethodNotAllowed((error.headers or {}).get("Allow", "GET")))
    return respond(UnknownUrl())


def respond(error: ApiError) -> Response:
    """An error as a JSON response."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")


class Shell:
    """Around every request: an id, a caller, the drain, and an error for whatever went wrong."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the lifespan passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _Reply(send, request_id(scope), self._gateway)
        scope["slipstream.request_id"] = reply.id
        self._gateway.drain.enter()
        try:
            self._let_in(scope)
            await self._app(scope, receive, reply.send)
        except ClientDisconnect:
            self._gateway.metrics.disconnect("upload")
        except Exception as error:
            problem = self._judge(error, reply)
            if not reply.started:
                self._count(problem)
                await respond(problem)(scope, receive, reply.send)
            elif not isinstance(error, ApiError):
                # uvicorn closes the connection, so that the caller sees a cut and not an end.
                raise ResponseCut(f"request {reply.id} failed after its response began") from None
        finally:
            self._gateway.drain.leave()

    def _let_in(self, scope: Scope) -> None:
        """Set the principal; raise InvalidApiKey or Draining."""
        gateway, path = self._gateway, scope["path"]
        if path in OPEN or (path == "/metrics" and gateway.config.metrics_open):
            scope["slipstream.principal"] = gateway.keys.anonymous
        else:
            scope["slipstream.principal"] = gateway.keys.principal(scope["headers"])
        if gateway.drain.draining and path not in PROBES:
            raise Draining

    def _count(self, problem: ApiError) -> None:
        """Keep the number of requests that were turned away because of our state, not theirs."""
        if problem.status in (429, 503, 504):
            self._gateway.metrics.rejected((problem.code or "other").removeprefix("server_"))

    def _judge(self, error: Exception, reply: _Reply) -> ApiError:
        """The error to answer with; a fault of ours is logged, by place and type only."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RecursionError):
            return BadRequest("The request is nested too deeply. Use fewer levels.")
        _log.error("request %s failed: %s", reply.id, places(error))
        return Internal()


class ResponseCut(Exception):
    """A response could not be finished; the cause is in the log under the request id."""


class _Reply:
    """The send side of one request: adds the headers that every response has."""

    def __init__(self, send: Send, request_id: str, gateway: Gateway) -> None:
        self.id = request_id
        self.started = False
        self._send = send
        self._gateway = gateway
        self._begin = time.monotonic()

    async def send(self, message: Message) -> None:
        """Pass on; the first message gets the id, the time, and `connection: close` in a drain."""
        if not self.started:
            self.started = True
            self._gateway.metrics.response(message["status"])
            message["headers"] = self._headers(message.get("headers", ()))
        await self._send(message)

    def _headers(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        ours = {b"x-request-id", b"openai-processing-ms"}
        closing = self._gateway.drain.draining or (b"connection", b"close") in given
        if closing:
            ours.add(b"connection")
        headers = [pair for pair in given if pair[0] not in ours]
        milliseconds = int((time.monotonic() - self._begin) * 1000)
        headers.append((b"x-request-id", self.id.encode()))
        headers.append((b"openai-processing-ms", str(milliseconds).encode()))
        if closing:
            headers.append((b"connection", b"close"))
        return headers


def request_id(scope: Scope) -> str:
    """The caller's own id when it is 1-128 visible ASCII characters, else a new one."""
    for wanted in (b"x-client-request-id", b"x-request-id"):
        for name, value in scope["headers"]:
            if name == wanted and 0 < len(value) <= _ID_LIMIT:
                if all(0x21 <= byte <= 0x7E for byte in value):
                    return str(value, "ascii")
    return "req_" + secrets.token_hex(12)


def places(error: BaseException) -> str:
    """An exception's type and stack as `file:line function`; its text may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    stack = " < ".join(
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
    )
    cause = error.__cause__
    return f"{type(error).__name__} at {stack}" + (f"; caused by {places(cause)}" if cause else "")

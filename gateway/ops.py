"""Endpoints for operators and monitors: health, readiness, models, metrics.  Runs no model."""

from __future__ import annotations

from importlib import metadata

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.messages import PROTOCOL, SessionEnd
from gateway import sessions
from gateway.errors import ApiError, BadRequest, ModelNotFound
from gateway.state import Gateway

_encoder = msgspec.json.Encoder()


def answer(content: object, status: int = 200) -> Response:
    """A JSON response that no cache keeps."""
    return Response(
        _encoder.encode(content),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )


def ailing(gateway: Gateway) -> str | None:
    """Why /health must say 503, or None: loading is healthy, a lost or stuck engine is not."""
    link, config = gateway.link, gateway.config
    age = link.stats_age_s
    if link.hello is None:
        known = gateway.seen_engine or link.restarts > 0
        if known and age > config.restart_grace_s:
            return f"the engine is gone for {age:.0f} s; the limit is {config.restart_grace_s:g} s"
        return None
    gateway.seen_engine = True
    if age > config.heartbeat_limit_s:
        return f"the engine is silent for {age:.0f} s; the limit is {config.heartbeat_limit_s:g} s"
    return None


async def health(request: Request) -> Response:
    """GET /health: 200 while the process lives and its engine is there, loading or coming back."""
    gateway: Gateway = request.app.state.gateway
    reason = ailing(gateway)
    if reason is not None:
        return answer({"status": "unhealthy", "reason": reason}, 503)
    return answer({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /ready: 200 when new work is taken; 503 while loading, draining, or without an engine."""
    gateway: Gateway = request.app.state.gateway
    try:
        gateway.check_ready()
    except ApiError as error:
        response = answer({"status": "not ready", "reason": error.code}, error.status)
        response.headers.update(error.headers)
        return response
    return answer({"status": "ready"})


async def metrics(request: Request) -> Response:
    """GET /metrics: the Prometheus text page."""
    gateway: Gateway = request.app.state.gateway
    return Response(gateway.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


async def version(request: Request) -> Response:
    """GET /version: ours, the wire protocol's, the engine's."""
    hello = request.app.state.gateway.link.hello
    return answer(
        {
            "version": package_version(),
            "protocol": PROTOCOL,
            "engine": None if hello is None else hello.version,
        }
    )


async def models(request: Request) -> Response:
    """GET /v1/models: the one model served."""
    return answer({"object": "list", "data": [_card(request.app.state.gateway)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; raise ModelNotFound."""
    gateway: Gateway = request.app.state.gateway
    if request.path_params["id"] != gateway.model:
        raise ModelNotFound(gateway.model)
    return answer(_card(gateway))


async def end_session(request: Request) -> Response:
    """DELETE /v1/sessions/{value}: the session is over; the same answer if it is unknown."""
    gateway: Gateway = request.app.state.gateway
    value = sessions.usable([request.path_params["value"]])
    if value is None:
        raise BadRequest(
            f"A session value is 1 to {sessions.VALUE_LIMIT} visible ASCII characters. Send the "
            f"one that x-session-affinity carried.",
            param="value",
        )
    who = request.scope["slipstream.principal"]
    gateway.link.send(SessionEnd(sessions.key(value, who, gateway.model)))
    return answer({"object": "session", "deleted": True})


async def root(request: Request) -> Response:
    """GET /: a word for whoever looks, and for clients that probe with HEAD."""
    gateway: Gateway = request.app.state.gateway
    return PlainTextResponse(
        f"Slipstream {package_version()} serves {gateway.model}: POST /v1/chat/completions\n"
    )


def _card(gateway: Gateway) -> dict[str, object]:
    hello = gateway.link.hello
    return {
        "id": gateway.model,
        "object": "model",
        "created": gateway.created,
        "owned_by": "slipstream",
        "max_model_len": None if hello is None else hello.max_len,
    }


def package_version() -> str:
    """The installed version, or that of a bare source tree."""
    try:
        return metadata.version("slipstream-serve")
    except metadata.PackageNotFoundError:
        return "0+source"

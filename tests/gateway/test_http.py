"""The shell around endpoints: routes, ids, errors, health, sockets.  Generates no tokens."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine.messages import Refused, SessionEnd
from gateway import app, errors, http, sessions
from gateway.config import ConfigError, GatewayConfig
from tests.live import Live, gateway, running, with_echo
from tests.scripted import Script, ScriptedLink

RAN: list[bytes] = []


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    one = gateway(max_body_bytes=256 * 1024)
    with running(one, with_echo(one, RAN)) as server:
        yield server


# --- routes -----------------------------------------------------------------------------------


def test_models_lists_the_one_model_with_its_context(live: Live) -> None:
    listed = json.loads(live.ask("GET", "/v1/models").body)
    card = json.loads(live.ask("GET", "/v1/models/tiny").body)
    assert listed == {"object": "list", "data": [card]}
    assert card["id"] == "tiny" and card["object"] == "model"
    assert card["max_model_len"] == 4096
    assert isinstance(card["created"], int)


def test_another_model_is_a_404_that_names_the_served_one(live: Live) -> None:
    answer = live.ask("GET", "/v1/models/org/other")
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert "tiny" in str(answer.error["message"])


@pytest.mark.parametrize("path", ["/nope", "/v1/embeddings", "/health/", "//health", "/v1//models"])
def test_an_unknown_path_is_a_404_and_never_a_redirect(live: Live, path: str) -> None:
    answer = live.ask("GET", path)
    assert answer.status == 404
    assert answer.error["code"] == "unknown_url"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("GET", "/v1/sessions/a", "DELETE"),
        ("OPTIONS", "/v1/models", "GET"),
    ],
)
def test_a_wrong_method_is_a_405_that_lists_the_right_ones(
    live: Live, method: str, path: str, allow: str
) -> None:
    answer = live.ask(method, path)
    assert answer.status == 405
    assert answer.error["code"] == "method_not_allowed"
    assert allow in answer.headers["allow"]


def test_head_and_get_of_the_root_answer(live: Live) -> None:
    assert live.ask("HEAD", "/").status == 200
    assert b"tiny" in live.ask("GET", "/").body


def test_version_names_the_package_the_protocol_and_the_engine(live: Live) -> None:
    found = json.loads(live.ask("GET", "/version").body)
    assert found["protocol"] == 1 and found["engine"] == "test" and found["version"]


def test_deleting_a_session_tells_the_engine_its_key(live: Live) -> None:
    link = live.gateway.link
    assert live.ask("DELETE", "/v1/sessions/run-1").status == 200
    who = live.gateway.keys.anonymous
    assert link.notes[-1] == SessionEnd(sessions.key("run-1", who, "tiny"))
    assert live.ask("DELETE", "/v1/sessions/" + "a" * 257).status == 400


# --- request ids and errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "echoed"),
    [
        ("x-request-id: abc-1", "abc-1"),
        ("X-Client-Request-Id: c", "c"),
        ("x-request-id: " + "a" * 128, "a" * 128),
        ("x-request-id: " + "a" * 129, None),
        ("x-request-id: a b", None),
        ("x-request-id: \u00e9", None),
        ("x-other: 1", None),
    ],
)
def test_a_fit_request_id_is_echoed_and_else_minted(
    live: Live, header: str, echoed: str | None
) -> None:
    for path in ("/health", "/nope"):
        found = live.ask("GET", path, b"", header).headers["x-request-id"]
        assert found == echoed if echoed else found.startswith("req_")


def test_the_clients_own_id_goes_first_and_two_minted_ones_differ(live: Live) -> None:
    both = live.ask("GET", "/health", b"", "x-request-id: b", "x-client-request-id: a")
    assert both.headers["x-request-id"] == "a"
    minted = {live.ask("GET", "/health").headers["x-request-id"] for _ in range(3)}
    assert len(minted) == 3


KINDS = ("crash", "deep", "loading", "cut", "full", "late", "wrong")


def _broken(kind: str) -> Route:
    async def endpoint(request: Request) -> Response:
        if kind == "crash":
            raise ValueError("a secret prompt")
        if kind == "deep":
            raise RecursionError
        if kind == "loading":
            raise errors.Loading
        if kind == "full":
            raise errors.QueueFull("m", 1.0)
        if kind == "late":
            raise errors.DeadlineExceeded
        if kind == "wrong":
            raise errors.BadRequest("m")

        async def parts() -> Iterator[bytes]:
            yield b"begun"
            raise ValueError("a secret prompt")

        return StreamingResponse(parts())

    return Route(f"/{kind}", endpoint)


@pytest.fixture(scope="module")
def broken() -> Iterator[Live]:
    one = gateway()
    asgi = app.build(one)
    asgi.router.routes.extend(_broken(kind) for kind in KINDS)
    with running(one, asgi) as server:
        yield server


def test_a_crash_is_a_500_whose_text_stays_out_of_answer_and_log(
    broken: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = broken.ask("GET", "/crash", b"", "x-request-id: look-here")
    assert answer.status == 500
    assert answer.error == {
        "message": errors.Internal().message, "type": "server_error", "param": None,
        "code": "internal",
    }
    assert "look-here" in caplog.text and "ValueError" in caplog.text
    assert "secret" not in caplog.text and b"secret" not in answer.body


def test_a_crash_after_the_response_began_cuts_the_connection(
    broken: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        raw = broken.exchange(b"GET /cut HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"begun" in raw and not raw.endswith(b"0\r\n\r\n")
    assert "secret" not in caplog.text
    assert broken.gateway.drain.active == 0


def test_other_errors_of_endpoints_keep_their_status(broken: Live) -> None:
    assert broken.ask("GET", "/deep").status == 400
    loading = broken.ask("GET", "/loading")
    assert loading.status == 503 and loading.error["code"] == "loading"
    assert loading.headers["retry-after"] == "2" and loading.headers["retry-after-ms"] == "2000"
    assert "x-should-retry" not in loading.headers


def test_requests_turned_away_are_counted_by_reason(broken: Live) -> None:
    before = dict(broken.gateway.metrics._rejected)
    for kind in ("full", "loading", "late", "wrong", "crash"):
        broken.ask("GET", f"/{kind}")
    after = broken.gateway.metrics._rejected
    moved = {reason: after[reason] - before[reason] for reason in after}
    assert {reason for reason, count in moved.items() if count} == {
        "queue_full", "loading", "deadline_exceeded",
    }  # fmt: skip
    assert set(moved.values()) == {0, 1}


ALL_ERRORS = [
    errors.BadRequest("m", param="a[0]", code="c"),
    errors.ContextLengthExceeded(9000, 10, 4096),
    errors.InvalidApiKey(),
    errors.ModelNotFound("tiny"),
    errors.UnknownUrl(),
    errors.MethodNotAllowed("GET"),
    errors.RequestTimeout("m"),
    errors.PayloadTooLarge(5),
    errors.UnsupportedMediaType("m"),
    errors.QueueFull("m", 0.4),
    errors.HeadersTooLarge("m"),
    errors.Internal(),
    errors.Unavailable(),
    errors.Loading(),
    errors.Draining(),
    errors.EngineRestarted(),
    errors.DeadlineExceeded(),
    errors.refused(Refused("i", "unsupported_schema_keyword", "m", "tools[0]", 400)),
    errors.refused(Refused("i", "queue_full", "m", "", 429)),
    errors.refused(Refused("i", "internal", "m", "", 500)),
]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_has_four_keys_and_says_when_a_retry_is_useless(error: errors.ApiError) -> None:
    found = json.loads(error.body())["error"]
    assert list(found) == ["message", "type", "param", "code"]
    assert found["message"] and found["code"]
    deterministic = error.status in (400, 401, 404, 405, 413, 415, 431, 504)
    assert (error.headers.get("x-should-retry") == "false") == deterministic
    assert ("retry-after" in error.headers) == (error.status in (429, 503))


def test_an_engines_refusal_keeps_code_param_and_status() -> None:
    error = errors.refused(Refused("i", "unsupported_schema_keyword", "why", "tools[0]", 400))
    assert (error.status, error.code, error.param) == (
        400, "unsupported_schema_keyword", "tools[0]",
    )  # fmt: skip
    assert errors.refused(Refused("i", "queue_full", "m", "", 429)).headers["retry-after"] == "1"


# --- health and readiness ---------------------------------------------------------------------


class Moods(ScriptedLink):
    """A link whose engine's age is set by the test."""

    age = 0.0

    @property
    def stats_age_s(self) -> float:
        return self.age


def test_health_and_readiness_tell_loading_stuck_and_gone_apart() -> None:
    link = Moods(lambda _: Script.say("x"))
    hello, link.hello = link.hello, None
    one = gateway(link, heartbeat_limit_s=60, restart_grace_s=30)
    with running(one) as server:
        def look() -> tuple[int, int, str]:
            ready = server.ask("GET", "/ready")
            reason = json.loads(ready.body).get("reason", "")
            return server.ask("GET", "/health").status, ready.status, reason

        link.age = 1000.0  # a slow load is no illness
        assert look() == (200, 503, "loading")
        link.hello, link.age = hello, 0.5
        assert look() == (200, 200, "")
        link.age = 59.0  # a long prefill
        assert look() == (200, 200, "")
        link.age = 61.0
        assert look() == (503, 503, "engine_unavailable")
        link.age = 0.0
        assert look() == (200, 200, "")
        link.hello, link.age = None, 5.0
        assert look() == (200, 503, "engine_unavailable")
        link.age = 31.0
        assert look() == (503, 503, "engine_unavailable")
        assert "gone" in json.loads(server.ask("GET", "/health").body)["reason"]


# --- sockets and settings ---------------------------------------------------------------------


def test_a_taken_port_is_a_clear_error_and_exit_code_98() -> None:
    with http.bind("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(http.PortTaken, match=f"Port {port} .* --port"):
            http.bind("127.0.0.1", port)
        one = gateway()
        assert http.serve(app.build(one), one, "127.0.0.1", port) == http.EXIT_PORT_TAKEN == 98


def test_a_port_is_free_again_right_after_its_server_ended() -> None:
    with running(gateway()) as server:
        port = server.port
        assert server.ask("GET", "/health").status == 200
    with http.bind("127.0.0.1", port) as again:
        assert again.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_the_access_log_skips_probes() -> None:
    def line(path: str) -> logging.LogRecord:
        arguments = ("1.2.3.4:5", "GET", path, "1.1", 200)
        return logging.LogRecord("uvicorn.access", 20, "", 0, '%s "%s %s %s" %d', arguments, None)

    filtered = http.QuietPaths()
    for path in ("/health", "/ready", "/metrics?x=1"):
        assert not filtered.filter(line(path))
    assert filtered.filter(line("/v1/chat/completions"))


@pytest.mark.parametrize(
    "path", ["/v1/sessions/my-secret", "/v1/sessions/a/my-secret?x=1", "//v1/sessions/my-secret"]
)
def test_the_access_log_holds_no_sessions_value(path: str, caplog: pytest.LogCaptureFixture):
    with running(gateway()) as server, caplog.at_level(logging.INFO, "uvicorn.access"):
        server.ask("DELETE", path)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert "/sessions/***" in said and "DELETE" in said
    assert "my-secret" not in caplog.text


def test_importing_the_app_loads_no_torch_and_no_endpoint() -> None:
    code = "import gateway.app, gateway.http, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_framework_is_past_the_host_header_flaw() -> None:
    assert tuple(map(int, starlette.__version__.split(".")[:3])) >= (1, 0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70_000), ("cache_scope", "world"), ("max_body_bytes", 0), ("ping_s", 0),
     ("served_model_name", ""), ("drain_timeout_s", -1)],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        GatewayConfig(**{name: value}).check()  # type: ignore[arg-type]


def test_a_pooled_client_reuses_its_connection(live: Live) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{live.port}") as client:
        for _ in range(3):
            assert client.post("/echo", json={"a": 1}).json() == {"a": 1}
        assert client.get("/nope").status_code == 404
        assert client.get("/health").headers.get("connection") != "close"

"""Keys, tenants, and the list of open routes.  Knows no cache."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route

from gateway import app
from gateway.auth import Keys, load_secret
from gateway.config import ConfigError
from gateway.errors import InvalidApiKey
from tests.live import Live, gateway, running
from tests.patience import PATIENCE_S

SECRET = b"s" * 32


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alpha\nbeta\n")
    with running(gateway(api_key_file=str(path), metrics_open=False)) as server:
        yield server


def keys(tmp_path: Path, text: str) -> Keys:
    path = tmp_path / "keys"
    path.write_text(text)
    return Keys.from_file(path, SECRET)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def test_every_route_but_the_two_probes_needs_a_key(live: Live) -> None:
    paths = [route.path for route in app.build(live.gateway).routes if isinstance(route, Route)]
    assert len(paths) >= 9
    answers = {path: live.ask("GET", path.replace(":path", "")) for path in paths}
    assert {path for path, one in answers.items() if one.status != 401} == {"/health", "/ready"}
    for answer in answers.values():
        if answer.status == 401:
            assert answer.error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    ["/nope", "/v1/chat/completions", "/health/../v1/models", "/health/", "//health", "/HEALTH",
     "/%68ealth/x", "/health%2f..%2fv1/models", "/v1/models?x=/health", "/;/health"],
)  # fmt: skip
def test_no_path_trick_opens_a_route(live: Live, path: str) -> None:
    assert live.ask("GET", path).status == 401
    assert live.ask("POST", path, b"{}").status == 401


@pytest.mark.parametrize("host", ["a/health?x=", "a/health#", "localhost/health"])
def test_a_poisoned_host_opens_nothing(live: Live, host: str) -> None:
    raw = live.exchange(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert raw.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "header",
    ["Authorization: Bearer alpha", "authorization: bearer beta", "X-Api-Key: alpha",
     "Authorization: Bearer   alpha"],
)  # fmt: skip
def test_a_known_key_opens_in_either_header(live: Live, header: str) -> None:
    assert live.ask("GET", "/v1/models", b"", header).status == 200


@pytest.mark.parametrize(
    "headers",
    [[], ["Authorization: Bearer"], ["Authorization: Bearer "], ["Authorization: alpha"],
     ["Authorization: Basic alpha"], ["Authorization: Bearer alph"], ["X-Api-Key: alphaa"],
     ["Authorization: Bearer ALPHA"], ["X-Api-Key:"], ["Cookie: alpha"],
     ["Authorization: Bearer alpha", "Authorization: Bearer beta"],
     ["Authorization: Bearer wrong", "X-Api-Key: alpha"], ["Authorization: Bearer \xe9"]],
)  # fmt: skip
def test_anything_else_is_a_401(live: Live, headers: list[str]) -> None:
    answer = live.ask("GET", "/v1/models", b"", *headers)
    assert answer.status == 401
    assert answer.headers["x-should-retry"] == "false"
    assert b"alpha" not in answer.body


def test_metrics_are_open_unless_told_otherwise(tmp_path: Path, live: Live) -> None:
    assert live.ask("GET", "/metrics").status == 401
    assert live.ask("GET", "/metrics", b"", "X-Api-Key: alpha").status == 200
    path = tmp_path / "keys"
    path.write_text("alpha\n")
    with running(gateway(api_key_file=str(path))) as server:
        assert server.ask("GET", "/metrics").status == 200
        assert server.ask("GET", "/version").status == 401


def test_each_key_is_a_tenant_and_without_keys_all_are_one(tmp_path: Path) -> None:
    known = keys(tmp_path, "alpha\nbeta")
    alpha, beta = known.principal(bearer("alpha")), known.principal(bearer("beta"))
    assert alpha == known.principal([(b"x-api-key", b"alpha")])
    assert alpha.tenant != beta.tenant and alpha.name_hash != beta.name_hash
    assert len(alpha.tenant) == 32 and len(alpha.name_hash) == 8
    assert alpha.tenant != Keys.from_file(tmp_path / "keys", b"t" * 32).principal(
        bearer("alpha")
    ).tenant
    none = Keys.none(SECRET)
    assert none.principal([]) == none.principal(bearer("whatever"))
    assert not none.required and known.required


def test_the_key_file_takes_comments_blank_lines_and_spaces(tmp_path: Path) -> None:
    known = keys(tmp_path, "# mine\n\n  alpha  # first\nbeta#x\r\n")
    assert known.principal(bearer("alpha"))
    assert known.principal(bearer("beta"))
    for wrong in ("#", "mine", "alpha  # first", ""):
        with pytest.raises(InvalidApiKey):
            known.principal(bearer(wrong))


@pytest.mark.parametrize("text", ["", "# a comment\n", "two words\n", "a" * 513, "caf\u00e9\n"])
def test_a_key_file_that_cannot_serve_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="API key file"):
        keys(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.from_file(tmp_path / "missing", SECRET)


def test_reloading_takes_new_keys_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    known = keys(tmp_path, "alpha")
    (tmp_path / "keys").write_text("beta\ngamma\n")
    assert known.reload() == 2
    with pytest.raises(InvalidApiKey):
        known.principal(bearer("alpha"))
    (tmp_path / "keys").write_text("")
    with pytest.raises(ConfigError):
        known.reload()
    assert known.principal(bearer("gamma"))


def test_the_secret_is_kept_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = load_secret(str(path))
    assert len(first) == 32 and load_secret(str(path)) == first
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert load_secret(None) != load_secret(None)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        load_secret(str(path))


PROGRAM = """
import sys
from tests.live import gateway
from gateway import app, http
one = gateway(api_key_file=sys.argv[1], drain_delay_s=0)
sock = http.bind("127.0.0.1", 0)
sys.stdout.write(f"{sock.getsockname()[1]}\\n"); sys.stdout.flush()
sys.exit(http.serve(app.build(one), one, sock=sock))
"""


def test_a_hangup_signal_reads_the_keys_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alpha\n")
    root = Path(app.__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            server = Live(int(process.stdout.readline()), None, None, None)  # type: ignore[arg-type]
            assert server.ask("GET", "/v1/models", b"", "x-api-key: beta").status == 401
            path.write_text("beta\n")
            process.send_signal(signal.SIGHUP)
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                if server.ask("GET", "/v1/models", b"", "x-api-key: beta").status == 200:
                    break
                time.sleep(0.02)
            assert server.ask("GET", "/v1/models", b"", "x-api-key: beta").status == 200
            assert server.ask("GET", "/v1/models", b"", "x-api-key: alpha").status == 401
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0

"""`slipstream serve --workers 2` with a tiny random model: one cache, one set of keys, one port."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from engine.config import EngineConfig
from gateway.bench import with_ours
from gateway.config import ConfigError, GatewayConfig
from tests.live import Answer, Live
from tests.patience import PATIENCE_S
from tests.tiny import write_llama

ROUNDS = 16  # connections; that one of two workers gets none of them happens once in 32,000


class Served(Live):
    """The server's own process, and its file of keys."""

    process: subprocess.Popen[str]
    keys: Path

    def chat(self, key: str, text: str = "Hello") -> Answer:
        """A short answer, on a connection of its own."""
        body = {"model": "tiny", "max_tokens": 2,
                "messages": [{"role": "user", "content": text}]}
        return self.ask("POST", "/v1/chat/completions", json.dumps(body).encode(),
                        f"Authorization: Bearer {key}", "x-session-affinity: a")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_llama(folder)
    keys = tmp_path / "keys"
    keys.write_text("first-key-of-the-test\n")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "slipstream", "serve", str(folder), "--workers", "2", "--port",
         "0", "--threads", "1", "--drain-delay", "0", "--api-key-file", str(keys),
         "--kv-cache-memory-bytes", str(1 << 23), "--engine.dtype", "float32"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=with_ours(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.match(r"URL +http://127.0.0.1:(\d+)/v1", line):
                    break
            assert found, "it said no URL"
            served = Served(int(found[1]), None, None, None)  # type: ignore[arg-type]
            served.process, served.keys = process, keys
            yield served
        finally:
            process.kill()


def test_workers_share_cache_keys_and_port_and_end_together(live: Served) -> None:
    text = "The same long beginning. " * 8
    cached: list[int] = []
    for _ in range(ROUNDS):
        answer = live.chat("first-key-of-the-test", text)
        assert answer.status == 200, answer.body
        usage = json.loads(answer.body)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 192  # whichever worker names the cache's space
    models = {live.ask("GET", "/v1/models", b"", "Authorization: Bearer first-key-of-the-test").body
              for _ in range(ROUNDS)}
    assert len(models) == 1  # one creation time

    live.keys.write_text("second-key-of-the-test\n")
    live.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE_S
    while {live.chat("first-key-of-the-test").status for _ in range(ROUNDS)} != {401}:
        assert time.monotonic() < deadline, "a worker kept the old keys"
    assert {live.chat("second-key-of-the-test").status for _ in range(ROUNDS)} == {200}

    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(PATIENCE_S) == 0


def test_an_engine_in_the_process_has_one_worker() -> None:
    with pytest.raises(ConfigError, match="leave out --workers"):
        slipstream.serve("m", GatewayConfig(port=0, workers=2), EngineConfig(model="m"),
                         in_process=True)

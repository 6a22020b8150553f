"""Servers as processes: a signal under load, a killed engine, clients that leave.  No model.

The gateway is `python -m gateway.bench`, as the benchmark starts it, its engine engine/scripted.py.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway import http
from tests.auditor import Auditor
from tests.patience import until
from tests.served import LONG, TOKEN, Client, content, letters, served

pytestmark = pytest.mark.timed


def test_a_signal_under_load_ends_every_stream_properly_and_the_process_with_zero():
    with served("--step-ms", "20") as live:
        clients = [live.send(30 if number % 2 else LONG) for number in range(32)]
        for client in clients:
            client.until(TOKEN)
        engine = live.engine()
        live.process.send_signal(signal.SIGTERM)
        until(lambda: live.ask("GET", "/ready").status == 503)
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(Client.rest, clients))
        for number, answer in enumerate(answers):
            heard = Auditor().hear(answer.body)  # one end, one [DONE], nothing after it
            if number % 2:
                assert (heard.error, heard.choices[0].finish) == (None, "length")
                assert heard.choices[0].content == letters(30)
            else:
                assert heard.error is not None and heard.error["code"] == "server_draining"
                said = heard.choices[0].content or ""
                assert said and said == letters(len(said))
        assert live.process.wait(5) == 0
        http.bind("127.0.0.1", live.port).close()
        assert not engine.is_running()


def test_a_killed_engine_ends_what_was_shown_and_runs_the_rest_again():
    with served("--step-ms", "1000", "--per-step", "4") as live:
        shown = live.send(LONG).until(TOKEN)
        body = live.send(8, stream=False)  # half made, and nobody was shown anything of it
        headed = live.send(4).until(b"\r\n\r\n")
        until(lambda: live.metric("vllm:request_queue_time_seconds_count") == 3)
        assert TOKEN not in headed.raw
        engine = live.engine()
        engine.kill()
        killed = time.monotonic()
        heard = Auditor().hear(shown.rest().body)
        assert shown.ended - killed < 1
        assert heard.error is not None and heard.error["code"] == "engine_restarted"
        said = heard.choices[0].content or ""
        assert said and said == letters(len(said))
        ready = live.ask("GET", "/ready")
        assert ready.status == 503 and b"engine_unavailable" in ready.body
        assert live.ask("GET", "/health").status == 200
        until(lambda: live.ask("GET", "/ready").status == 200)
        again = Auditor().hear(headed.rest().body)
        assert (again.error, again.choices[0].content) == (None, letters(4))
        assert content(body.rest()) == letters(8)
        assert live.engine().pid != engine.pid
        assert live.metric("slipstream:engine_restarts_total") == 1
        assert content(live.send(5, stream=False).rest()) == letters(5)


@pytest.mark.parametrize("phase", ["upload|queued", "prefill", "decode"])
def test_a_client_that_leaves_frees_the_engines_request(phase: str):
    with served("--step-ms", "1000") as live:
        other = live.send(LONG).until(TOKEN)  # so that the next one waits for a step
        client = live.send(LONG)
        if phase == "prefill":
            client.until(b"\r\n\r\n")
            assert TOKEN not in client.raw
        elif phase == "decode":
            client.until(TOKEN)
        client.sock.close()
        label = f'phase="(?:{phase})"'
        until(lambda: live.metric("slipstream:client_disconnects_total", label) == 1, 1)
        other.sock.close()
        until(lambda: live.metric("vllm:num_requests_running") == 0, 3)
        assert content(live.send(1, stream=False).rest()) == letters(1)

"""A server of two gateway workers, as processes: one is killed, the engine is, a signal under load.

The engine is engine/scripted.py; no model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import uvloop

from gateway import http
from gateway.bench import with_ours
from gateway.config import GatewayConfig
from gateway.supervision import Supervision
from gateway.workers import Program, Workers
from tests.auditor import Auditor
from tests.linking import RULES
from tests.linking import until as until_async
from tests.live import Answer
from tests.patience import until
from tests.served import LONG, TOKEN, Client, Served, content, letters, served

TWO = ("--workers", "2")
NAMES = ("num_requests", "prompt_tokens_total", "generation_tokens", "kv_cache", "prefix", "spec",
         "num_preemptions", "cache_blocks", "sessions")
ENGINE = re.compile(rf"^(?:vllm|slipstream):(?:{'|'.join(NAMES)}).*", re.M)  # the engine's lines


def worker_of(live: Served, client: Client) -> int:
    """Which worker's process holds the other end of a client's connection."""
    port = client.sock.getsockname()[1]
    (pid,) = [worker.pid for worker in live.workers()
              if any(link.raddr and link.raddr.port == port
                     for link in worker.net_connections("tcp"))]
    return pid


def on_each(live: Served, max_tokens: int) -> dict[int, list[Client]]:
    """Streams with a token shown, by worker, until both have some."""
    found: dict[int, list[Client]] = {}
    for _ in range(60):
        client = live.send(max_tokens).until(TOKEN)
        found.setdefault(worker_of(live, client), []).append(client)
        if len(found) == 2:
            return found
    raise AssertionError("sixty connections went to one of two workers")


def test_the_kernel_spreads_connections_over_the_workers():
    with served(*TWO, "--step-ms", "5") as live:
        clients = [live.send(LONG).until(TOKEN) for _ in range(40)]
        held = [worker_of(live, client) for client in clients]
        assert len(live.workers()) == len(set(held)) == 2
        assert min(map(held.count, set(held))) >= 6  # a fair coin fails this once in 500,000


def test_a_killed_worker_costs_its_own_streams_only_and_comes_back():
    with served(*TWO, "--step-ms", "20") as live:
        found = on_each(live, 150)
        victim, other = found
        engine = live.engine().pid
        os.kill(victim, signal.SIGKILL)
        for client in found[other]:
            heard = Auditor().hear(client.rest().body)
            assert (heard.error, heard.choices[0].content) == (None, letters(150))
        for client in found[victim]:
            assert b"[DONE]" not in client.rest().body
        until(lambda: live.metric("vllm:num_requests_running") == 0)
        until(lambda: len(live.workers()) == 2 and victim not in {w.pid for w in live.workers()})
        assert content(live.send(5, stream=False).rest()) == letters(5)
        on_each(live, LONG)  # the new one answers too
        assert live.engine().pid == engine
        assert live.metric("slipstream:engine_restarts_total") == 0


def test_a_killed_engine_comes_back_for_every_worker():
    with served(*TWO, "--step-ms", "20") as live:
        found = on_each(live, LONG)
        engine = live.engine()
        engine.kill()
        for client in [client for clients in found.values() for client in clients]:
            heard = Auditor().hear(client.rest().body)
            assert heard.error is not None and heard.error["code"] == "engine_restarted"
        until(lambda: [live.ask("GET", "/ready").status for _ in range(12)] == [200] * 12)
        assert {live.ask("GET", "/health").status for _ in range(12)} == {200}
        on_each(live, LONG)
        assert content(live.send(5, stream=False).rest()) == letters(5)
        assert live.engine().pid != engine.pid
        assert live.metric("slipstream:engine_restarts_total") == 1


def test_a_signal_under_load_ends_every_stream_of_every_worker_and_all_processes():
    with served(*TWO, "--step-ms", "20") as live:
        on_each(live, LONG)
        clients = [live.send(30 if number % 2 else LONG) for number in range(32)]
        for client in clients:
            client.until(TOKEN)
        family = [live.engine(), *live.workers()]
        live.process.send_signal(signal.SIGTERM)
        until(lambda: live.ask("GET", "/ready").status == 503)
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(Client.rest, clients))
        for number, answer in enumerate(answers):
            heard = Auditor().hear(answer.body)
            if number % 2:
                assert (heard.error, heard.choices[0].finish) == (None, "length")
                assert heard.choices[0].content == letters(30)
            else:
                assert heard.error is not None and heard.error["code"] == "server_draining"
        assert live.process.wait(10) == 0
        http.bind("127.0.0.1", live.port).close()
        assert not any(process.is_running() for process in family)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_servers_own(end):
    with served(*TWO, "--step-ms", "20") as live:
        on_each(live, LONG)
        family = [live.engine(), *live.workers()]
        live.process.send_signal(end)
        _, alive = psutil.wait_procs(family, 10)
        assert not alive


def test_a_worker_that_keeps_dying_ends_the_server_with_an_error():
    async def go() -> None:
        workers = in_process()
        serving = asyncio.create_task(workers._serve())
        for life in range(RULES.crashes):
            await until_async(lambda life=life: workers.restarts == life and _all(workers))
            workers._running[0].process.kill()
            await until_async(lambda: 0 not in workers._running)
        assert await serving == 1
        assert "A gateway worker ended 5 times" in workers.failed
        assert workers.link.restarts == 0 and not workers._running
    uvloop.run(go())


def test_a_worker_that_cannot_start_ends_the_server_at_once():
    async def go() -> None:
        workers = in_process(Program([sys.executable, "-c", "raise SystemExit(7)"]))
        assert await workers._serve() == 1
        assert "could not start (exit code 7)" in workers.failed
        assert workers.restarts == 0
    uvloop.run(go())


def test_an_engine_that_cannot_start_ends_every_worker():
    async def go() -> None:
        workers = in_process(engine=Program([sys.executable, "-c", "raise SystemExit(7)"]))
        assert await workers._serve() == 1
        assert "engine could not start (exit code 7" in workers.failed
        assert not workers._running
    uvloop.run(go())


def test_an_engine_that_freezes_is_killed_because_a_worker_waits_for_it():
    async def go() -> None:
        rules = dataclasses.replace(RULES, beat_s=1.5, term_s=0.1)
        workers = in_process(rules=rules)
        serving = asyncio.create_task(workers._serve())
        await until_async(lambda: _all(workers))
        pid = workers.link.process.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2.5)
        assert workers.link.process.returncode is None  # nobody waits
        body = b'{"model":"scripted","max_tokens":3,"messages":[{"role":"user","content":"a"}]}'
        reader, writer = await asyncio.open_connection("127.0.0.1", workers._address[1])
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        answer = await asyncio.wait_for(reader.read(), 15)
        assert answer.startswith(b"HTTP/1.1 200") and b'"abc"' in answer  # by the next engine
        assert workers.link.process.pid != pid
        writer.close()
        workers._signalled(signal.SIGTERM)
        assert await serving == 0
    uvloop.run(go())


def in_process(
    worker: Program | None = None, engine: Program | None = None, rules: Supervision = RULES
) -> Workers:
    """The server's own process is this one."""
    environment = with_ours()
    config = GatewayConfig(port=0, drain_delay_s=0, drain_timeout_s=1)
    return Workers(
        config,
        engine or Program([sys.executable, "-P", "-m", "engine.scripted"], environment),
        worker or Program([sys.executable, "-P", "-m", "gateway.bench"], environment),
        http.bind_shared("127.0.0.1", 0, 2),
        rules=rules,
    )


def _all(workers: Workers) -> bool:
    """Both workers serve, and the engine is ready."""
    return workers._all_ready.is_set() and [
        worker.serving for worker in workers._running.values()
    ] == [True, True]


def scrape(live: Served) -> tuple[Answer, int]:
    """A page, and the worker that answered."""
    sock = live.connect(15)
    sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    client = Client(sock).until(b"\r\n\r\n")
    pid = worker_of(live, client)
    sock.settimeout(0.3)  # the connection stays open: so that its owner can be found
    return client.rest(), pid


@pytest.mark.timed
def test_a_scrape_is_the_whole_servers_whichever_worker_answers():
    with served(*TWO, "--step-ms", "5") as live:
        total = 12
        for _ in range(total):
            assert content(live.send(3, stream=False).rest()) == letters(3)
        until(lambda: live.metric("vllm:num_requests_running") == 0)
        time.sleep(2.2)  # both workers have told what they counted, the engine its last Stats
        pages: dict[int, str] = {}
        until(lambda: pages.update([scrape(live)[::-1]]) or len(pages) == 2)
        first, second = [answer.body.decode() for answer in pages.values()]
        assert ENGINE.findall(first) == ENGINE.findall(second)
        labels = 'engine="0",model_name="scripted"'
        for page in (first, second):
            assert f"vllm:generation_tokens_total{{{labels}}} {3 * total}.0" in page
            assert f"slipstream:requests_total{{{labels}}} {total}.0" in page


def test_a_port_is_refused_while_workers_share_it():
    with served(*TWO) as live:
        with pytest.raises(http.PortTaken):
            http.check_free("127.0.0.1", live.port)
        with pytest.raises(http.PortTaken):
            http.bind("127.0.0.1", live.port)

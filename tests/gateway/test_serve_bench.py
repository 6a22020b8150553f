"""`bench serve`: what its clients read, how work is cut and summed up.  Judges no speed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from array import array

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import slipstream
from gateway import bench, processes, serve_bench
from gateway.serve_bench import Load, measure, shares, summary
from gateway.serve_client import Answer, Gaps, Line, Report, Share, requests

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
SHARE = Share("h", 80, "/v1/completions", False, "m", 1, [0, 1], 6, 3, (10, 20), 5, 0.0, True, 9, 9)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps({"usage": None} | fields).encode() + b"\n\n"


def said(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def chat(**delta: object) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (*parts, b""))


def stream(*events: bytes) -> bytes:
    end = event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    return HEAD + chunked(*events, end)


class Wire(asyncio.Transport):
    """A socket that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data):
        self.written += data

    def abort(self):
        self.aborted = True


def read(pieces: list[bytes], is_chat: bool = False, cut: bool = False) -> tuple[Answer, Gaps]:
    """What one client makes of an answer that arrives so; `cut`: then the connection ends."""
    async def go() -> tuple[Answer, Gaps]:
        gaps = Gaps()
        line = Line(is_chat, gaps)
        line.connection_made(Wire())
        asked = asyncio.ensure_future(line.ask(b"POST"))
        await asyncio.sleep(0)
        for piece in pieces:
            assert not asked.done()
            line.data_received(piece)
        if cut:
            line.connection_lost(None)
        async with asyncio.timeout(1):
            return await asked, gaps
    return asyncio.run(go())


TEXTS = stream(said(" a"), said(""), said('"\\n\n[DONE]data: '), said(" b", "length"))
DELTAS = stream(
    chat(role="assistant", content=""), chat(content="x"),
    chat(tool_calls=[{"function": {"arguments": "{"}}]), chat(content="data: [DONE]"),
)


@pytest.mark.parametrize(("whole", "is_chat", "shown"), [(TEXTS, False, 3), (DELTAS, True, 3)])
def test_a_stream_reads_the_same_wherever_the_network_cuts_it(whole, is_chat, shown):
    for place in range(1, len(whole)):
        answer, gaps = read([whole[:place], whole[place:]], is_chat)
        assert (answer.tokens, answer.prompt, answer.cached, answer.error) == (7, 9, 4, "")
        # Between the first token and the end events are counted unread: an empty text, the usage.
        assert shown <= answer.events <= shown + 2, place
        assert len(gaps.seconds) + gaps.merged == answer.events - 1
        assert answer.start <= answer.first <= answer.last <= answer.end


def test_each_event_that_comes_alone_is_a_gap():
    pieces = [part + b"\n\n" for part in TEXTS.split(b"\n\n")]
    pieces[-1] = pieces[-1].removesuffix(b"\n\n")
    answer, gaps = read(pieces)
    assert gaps.merged == 0
    assert len(gaps.seconds) == answer.events - 1 == 4


def test_a_json_event_that_two_chunks_share_still_tells_its_usage():
    whole = event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    first = said("a")
    answer, _ = read([HEAD + chunked(first, whole[:30], whole[30:])])
    assert answer.tokens == 7


def test_an_answer_without_chunks_ends_with_its_done_event():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    events = [said("a"), said("b"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n"]
    answer, _ = read([head, *events])
    assert answer.tokens == 7 and not answer.error


def test_what_goes_wrong_is_an_error_of_its_request_alone():
    refused = b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull"
    answer, _ = read([refused[:30], refused[30:-2], refused[-2:]])
    assert answer.error == "HTTP/1.1 429 Too Many: full"
    broken = event(error={"message": "gone"}) + b"data: [DONE]\n\n"
    answer, _ = read([HEAD + chunked(said("a"), broken)])
    assert "gone" in answer.error
    assert "closed after 1 events" in read([HEAD + said("a")], cut=True)[0].error
    assert "without usage" in read([HEAD + chunked(b"data: [DONE]\n\n")])[0].error


def test_every_prompt_has_its_exact_length_and_is_its_own():
    first, second = (json.loads(one.partition(b"\r\n\r\n")[2]) for one in requests(SHARE))
    assert len(first["prompt"]) == len(second["prompt"]) == 6
    assert first["prompt"] != second["prompt"]
    assert all(10 <= id <= 20 for id in first["prompt"])
    assert first["ignore_eos"] is True and first["stream_options"] == {"include_usage": True}
    assert [*requests(SHARE)] == [*requests(SHARE)]


def test_prompts_of_a_file_are_used_in_turn(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": str(n)}], "max_tokens": n} for n in (7, 8)]
    file.write_text("".join(json.dumps(line | {"kind": "x"}) + "\n" for line in lines))
    share = replace(SHARE, chat=True, numbers=[0, 3, 4], prompts=str(file))
    bodies = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in requests(share)]
    assert [body["max_tokens"] for body in bodies] == [7, 8, 7]
    assert bodies[1]["messages"] == lines[1]["messages"]
    file.write_text(json.dumps(lines[0] | {"more": {"tools": [{}], "ignore_eos": False}}))
    only = json.loads(requests(share)[0].partition(b"\r\n\r\n")[2])
    assert only["tools"] == [{}] and only["ignore_eos"] is False
    with pytest.raises(ValueError, match="--endpoint chat"):
        next(measure(Load("http://x", "m", prompts=str(file)), [1], 1, 1))


@pytest.mark.parametrize(("clients", "count", "workers"), [(7, 20, 3), (2, 20, 8), (9, 4, 8)])
def test_work_is_cut_without_a_rest(clients, count, workers):
    cut = shares(SHARE, clients, range(count), workers)
    assert len(cut) <= workers
    assert sum(one.clients for one in cut) == clients
    assert sorted(number for one in cut for number in one.numbers) == [*range(count)]
    assert all(one.clients and one.numbers for one in cut)


def test_a_row_sums_up_its_answers():
    one = Answer(10.0, 10.1, 10.5, 10.6, events=5, tokens=5, prompt=20, cached=10)
    two = Answer(10.0, 10.3, 11.2, 12.0, events=3, tokens=10, prompt=20)
    bad = Answer(10.0, end=10.1, error="429")
    gaps = array("f", [0.1, 0.2, 0.3, 0.4])
    reports = [Report([one, bad], gaps.tobytes(), 1, 0.5, 2.0), Report([two], b"", 5, 0.1, 2.0)]
    row = summary(2, reports, processes.Use(1.0, 0.1, 0), processes.Use(1.3, 0.25, 5_000_000))
    assert (row.requests, row.errors, row.first_error) == (2, 1, "429")
    assert row.output_tok_s == pytest.approx(15 / 2)
    assert row.total_tok_s == pytest.approx(55 / 2)
    assert row.ttft_p50_ms == pytest.approx(300)
    assert row.tpot_mean_ms == pytest.approx(100)
    assert row.gap_p99_ms == row.itl_p99_ms == pytest.approx(400, rel=1e-5)
    assert serve_bench._behind_zeros([1.0, 2.0], 2, 50) == 1.0
    assert serve_bench._behind_zeros([1.0, 2.0], 3, 50) == 0.0
    assert row.server_cpu_ms == pytest.approx(20) and row.server_rss_mb == 5
    assert row.root_cpu_ms == pytest.approx(10)
    assert row.client_cpu_us == pytest.approx(1e6 * 0.6 / 8)
    assert row.client_busy == 0.25
    assert row.cached_share == 0.25
    with pytest.raises(RuntimeError, match="429"):
        summary(1, [Report([bad], b"", 0, 0.1, 1.0)])


@pytest.mark.timed
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_client_processes_measure_a_real_server(endpoint):
    async def go() -> None:
        async with bench.served("--step-ms", "4") as server:
            load = Load(f"http://127.0.0.1:{server.port}", "scripted", endpoint, 12, 25,
                        ids=(33, 126))
            rows = await asyncio.to_thread(
                lambda: [*measure(load, [1, 5], 6, 2, server_pid=server.pid, warmup=1)])
            for row in rows:
                assert (row.requests, row.errors, row.output_tokens) == (6, 0, 150)
                assert row.tpot_p50_ms > 3.5
                assert 100 < row.events <= 6 * 26
                assert row.output_tok_s < row.clients * 1e3 / 3.5
                assert row.server_rss_mb is not None and row.server_rss_mb > 10
    asyncio.run(go())


def test_the_tree_of_a_process_holds_its_children_and_those_that_ended():
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    before = processes.tree(os.getpid())
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = processes.tree(os.getpid())
    assert after.cpu_s - before.cpu_s > 0.25
    assert after.own_cpu_s - before.own_cpu_s < after.cpu_s - before.cpu_s
    hold = "held = bytearray(b'x' * (64 << 20)); input(len(held))"
    sleeper = subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=subprocess.PIPE)
    assert sleeper.stdout is not None and sleeper.stdout.read(8) == b"67108864"
    both = processes.resident(os.getpid()) + processes.resident(sleeper.pid)
    assert processes.tree(os.getpid()).resident >= 0.9 * both > 60e6
    sleeper.communicate(b"\n")
    with pytest.raises(ProcessLookupError, match="no process"):
        processes.tree(1 << 22)


def test_a_mistake_in_the_options_is_one_sentence():
    run = CliRunner().invoke
    said = run(slipstream.cli, ["bench", "serve", "--model", "m", "--clients", "4,0"])
    assert said.exit_code == 2 and "above zero" in said.output
    with pytest.raises(ValueError, match="http://host:port"):
        next(measure(Load("https://x", "m"), [1], 1, 1))

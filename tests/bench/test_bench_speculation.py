"""The pairs of bench_speculation: what is asked and how it is summed up.  Starts no server."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gateway import processes
from tests.bench.bench_speculation import STUDENT, lines, servers, summed
from tests.bench.cores import cores, keep, slow
from tests.bench.h200_serving import ROOT, Clock

KEYS = ("output_tok_s", "tpot_mean_ms", "ttft_p50_ms", "itl_p99_ms", "gap_p99_ms",
        "server_cpu_ms", "errors")


def row(server: str, speed: float, **drafts: float) -> dict[str, object]:
    return {"server": server, "drafts": drafts, **dict.fromkeys(KEYS, 1.0), "output_tok_s": speed}


def test_the_ratio_is_the_mean_of_pairs_and_not_of_sums():
    rows = [row("off", 10.0), row("on", 20.0, forced=3.0), row("on", 400.0, forced=4.0),
            row("off", 100.0)]
    found = summed(rows)
    assert found["ratio"] == pytest.approx(3.0) and found["pairs"] == 2
    assert found["spread"] == pytest.approx(STUDENT[1] * 2**0.5 / 2**0.5)  # ratios 2 and 4
    assert found["drafts"] == {"forced": 7.0}
    assert found["on output_tok_s"] == 210.0


def test_pairs_of_which_others_slowed_a_run_are_told_apart():
    rows = [row("off", 10.0), row("on", 10.0), row("on", 22.0), row("off", 20.0),
            row("off", 10.0), row("on", 6.0)]
    assert "quiet" not in summed(rows)
    for one, seconds in zip(rows, (1.0, 1.1, 1.0, 1.14, 1.0, 1.7), strict=True):
        one["slow"] = seconds
    found = summed(rows)
    assert found["ratio"] == pytest.approx(0.9) and found["pairs"] == 3
    assert found["quiet"] == (pytest.approx(1.05), pytest.approx(STUDENT[1] * 0.05), 2)
    for one in rows[2:]:
        one["slow"] = 9.0
    assert summed(rows)["quiet"][::2] == (1.0, 1)


def test_a_core_that_somebody_else_uses_is_slow():
    ours = os.sched_getaffinity(0)
    core = min(ours)
    assert slow(set()) == 0.0
    spins = f"import os\nos.sched_setaffinity(0, {{{core}}}); print('up', flush=True)\nwhile 1: 0"
    alone, beside = [], []
    with subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"up\n"
        for _ in range(5):  # in turns: this machine's speed changes, too
            beside.append(slow({core}))
            other.send_signal(signal.SIGSTOP)
            alone.append(slow({core}))
            other.send_signal(signal.SIGCONT)
        other.kill()
    assert max(beside) > 1.3 * min(alone) > 0
    assert os.sched_getaffinity(0) == ours


def test_questions_are_held_out_and_differ_by_salt(tmp_path):
    first, other = lines("chat", 3, 1, tmp_path), lines("chat", 3, 2, tmp_path)
    assert len(first) == 3 and not [one for one in first if one in other]
    assert all(one["messages"][-1]["role"] == "user" for one in first)
    assert all(one["more"]["ignore_eos"] is False for one in first)


def test_many_questions_are_found_by_several_processes_and_are_the_same(tmp_path):
    asks = ("import sys; from pathlib import Path; from tests.bench.bench_speculation import lines;"
            "import json; print(json.dumps(lines('chat', 66, 1, Path('.'))[::22]))")
    done = subprocess.run([sys.executable, "-c", asks], cwd=ROOT, capture_output=True, timeout=300,
                          check=True)
    alone = json.dumps(lines("chat", 64, 1, tmp_path)[::22])
    assert json.loads(done.stdout) == json.loads(alone)


def test_an_engine_can_have_cores_of_its_own():
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        pytest.skip("one core cannot be shared out")
    assert cores(str(ours[0])) == {ours[0]}
    for bad in (",".join(map(str, ours)), str(ours[-1] + 1)):
        with pytest.raises(argparse.ArgumentTypeError, match="but not all"):
            cores(bad)
    sleep = "import sys, time; print('up', flush=True); time.sleep(60)"
    starts = f"""import subprocess, sys
for name in ("engine.server", "worker"):
    one = subprocess.Popen([sys.executable, "-c", {sleep!r}, name], stdout=subprocess.PIPE)
    one.stdout.readline()
print("up", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        kept = {processes.command_line(pid)[-1]: pid for pid in processes.children(server.pid)}
        keep(server.pid, {ours[0]})
        found = {name: sorted(os.sched_getaffinity(pid)) for name, pid in kept.items()}
        for pid in kept.values():
            os.kill(pid, signal.SIGKILL)
    assert found == {"engine.server": ours[:1], "worker": ours}


def test_a_server_that_ends_before_it_is_ready_ends_the_wait_at_once(tmp_path):
    start = time.perf_counter()
    given = argparse.Namespace(model=str(tmp_path / "none"), on="off", out=tmp_path, serve_args="",
                               engine_cores=set())
    with pytest.raises(RuntimeError, match=r"off ended with code [1-9]"), \
            servers(given, Clock(300.0)):
        pass
    assert time.perf_counter() - start < 100  # seconds; without the look at its process 280

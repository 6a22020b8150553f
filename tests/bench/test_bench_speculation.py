"""The pairs of bench_speculation: what is asked and how it is summed up.  Starts no server."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from random import Random

import pytest

from gateway import processes
from speculative.train.prompts import conversation, kind
from tests.bench.bench_speculation import STUDENT, lines, servers, student, summed
from tests.bench.cores import Watch, cores, keep
from tests.bench.h200_serving import Clock

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


def test_the_ratio_is_told_where_the_cores_were_as_slow_for_both():
    draw, rows, right = Random(5), list[dict[str, object]](), 0
    for number in range(400):
        slow = [draw.uniform(1.0, 1.9) for _ in range(2)]
        pair = [row("off", 1 / slow[0]), row("on", 0.98 / slow[1] * draw.gauss(1.0, 0.02))]
        for one, seconds in zip(pair, slow, strict=True):
            one["slow"] = seconds
        rows += pair[:: 1 if number % 2 else -1]
    for first in range(0, 800, 40):  # 20 pairs: 95 % of such intervals hold what is right
        found = summed(rows[first:first + 40])
        ratio, spread = found["level"]
        assert spread < 0.015 < 0.06 < found["spread"]
        right += abs(ratio - 0.98) < spread
    assert right >= 17
    assert "level" not in summed(rows[:4])  # a line through two points has no spread
    assert "level" not in summed([{**one, "slow": 0.0} for one in rows])  # no cores were watched


def test_students_t_goes_on_behind_its_table():
    known = {1: 12.706, 5: 2.571, 10: 2.228, 11: 2.201, 19: 2.093, 30: 2.042, 100: 1.984}
    for freedom, value in known.items():
        assert student(freedom) == pytest.approx(value, abs=0.005)


def test_a_watched_core_is_not_slow_by_being_busy():
    ours = os.sched_getaffinity(0)
    if len(ours) < 2:
        pytest.skip("one core has no other")
    core = min(ours)
    spins = ("import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])}); print('up', flush=True)"
             "\nwhile 1: 0")
    with subprocess.Popen([sys.executable, "-c", spins, str(core)], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None and busy.stdout.readline() == b"up\n"
        with Watch({core}) as watch:
            time.sleep(1.0)
        busy.kill()
    assert 5e-5 < watch.mean < 5e-3  # seconds of CPU; by a clock it would have a time slice more
    assert os.sched_getaffinity(0) == ours
    with Watch(set()) as nothing:
        time.sleep(0.05)
    assert nothing.mean == 0.0


def test_questions_are_held_out_and_differ_by_salt(tmp_path):
    first, other = lines("chat", 3, 1, tmp_path), lines("chat", 3, 2, tmp_path)
    assert len(first) == 3 and not [one for one in first if one in other]
    assert all(one["messages"][-1]["role"] == "user" for one in first)
    assert all(one["more"]["ignore_eos"] is False for one in first)


def test_the_kind_of_a_conversation_is_known_before_it_is_made():
    for number in range(300):
        made = conversation(number, 7)
        assert kind(number, 7) == (made.held_out, made.domain)


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

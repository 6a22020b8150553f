"""The pairs of bench_speculation: what is asked and how it is summed up.  Starts no server."""

from __future__ import annotations

import argparse
import os
import time

import pytest

from tests.bench.bench_speculation import STUDENT, bound, lines, servers, summed
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


def test_questions_are_held_out_and_differ_by_salt(tmp_path):
    first, other = lines("chat", 3, 1, tmp_path), lines("chat", 3, 2, tmp_path)
    assert len(first) == 3 and not [one for one in first if one in other]
    assert all(one["messages"][-1]["role"] == "user" for one in first)
    assert all(one["more"]["ignore_eos"] is False for one in first)


def test_servers_and_clients_can_have_cores_of_their_own():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    with bound(1, theirs=True):
        assert os.sched_getaffinity(0) == {cores[0]}
    with bound(1, theirs=False):
        assert os.sched_getaffinity(0) == set(cores[1:])
    with bound(0, theirs=False):
        assert sorted(os.sched_getaffinity(0)) == cores
    assert sorted(os.sched_getaffinity(0)) == cores


def test_a_server_that_ends_before_it_is_ready_ends_the_wait_at_once(tmp_path):
    start = time.perf_counter()
    given = argparse.Namespace(model=str(tmp_path / "none"), on="off", out=tmp_path, serve_args="",
                               apart=0)
    with pytest.raises(RuntimeError, match=r"off ended with code [1-9]"), \
            servers(given, Clock(300.0)):
        pass
    assert time.perf_counter() - start < 100  # seconds; without the look at its process 280

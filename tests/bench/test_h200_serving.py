"""The script that measures a server boots, measures, stops and keeps to its time.  In miniature."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.h200_serving import Clock, Row, measure, options, rows_of
from tests.tiny import write_llama

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = """
def build(count, salt=""):
    return [{"messages": [{"role": "user", "content": f"{n}{salt}"}], "max_tokens": 3}
            for n in range(count)]
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.h200_serving", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=55,
    )


def test_a_run_boots_a_server_measures_it_and_leaves_no_process(tmp_path):
    model = write_llama(tmp_path / "model")
    out = tmp_path / "out"
    done = run(str(model), "--rows", "1:2:12:4,2:4:12:4", "--ids", "33", "126", "--out", str(out),
               "--budget-s", "50", "--processes", "1",
               "--serve-args", "--dtype float32 --threads 1 --cache.blocks 16")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "serving.json").read_text())
    assert [row["clients"] for row in found["rows"]] == [1, 2]
    assert [(row["requests"], row["output_tokens"]) for row in found["rows"]] == [(2, 8), (4, 16)]
    assert 0 < found["boot"]["ready_s"] <= found["boot"]["first_answer_s"] < found["took_s"]
    assert found["rows"][0]["server_rss_mb"] > 50
    assert "--speculative-config off" in found["command"]
    assert "ready" in done.stdout and "tok/s" in done.stdout
    port = found["command"].split("--port ")[1].split()[0]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False)
    assert not [line for line in listed.stdout.splitlines()
                if f"--port {port}" in line and "slipstream" in line]


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path):
    code = shlex.quote("print('no memory'); raise SystemExit(3)")
    done = run("m", "--command", f"{sys.executable} -c {code}", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "code 3" in done.stdout and "no memory" in done.stdout
    assert json.loads((tmp_path / "out" / "serving.json").read_text())["rows"] == []


def test_a_server_that_never_gets_ready_is_stopped_in_time(tmp_path):
    start = time.monotonic()
    done = run("m", "--command", f"{sys.executable} -c 'input()' {{port}}", "--ready", "/x",
               "--out", str(tmp_path / "out"), "--budget-s", "16")
    assert done.returncode == 1
    assert time.monotonic() - start < 25


def test_a_row_without_time_is_left_out(tmp_path):
    row = measure(Row(7, 1, 1), 0, "http://x", 1, "m", None, Clock(20))
    assert row == {"clients": 7, "why": "no time was left"}
    assert rows_of("1:2,3:4:5:6") == [Row(1, 2), Row(3, 4, 5, 6)]
    with pytest.raises(ValueError):
        rows_of("1:x")


def test_no_tool_prompt_is_sent_twice_not_even_to_warm(tmp_path):
    class Given:
        out = tmp_path

    (tmp_path / "loads").mkdir()
    (tmp_path / "loads" / "prompts.py").write_text(PROMPTS)
    chosen = [options(Row(4, 100), 1, Given), options(Row(5, 3), 2, Given)]
    assert all(one[:2] == ["--endpoint", "chat"] for one in chosen)
    lines = [line for one in chosen for line in Path(one[-1]).read_text().splitlines()]
    assert len(lines) == 104 + 8 == len(set(lines))

"""The script that measures what is asked of the GPU keeps its promises, in miniature on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import figures
from tests.bench.figures import Figure, least, most
from tests.tiny import write_llama

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = """
def build(count, salt=""):
    return [{"messages": [{"role": "user", "content": f"{n}{salt}"}], "max_tokens": 3}
            for n in range(count)]
"""
WRITER = """
import json, sys
text = json.dumps({answer})
open(sys.argv[sys.argv.index("--out") + 1], "w").write(text)
"""
LEVEL = {"conc": 2, "out_tok_s": 5.0, "cpu_ms_per_out_tok": 1.0, "client_cpu_s": 1.0,
         "wall_s": 2.0, "ok": 3, "n": 4}
LOAD = {"levels": [LEVEL], "sessions": {
    "rows": [], "ratio_warm_to_cold": 0.25, "ttft2_p50": 0.003, "cached_tokens": [64, 64, 0],
    "prompt2_p50": 70}}
CALLS = {"valid": 39, "of": 40, "wire_breaks": {"no id": 1}, "rows": [
    {"verdict": "valid"}, {"verdict": "cut by max_tokens; not JSON"}], "odd": [
    {"schema": "refused", "status": 400, "verdict": "HTTP 400"},
    {"schema": "enforced", "status": 200, "verdict": "valid"},
    {"schema": "ignored", "status": 200, "verdict": "not valid"}]}


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.acceptance", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=110, env={**os.environ, **environment},
    )


@pytest.mark.timeout(120)
def test_every_part_is_measured_or_named_and_the_rest_goes_on(tmp_path):
    model, out, loads = write_llama(tmp_path / "model"), tmp_path / "out", tmp_path / "loads"
    loads.mkdir()
    (loads / "prompts.py").write_text(PROMPTS)
    (loads / "load.py").write_text(WRITER.format(answer=LOAD))
    (loads / "toolcheck.py").write_text(WRITER.format(answer=CALLS))
    done = run(
        "smol", model, "--rows", "1:2:12:4,2:4", "--ids", 33, 126, "--out", out, "--loads", loads,
        "--budget-s", 100, "--processes", 1, "--device", "cpu", "--batches", "1,2",
        "--context", 20, "--seconds", 0.1, "--only", "first_boot,serving,decode,products",
        "--serve-args", "--dtype float32 --threads 1 --cache.blocks 16 --device cpu",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 1, done.stdout + done.stderr  # something was missed
    found = json.loads((out / "smol.json").read_text())
    verdicts = {one["name"]: one["verdict"] for one in found["figures"]}
    assert verdicts["boot, kernels cached: to the first answer"] in ("met", "MISSED")
    assert verdicts["smol, 1 client: TPOT mean"] in ("met", "MISSED")
    assert verdicts["tools, 2 clients: errors"] == "met"
    assert verdicts["tools by load.py, 2: answered"] == "MISSED"
    assert verdicts["second turn: TTFT, of cold"] == "met"
    assert verdicts["forced tool calls: valid"] == "MISSED"
    assert verdicts["forced tool calls: wrong though not cut"] == "met"
    assert verdicts["products"] == "no value"
    assert [row["output_tokens"] for row in found["serving"]["rows"]] == [8, 12]
    assert any(line.startswith("weights") for line in found["serving"]["timeline"])
    assert len(found["decode"]) == 5
    shown = done.stdout[done.stdout.index("---- smol"):]
    assert all(name in shown for name in verdicts) and "tok/s" in shown
    assert len(shown) < 12_000
    log = (out / "smol.log").read_text()
    assert "engine is ready" in log and "uvicorn.access" not in log
    assert sorted(path.name for path in out.iterdir()) == ["smol.json", "smol.log"]


@pytest.mark.timeout(60)
def test_a_server_that_fails_costs_its_own_part_only(tmp_path):
    done = run("8b", tmp_path / "nothing", "--out", tmp_path, "--budget-s", 40,
               "--only", "first_boot,prefill", "--device", "cpu")
    assert done.returncode == 1
    found = json.loads((tmp_path / "8b.json").read_text())["figures"]
    assert [(one["name"], one["verdict"]) for one in found] == [
        ("first boot", "no value"), ("prefill", "no value")]
    assert "ended with code" in found[0]["why"]


def test_a_first_boot_is_measured_only_where_it_is_the_first(tmp_path):
    (tmp_path / "cache" / "triton").mkdir(parents=True)
    done = run("smol", "m", "--out", tmp_path / "out", "--cache", tmp_path / "cache",
               "--only", "first_boot")
    assert "no value first boot" in done.stdout and "has compiled kernels" in done.stdout


@pytest.mark.timeout(60)
def test_the_cards_tests_are_counted(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text("def test_good():\n    print('\\ncard: a property: 3 tokens: 0 differ')\n"
                    "def test_bad():\n    assert False\n")
    done = run("card", "m", "--out", tmp_path, "--budget-s", 60, "--only", "card",
               "--tests", file)
    figure = json.loads((tmp_path / "card.json").read_text())["figures"][0]
    assert (figure["value"], figure["verdict"]) == (1, "MISSED")
    assert "card: a property: 3 tokens: 0 differ" in done.stdout
    assert "FAILED" in done.stdout


def test_without_time_every_part_is_named(tmp_path):
    done = run("8b", "m", "--out", tmp_path, "--budget-s", 20)
    assert done.returncode == 1 and done.stdout.count("no time was left") == 10


def test_a_figure_is_judged_by_its_own_bound():
    assert Figure("a", 2.0, "ms", most(2)).verdict == "met"
    assert Figure("a", 2.1, "ms", most(2)).verdict == "MISSED"
    assert Figure("a", 2.0, "ms", least(2)).verdict == "met"
    assert Figure("a", 1.9, "ms", least(2)).verdict == "MISSED"
    assert Figure("a", None, why="it broke").verdict == "no value"
    assert Figure("a", 1.0).verdict == ""
    assert "3,200" in str(Figure("a", 2549.0, "tok/s", least(3200)))


def test_an_odd_schema_is_right_when_refused_or_obeyed():
    *_, last = figures.of_calls(CALLS)
    assert (last.value, last.verdict) == (2, "MISSED") and "not ignored" in last.unit


def test_the_dearest_row_count_is_what_an_invariant_product_costs():
    found = figures.of_product({"what": "qkv", "columns": 8, "depth": 4,
                                "costs": {"1": 1.0, "32": 1.2, "128": 1.01}})
    assert (found.value, found.verdict) == (1.2, "MISSED") and "at 32 rows" in found.unit


def test_what_an_invariant_product_costs_is_of_the_best_of_all():
    pytest.importorskip("triton")
    from tests.bench.bench_products import summary

    found = summary("out", (8, 4, "add", "bfloat16"),
                    {1: ({"a": 2.0, "b": 1.0}, 1.5), 8: ({"a": 3.0}, 2.0)})
    assert found["best"] == {1: "b", 8: "a"} and found["costs"] == {1: 1.0, 8: 1.5}


def test_a_start_is_told_by_its_owners():
    table = ["boot              start     end       s  meanwhile",
             "python, imports    0.00    0.60    0.60", "tokenizer          0.60    0.62    0.02",
             "(nobody)           3.64    3.85    0.21", "weights  4.11  5.04  0.93  grammar 0.1",
             "total              0.00   33.07   33.07"]
    assert figures.owners(table) == "python, imports 0.60, (nobody) 0.21, weights 0.93, total 33.07"


def test_the_stages_of_a_step_are_one_line_a_batch():
    rows = [
        {"what": "copy", "value": 4259.5, "unit": "GB/s", "beside": "measured"},
        {"what": "decode   1 x 512: qkv", "value": 499.7, "unit": "us", "beside": "76% of what"},
        {"what": "decode   1 x 512: gaps", "value": 50.1, "unit": "us", "beside": ""},
        {"what": "decode  32 x 512: qkv", "value": 564.0, "unit": "us", "beside": "68% of what"},
    ]
    assert figures.stages(rows) == [
        "copy: 4,260 GB/s measured", "decode   1 x 512: qkv 500 76%; gaps 50",
        "decode  32 x 512: qkv 564 68%",
    ]

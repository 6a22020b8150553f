"""Start a server, measure it by its clients, stop it, within a given time.  Judges no figure.

    python -m tests.bench.h200_serving smollm2 --work smol --out OUT --budget-s 540
    python -m tests.bench.h200_serving FOLDER --work 8b --out OUT --serve-args "--max-num-seqs 256"
    python -m tests.bench.h200_serving smollm2 --work tools --loads FOLDER --out OUT

boot -> first answer -> a row for each number of clients -> SIGINT -> table, OUT/serving.json.
A row that no longer fits into the time is left out and named.  OUT/server.log: what it said.
`--command` measures another server: `{model}` and `{port}` are put in.  Ours drafts nothing, as the
targets are meant, unless `--serve-args` has another `--speculative-config`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway import processes
from gateway.bench import with_ours

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 15.0  # kept for the end: drain, table
LEAST_S = 15.0  # a row needs so much
POLL_S = 0.02
SETS = 64  # prompts that one salt gives


@dataclass(frozen=True, slots=True)
class Row:
    """What is asked of a server once."""

    clients: int
    requests: int
    input: int = 0  # tokens; 0 = tool prompts
    output: int = 128


WORK = {
    "smol": [Row(1, 24, 512), Row(32, 384, 512), Row(200, 2000, 512)],
    "8b": [Row(1, 12, 1024), Row(32, 320, 1024), Row(200, 1000, 1024)],
    "tools": [Row(1, 12), Row(16, 96), Row(64, 384)],
}


class Clock:
    """The time that a whole run may take."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    @property
    def left(self) -> float:
        """Seconds until the server must be stopped."""
        return self._end - STOP_S - time.monotonic()


def get(url: str, body: dict[str, object] | None = None, timeout_s: float = 60.0) -> Any:
    """The JSON of a GET, or of a POST of `body`; raise OSError (URLError, HTTPError too)."""
    made = urllib.request.Request(url, headers={"content-type": "application/json"})
    made.data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(made, timeout=timeout_s) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def served(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process; ended by SIGINT (no drain delay), or SIGKILL."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=with_ours())
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S - 3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def boot(
    process: subprocess.Popen[bytes], base: str, given: argparse.Namespace, clock: Clock
) -> dict[str, Any]:
    """Wait for the first answer; the times of it, in seconds from the start of the process.

    Raises RuntimeError when the process ends or the time is up.
    """
    start = time.perf_counter()
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"The server ended with code {process.returncode}; see its log.")
        if clock.left < 0:
            raise RuntimeError("The server was not ready in time; see its log.")
        try:
            get(base + given.ready, timeout_s=1)
            break
        except (OSError, ValueError):
            time.sleep(POLL_S)
    ready_s = time.perf_counter() - start
    model = get(base + "/v1/models")["data"][0]["id"]
    get(base + "/v1/completions",
        {"model": model, "prompt": [given.ids[0]] * 3, "max_tokens": 1, "temperature": 0})
    return {"ready_s": ready_s, "first_answer_s": time.perf_counter() - start, "model": model,
            "rss_mb": processes.tree(process.pid).resident / 1e6}


def options(row: Row, index: int, given: argparse.Namespace) -> list[str]:
    """Those of `bench serve` that say what is sent."""
    if row.input:
        return ["--input", str(row.input), "--output", str(row.output), "--ids",
                *map(str, given.ids)]
    file = given.out / f"tools-{row.clients}.jsonl"
    spec = importlib.util.spec_from_file_location("prompts", given.out / "loads" / "prompts.py")
    assert spec is not None and spec.loader is not None
    prompts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prompts)
    wanted = row.requests + row.clients  # the warming ones too; none is sent twice
    salts = [f"-{time.time_ns()}-{index}-{i}" for i in range(-(-wanted // SETS))]
    lines = [one for salt in salts for one in prompts.build(SETS, salt=salt)][:wanted]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--endpoint", "chat", "--prompts", str(file)]


def measure(row: Row, index: int, base: str, pid: int, model: str, given: argparse.Namespace,
            clock: Clock) -> dict[str, Any]:
    """One row by `bench serve`; {"clients", "why"} when there is none."""
    left = clock.left
    if left < LEAST_S:
        return {"clients": row.clients, "why": "no time was left"}
    command = [
        sys.executable, str(ROOT / "slipstream.py"), "bench", "serve", "--base-url", base,
        "--model", model, "--clients", str(row.clients), "--requests", str(row.requests),
        "--ignore-eos", "--server-pid", str(pid), "--out", str(given.out),
        "--row-seconds", str(max(3.0, (left - 10) * 0.4)), *options(row, index, given),
    ]
    if given.processes:
        command += ["--processes", str(given.processes)]
    kept = given.out / "serve.jsonl"
    before = kept.stat().st_size if kept.exists() else 0
    with (given.out / f"client-{index}.log").open("wb") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return {"clients": row.clients, "why": f"not done in {left:.0f} s"}
    if done.returncode:
        return {"clients": row.clients, "why": f"failed; see client-{index}.log"}
    with kept.open() as file:
        file.seek(before)
        return dict(json.loads(file.readline())["rows"][0])


def load(
    base: str, pid: int, model: str, given: argparse.Namespace, clock: Clock, sessions: int = 0
) -> dict[str, Any]:
    """What load.py says, the client that other servers were measured with; {} when nothing."""
    clients = ",".join(str(row.clients) for row in given.rows)
    command = [sys.executable, "load.py", "--base-url", base + "/v1", "--model", model,
               "--pid", str(pid), "--conc", clients, "--sessions", str(sessions),
               "--label", "load.py", "--extra", '{"ignore_eos": true}', "--out", "../load.json"]
    if clock.left < LEAST_S:
        return {}
    with (given.out / "load.log").open("wb") as log:
        try:
            subprocess.run(command, cwd=given.out / "loads", stdout=log, stderr=log,
                           timeout=clock.left, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"load.py gave nothing ({type(error).__name__}); see load.log")
            return {}
    return dict(json.loads((given.out / "load.json").read_text()))


def show(found: dict[str, Any]) -> None:
    """A compact table."""
    if found["boot"]:
        print("boot: ready {ready_s:.1f} s, first answer {first_answer_s:.1f} s, {rss_mb:,.0f} MB"
              .format(**found["boot"]))
    print("clients    tok/s   total  TTFT p50    p99  TPOT mean  ITL p99  gap p99  CPU ms/tok"
          "  gateway's  RSS MB  errors  client us, busy")
    for row in found["rows"]:
        if "why" in row:
            print(f"{row['clients']:>7}  {row['why']}")
            continue
        print(
            "{clients:>7} {output_tok_s:>8,.0f} {total_tok_s:>7,.0f} {ttft_p50_ms:>9.1f}"
            " {ttft_p99_ms:>6.1f} {tpot_mean_ms:>10.2f} {itl_p99_ms:>8.1f} {gap_p99_ms:>8.1f}"
            " {server_cpu_ms:>11.4f} {root_cpu_ms:>10.4f} {server_rss_mb:>7,.0f}"
            " {errors:>7}  {client_cpu_us:.1f}, {client_busy:.0%}".format(**row))
    for level in found["load"]:
        print("load.py {conc:>3}: {out_tok_s:,.0f} tok/s, CPU {cpu_ms_per_out_tok:.3f} ms/token,"
              " client {client_cpu_s:.1f} of {wall_s:.1f} s, {ok} of {n} ok".format(**level))


def rows_of(text: str) -> list[Row]:
    """CLIENTS:REQUESTS[:INPUT[:OUTPUT]],... as rows; raise ValueError or TypeError."""
    return [Row(*map(int, one.split(":"))) for one in text.split(",")]


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Boot, measure, stop; what was found, and `failed` when the server gave nothing."""
    clock = Clock(given.budget_s)
    port = free_port()
    own = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'slipstream.py'))} serve " \
          "{model} --port {port} --speculative-config off "
    command = (given.command or own + given.serve_args).format(model=given.model, port=port)
    found: dict[str, Any] = {"command": command, "work": given.work, "boot": None, "rows": [],
                             "load": [], "failed": ""}
    base = f"http://127.0.0.1:{port}"
    with served(shlex.split(command), given.out / "server.log") as process:
        try:
            found["boot"] = boot(process, base, given, clock)
            model, pid = found["boot"]["model"], process.pid
            for index, row in enumerate(given.rows):
                found["rows"].append(measure(row, index, base, pid, model, given, clock))
            if given.loads is not None:
                found["load"] = load(base, pid, model, given, clock).get("levels", [])
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            found["failed"] = f"{type(error).__name__}: {error}"
    return found


def arguments() -> argparse.Namespace:
    """The command line, checked; `rows` is a list of Row."""
    parser = argparse.ArgumentParser(prog="tests.bench.h200_serving", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", choices=sorted(WORK), default="smol")
    parser.add_argument("--rows", type=rows_of,
                        help="CLIENTS:REQUESTS[:INPUT[:OUTPUT]],... instead of the work's own")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all of it")
    parser.add_argument("--serve-args", default="", help="more options of `slipstream serve`")
    parser.add_argument("--command", help="of another server, with {model} and {port}")
    parser.add_argument("--ready", default="/ready", help="its path that answers 200 when ready")
    parser.add_argument("--loads", type=Path, help="folder of load.py and prompts.py, for tools")
    parser.add_argument("--processes", type=int, help="of the clients")
    parser.add_argument("--ids", nargs=2, type=int, default=(1000, 30_000), help="of prompts")
    given = parser.parse_args()
    given.rows = given.rows or WORK[given.work]
    given.out = given.out.resolve()
    if given.loads is None and not all(row.input for row in given.rows):
        parser.error("tool prompts need --loads")
    return given


def main() -> int:
    """The command: see the head of this file; 1 = the server gave nothing."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.loads is not None:
        shutil.copytree(given.loads, given.out / "loads", dirs_exist_ok=True)
    start = time.perf_counter()
    found = run(given)
    found["took_s"] = time.perf_counter() - start
    (given.out / "serving.json").write_text(json.dumps(found, indent=1))
    show(found)
    if found["failed"]:
        print(found["failed"])
        print("".join((given.out / "server.log").read_text(errors="replace")
                      .splitlines(keepends=True)[-25:]))
    return bool(found["failed"])


if __name__ == "__main__":
    sys.exit(main())

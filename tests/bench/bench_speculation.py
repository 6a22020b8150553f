"""Two servers of one model, with drafts and without, in interleaved pairs.  Judges no figure.

    python -m tests.bench.bench_speculation smollm2 --out OUT --loads FOLDER --budget-s 240
    python -m tests.bench.bench_speculation smollm2 --out OUT --loads FOLDER --clients 1,4

Both stay up side by side; a pair is the same requests to one, then to the other, and pairs change
their order, so an even number is fair.  calls: forced tool calls over the schemas of toolcheck.py.
prompts: those of load.py, with no end token.  chat: questions that no trained head has seen.  All
greedy.  The ratio is the mean over pairs, with a 95 % interval by Student's t; with --engine-cores
once more where those cores were as slow for both sides, by a line through the pairs (cores.Watch).
OUT/speculation.json keeps every row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gateway import serve_bench
from speculative.train.prompts import conversation, kind
from tests.bench.cores import Watch, cores, keep
from tests.bench.h200_serving import ROOT, Clock, free_port, get, served

WORKS = ("calls", "prompts", "chat")
STUDENT = dict(enumerate((12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23), 1))
SETS = 64  # prompts of load.py that one salt gives
MOST = 128  # tokens of an answer
LEAST_S = 8.0  # a pair needs so much
# Of a card's memory that may be in use when a server has its own; both lie on one.
SHARES = {"off": "0.45", "on": "0.9"}
WARM = 8  # requests before each run: a device that idled is slow for a while, and so is its host
COUNTED = re.compile(r'^(slipstream:(?:draft|accepted)\w*)\{([^}]*)\} ([0-9.e+]+)$', re.M)


def module(folder: Path, name: str) -> Any:
    """A Python file of a folder that is no package."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def lines(work: str, wanted: int, salt: int, loads: Path) -> list[dict[str, Any]]:
    """Lines for `bench serve --prompts`; each salt gives others."""
    if work == "chat":
        held = (number for number in itertools.count(salt * 1_000_000)
                if kind(number, 0) == (True, "chat"))  # a hundredth of all
        asked = [conversation(number, 0).messages for number in itertools.islice(held, wanted)]
        return [{"messages": one, "max_tokens": MOST, "more": {"ignore_eos": False}}
                for one in asked]
    if work == "prompts":
        build = module(loads, "prompts").build
        found = [one for part in range(-(-wanted // SETS))
                 for one in build(SETS, salt=f"-{salt}-{part}")]
        return [{"messages": one["messages"], "max_tokens": one["max_tokens"]}
                for one in found[:wanted]]
    families = module(loads, "toolcheck").FAMILIES
    asked = [(family, turn) for turn in range(4) for family in families]
    return [_call(*asked[number % len(asked)], salt, number) for number in range(wanted)]


def _call(family: tuple[Any, ...], turn: int, salt: int, number: int) -> dict[str, Any]:
    _, _, name, schema, turns = family
    tool = {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    messages = [{"role": "system", "content": f"You use tools. Session {salt}-{number}."},
                {"role": "user", "content": turns[turn]}]
    more = {"tools": [tool], "tool_choice": "required", "ignore_eos": False}
    return {"messages": messages, "max_tokens": MOST, "more": more}


class Server:
    """One that runs, and what was measured of it."""

    def __init__(self, name: str, base: str, process: subprocess.Popen[bytes]) -> None:
        self.name, self.base, self.process = name, base, process
        self.model: str = ""

    def wait(self, clock: Clock) -> None:
        """Until it answers; raise RuntimeError when its process ends or the time is up."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with code {self.process.returncode} before "
                                   "it was ready; see its log.")
            if clock.left < 0:
                raise RuntimeError(f"{self.name} was not ready in time; see its log.")
            with contextlib.suppress(OSError, ValueError):
                get(self.base + "/ready", timeout_s=1)
                self.model = get(self.base + "/v1/models")["data"][0]["id"]
                return
            time.sleep(0.1)

    def row(self, file: Path, clients: int, requests: int) -> dict[str, Any]:
        """One run of `bench serve`, and the counts of drafts that it added."""
        before = self.counts()
        load = serve_bench.Load(self.base, self.model, endpoint="chat", prompts=str(file))
        row = next(serve_bench.measure(load, [clients], requests, serve_bench.default_processes(),
                                       server_pid=self.process.pid, warmup=WARM))
        after = self.counts()
        drafts = {name: after[name] - before.get(name, 0.0) for name in after
                  if after[name] != before.get(name, 0.0)}
        return {"server": self.name, **msgspec.to_builtins(row), "drafts": drafts}

    def counts(self) -> dict[str, float]:
        """The server's own counts of drafts."""
        from urllib.request import urlopen

        with urlopen(self.base + "/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return {f"{name} {labels}": float(value) for name, labels, value in COUNTED.findall(text)}


@contextlib.contextmanager
def servers(given: argparse.Namespace, clock: Clock) -> Iterator[list[Server]]:
    """One without drafts and one with them, both ready."""
    with contextlib.ExitStack() as stack:
        found = []
        for name, config in (("off", "off"), ("on", given.on)):
            port = free_port()
            command = [sys.executable, str(ROOT / "slipstream.py"), "serve", given.model, "--port",
                       str(port), "--speculative-config", config, "--gpu-memory-utilization",
                       SHARES[name], *given.serve_args.split()]
            process = stack.enter_context(served(command, given.out / f"server-{name}.log"))
            found.append(Server(name, f"http://127.0.0.1:{port}", process))
            found[-1].wait(clock)  # one after the other: the second finds the kernels of the first
            if given.engine_cores:
                keep(process.pid, given.engine_cores)
        yield found


def requests_of(clients: int, times: int) -> int:
    """How many requests a run has: `times` a second's, for each client some one after another."""
    return times * (48 if clients == 1 else max(96, min(10 * clients, 320), 5 * clients))


def pairs(both: list[Server], work: str, clients: int, given: argparse.Namespace, clock: Clock
          ) -> list[dict[str, Any]]:
    """The rows of all pairs that the time allows, the order changing from pair to pair."""
    rows, requests = list[dict[str, Any]](), requests_of(clients, given.times)
    file = given.out / "prompts.jsonl"
    for number in range(-1, given.pairs):
        if clock.left < LEAST_S * given.times:
            break
        salt = given.salt + 1000 * WORKS.index(work) + 10 * clients + number + 1
        found = lines(work, WARM + requests, salt, given.loads)
        file.write_text("".join(json.dumps(one) + "\n" for one in found))
        for server in both if number % 2 else both[::-1]:
            with Watch(given.engine_cores) as watch:
                row = {**server.row(file, clients, requests), "slow": watch.mean}
            if number >= 0:  # the pair before the first warms both
                rows.append({"work": work, "pair": number, **row})
    return rows


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of output tokens a second, with its interval, and means of both sides."""
    side = {name: [row for row in rows if row["server"] == name] for name in ("off", "on")}
    ratios = [b["output_tok_s"] / a["output_tok_s"]
              for a, b in zip(side["off"], side["on"], strict=True)]
    keys = ("output_tok_s", "tpot_mean_ms", "ttft_p50_ms", "itl_p99_ms", "gap_p99_ms",
            "server_cpu_ms", "errors")
    means = {f"{name} {key}": statistics.fmean(row[key] for row in side[name])
             for name in side for key in keys}
    drafts: dict[str, float] = {}
    for row in side["on"]:
        for name, value in row["drafts"].items():
            drafts[name] = drafts.get(name, 0.0) + value
    ratio, spread = mean(ratios)
    found = {"ratio": ratio, "spread": spread, "pairs": len(ratios), "drafts": drafts, **means}
    slower = [math.log(b["slow"] / a["slow"])
              for a, b in zip(side["off"], side["on"], strict=True) if a.get("slow")]
    if len(slower) > 2:
        found["level"] = level(ratios, slower)
    return found


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t; beyond the table by Fisher and Cornish (1960), +- 0.001."""
    z = 1.959964
    return STUDENT.get(freedom) or (z + (z**3 + z) / (4 * freedom)
                                    + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2))


def mean(ratios: list[float]) -> tuple[float, float]:
    """The mean and its 95 % interval, each NaN where there are too few."""
    if len(ratios) < 2:
        return (ratios or [float("nan")])[0], float("nan")
    half = student(len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return statistics.fmean(ratios), half


def level(ratios: list[float], slower: list[float]) -> tuple[float, float]:
    """The ratio where both sides' cores were as slow, and its 95 % interval, by a fitted line.

    slower: logarithms of how much slower the cores were in a pair's second side than in its first
    (analysis of covariance: Fisher, Statistical Methods for Research Workers, 1932).
    """
    logs = [math.log(ratio) for ratio in ratios]
    slope, at_zero = statistics.linear_regression(slower, logs)
    left = sum((y - at_zero - slope * x) ** 2 for x, y in zip(slower, logs, strict=True))
    centre, freedom = statistics.fmean(slower), len(logs) - 2
    within = sum((x - centre) ** 2 for x in slower)
    error = (left / freedom * (1 / len(logs) + centre**2 / within)) ** 0.5
    return math.exp(at_zero), math.exp(at_zero) * student(freedom) * error


def show(work: str, clients: int, found: dict[str, Any]) -> None:
    """One line."""
    print("{work:8} {clients:>4}  {ratio:.2f}x +- {spread:.2f} ({pairs} pairs)  tok/s {a:,.0f} -> "
          "{b:,.0f}  TPOT {c:.2f} -> {d:.2f}  TTFT {e:.1f} -> {f:.1f}  ITL p99 {g:.1f} -> {h:.1f}"
          "  CPU {i:.3f} -> {j:.3f} ms".format(
              work=work, clients=clients, **{k: found[k] for k in ("ratio", "spread", "pairs")},
              a=found["off output_tok_s"], b=found["on output_tok_s"],
              c=found["off tpot_mean_ms"], d=found["on tpot_mean_ms"],
              e=found["off ttft_p50_ms"], f=found["on ttft_p50_ms"],
              g=found["off itl_p99_ms"], h=found["on itl_p99_ms"],
              i=found["off server_cpu_ms"], j=found["on server_cpu_ms"]), flush=True)
    if "level" in found:
        print("               {:.3f}x +- {:.3f} where the engines' cores were as slow for both"
              .format(*found["level"]), flush=True)


def works(text: str) -> list[str]:
    """The named loads; raise ArgumentTypeError for one that is not known."""
    found = text.split(",")
    if not set(found) <= set(WORKS):
        raise argparse.ArgumentTypeError(f"choose of {', '.join(WORKS)}, not {text!r}")
    return found


def main() -> int:
    """The command: see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loads", type=Path, required=True,
                        help="folder of prompts.py and toolcheck.py")
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--works", default=",".join(WORKS), type=works)
    parser.add_argument("--clients", default="1,8,32,128",
                        type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--pairs", type=int, default=4, metavar="N")
    parser.add_argument("--times", type=int, default=1, help="as many requests a run")
    parser.add_argument("--engine-cores", default=set(), type=cores, metavar="0,1",
                        help="for the engines alone; beside others chance has it how slow they are")
    parser.add_argument("--on", default="auto", help="--speculative-config of the second")
    parser.add_argument("--serve-args", default="", help="of both servers")
    parser.add_argument("--salt", type=int, default=1, help="of the prompts")
    given = parser.parse_args()
    if given.engine_cores:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - given.engine_cores)
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or its servers would live on
    clock, kept = Clock(given.budget_s), list[dict[str, Any]]()
    with servers(given, clock) as both:
        for work, clients in itertools.product(given.works, given.clients):
            rows = pairs(both, work, clients, given, clock)
            if not rows:
                print(f"{work:8} {clients:>4}  no time was left")
                continue
            found = summed(rows)
            show(work, clients, found)
            kept.append({"work": work, "clients": clients, **found, "rows": rows})
            (given.out / "speculation.json").write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

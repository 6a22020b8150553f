"""Measure what is asked of the GPU, each figure beside its target, within a given time.

    python -m tests.bench.acceptance smol smollm2 --out OUT --budget-s 400 --loads FOLDER
    python -m tests.bench.acceptance 8b FOLDER --out OUT --budget-s 420
    python -m tests.bench.acceptance card MODEL.gguf --out OUT --budget-s 200

smol: first ever boot; boot with cached kernels, serving rows, tool prompts, sessions, forced calls;
bench decode and prefill; what row invariance costs.  8b: the same without tools.  card: the tests
of a real card.  A part that fails or finds no time is named and the next one begins.  Figures are
printed as they come and all together at the end; OUT/WORK.json and OUT/WORK.log keep the rest.
Judges by tests/bench/figures.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.bench import figures, h200_serving
from tests.bench.figures import Figure
from tests.bench.h200_serving import ROOT, Clock

CARD = [f"tests/engine/test_card{part}.py" for part in ("", "_requests", "_drafts")]
ON_A_CARD = ("cuda.is_available", "mark.gpu")  # what a test says that does more on a real card
# Of an image that has more plugins than ours: this one warns when others run, which ends the run.
PYTEST = ["-m", "pytest", "-v", "-s", "-p", "no:benchmark", "-o", "filterwarnings=default",
          "-o", "addopts=--import-mode=importlib", "--timeout=200", "--durations=8"]
BAD = re.compile(r"\b(FAILED|ERROR)\b")  # of a test, also while others still run
CONTEXT = {"smol": 512, "8b": 1024}  # tokens before decoding starts
LEAST_S = 12.0  # a part needs so much
LOG = 400_000  # characters kept of a server's log
FOUND = (OSError, RuntimeError, LookupError, ValueError, TypeError, subprocess.SubprocessError)


class Report:
    """Figures and raw results of one call; written again after each part."""

    def __init__(self, work: str, out: Path, scratch: Path) -> None:
        self.work, self.out, self.scratch = work, out, scratch
        self.figures: list[Figure] = []
        self.raw: dict[str, Any] = {"work": work}
        self.lines: list[str] = []  # shown at the end, beside the figures
        self._began = time.perf_counter()

    def add(self, found: Iterable[Figure]) -> None:
        """Print and keep."""
        for figure in found:
            self.figures.append(figure)
            print(figure, flush=True)

    def note(self, name: str, text: str) -> None:
        """Add to the log."""
        with (self.out / f"{self.work}.log").open("a") as file:
            file.write(f"==== {name}\n{text}\n")

    def save(self) -> None:
        """Write the JSON file."""
        self.raw["took_s"] = time.perf_counter() - self._began
        self.raw["figures"] = [figure.record() for figure in self.figures]
        (self.out / f"{self.work}.json").write_text(json.dumps(self.raw, indent=1))

    def show(self) -> None:
        """Everything once more, what was missed first."""
        order = ("no value", "MISSED", "met", "")
        print(f"---- {self.work}: {self.raw['took_s']:.0f} s")
        for figure in sorted(self.figures, key=lambda one: order.index(one.verdict)):
            print(figure)
        for line in self.lines:
            print(line)


# ---- parts: each fills the report from what it may still take ------------------------------------


def first_boot(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """A start with no kernel compiled and no product picked."""
    if any(given.cache.glob("*")):
        raise RuntimeError("an earlier call has compiled kernels here")
    _with_server(report, given, clock, "first boot", cold=True)


def serving(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """A start with everything compiled, then every client that measures a server."""
    _with_server(report, given, clock, "serving", cold=False)


def _with_server(
    report: Report, given: argparse.Namespace, clock: Clock, name: str, cold: bool
) -> None:
    port = h200_serving.free_port()
    command = [sys.executable, str(ROOT / "slipstream.py"), "serve", given.model, "--port",
               str(port), "--speculative-config", "off", *shlex.split(given.serve_args)]
    log, base = given.out / "server.log", f"http://127.0.0.1:{port}"
    try:
        with h200_serving.served(command, log) as process:
            boot = h200_serving.boot(process, base, given, clock)
            report.raw[name] = {"boot": boot, "timeline": _timeline(log)}
            report.lines.append(f"{name}: {figures.owners(report.raw[name]['timeline'])}")
            report.add(figures.of_boot(given.work, boot, cold))
            if not cold:
                _clients(report, given, clock, base, process.pid, boot["model"])
    finally:
        kept = [line for line in log.read_text(errors="replace").splitlines()
                if "uvicorn.access" not in line]
        report.note(f"{name}: server", "\n".join(kept)[-LOG:])


def _timeline(log: Path) -> list[str]:
    """The table of who took which second."""
    lines = log.read_text(errors="replace").splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith("boot  ")), len(lines))
    rest = lines[begin:]
    end = next((at for at, line in enumerate(rest) if line.startswith("total")), -1)
    return rest[: end + 1]


def _clients(
    report: Report, given: argparse.Namespace, clock: Clock, base: str, pid: int, model: str
) -> None:
    raw = report.raw["serving"]
    raw["rows"] = []
    for index, row in enumerate(given.rows):
        work = given.work if row.input else "tools"
        found = h200_serving.measure(row, index, base, pid, model, given, clock)
        raw["rows"].append({"of": work, **found})
        report.add(figures.of_serving(work, found))
        if "why" in found:
            report.note(f"{row}", _read(given.out / f"client-{index}.log")[-2000:])
        report.save()
    if given.loads is None:
        return
    given.rows = [row for row in given.rows if not row.input]
    raw["load"] = loaded = h200_serving.load(base, pid, model, given, clock, sessions=6)
    for level in loaded.get("levels", []):
        report.add(figures.of_load(level))
    if loaded:
        report.add(figures.of_sessions(loaded["sessions"]))
    report.save()
    raw["calls"] = found = _calls(given, clock, base, model)
    report.add(figures.of_calls(found))


def _calls(given: argparse.Namespace, clock: Clock, base: str, model: str) -> dict[str, Any]:
    """What toolcheck.py found."""
    command = [sys.executable, "toolcheck.py", "--base-url", base + "/v1", "--model", model,
               "--label", "calls", "--out", "../calls.json"]
    subprocess.run(command, cwd=given.out / "loads", check=True, timeout=clock.left,
                   stdout=subprocess.DEVNULL)
    return dict(json.loads((given.out / "calls.json").read_text()))


def decode(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """Each stage of a step beside its floor."""
    rows = _bench(report, given, clock, "decode", "--batches", given.batches, "--context",
                  str(given.context))
    report.lines += figures.stages(rows)


def prefill(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """Prompts alone, beside the matrix roof."""
    rows = _bench(report, given, clock, "prefill")
    report.lines += [f"{row['what']}: {row['value']:,.0f} {row['unit']}, {row['beside']}"
                     for row in rows]


def _bench(
    report: Report, given: argparse.Namespace, clock: Clock, what: str, *more: str
) -> list[dict[str, Any]]:
    """Rows of `slipstream bench WHAT`."""
    _run(report, what, [
        str(ROOT / "slipstream.py"), "bench", what, given.model, "--seconds", str(given.seconds),
        "--device", given.device, "--out", str(given.out), *more,
    ], clock)
    lines = (given.out / f"{what}.jsonl").read_text().splitlines()
    report.raw[what] = rows = json.loads(lines[-1])["rows"]
    return list(rows)


def products(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """Row-invariant products beside the best measured."""
    out = given.out / "products.jsonl"
    try:
        _run(report, "products", ["-m", "tests.bench.bench_products", given.model, "--out",
                                  str(out)], clock)
    finally:
        report.raw["products"] = rows = [json.loads(line) for line in _read(out).splitlines()]
        report.add(map(figures.of_product, rows))


def kernels(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """The tests of every kernel and of all else that differs on a card, for real."""
    files = [str(file) for file in sorted(ROOT.glob("tests/engine/test_*.py"))
             if any(word in file.read_text() for word in ON_A_CARD)
             and str(file.relative_to(ROOT)) not in CARD]
    several = ["-n", "14"] if importlib.util.find_spec("xdist") else []
    _tests(report, given, clock, "kernels", [*several, *files])


def card(report: Report, given: argparse.Namespace, clock: Clock) -> None:
    """The engine's promises, bit for bit or by counted near-ties."""
    os.environ["SLIPSTREAM_GGUF"] = given.model
    _tests(report, given, clock, "card", CARD)


def _tests(
    report: Report, given: argparse.Namespace, clock: Clock, name: str, chosen: list[str]
) -> None:
    """A line for each property, and how many tests failed."""
    began = time.perf_counter()
    text = _run(report, name, [*PYTEST, *(given.tests or chosen)], clock, check=False)
    lines = [line.strip("= ") for line in text.splitlines()]
    last = next((line for line in reversed(lines) if " in " in line and line[:1].isdigit()), "")
    words = last.replace(",", "").split()
    counts = {kind.rstrip("s"): int(count) for count, kind in itertools.pairwise(words)
              if count.isdecimal()}
    report.raw[name] = {"summary": last, "lines": [one for one in lines if "card: " in one]}
    shown = [one for one in lines if one.startswith("card: ") or BAD.search(one)]
    report.lines += [one[:220] for one in dict.fromkeys(shown)]
    bad = counts.get("failed", 0) + counts.get("error", 0) if counts.get("passed") else None
    report.add([
        Figure(f"{name} tests: failed", bad, f"of {last}", figures.most(0), last or text[-200:]),
        Figure(f"{name} tests: took", time.perf_counter() - began, "s"),
    ])


def _run(
    report: Report, name: str, arguments: list[str], clock: Clock, check: bool = True
) -> str:
    """The output of a Python process, noted; raise SubprocessError when it fails or has no time."""
    if clock.left < LEAST_S:
        raise RuntimeError("no time was left")
    log = report.scratch / f"part-{name}.txt"
    try:
        with log.open("wb") as file:
            subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=file, check=check,
                           stderr=subprocess.STDOUT, env=h200_serving.with_ours(),
                           timeout=clock.left)
    except subprocess.TimeoutExpired:
        if check:
            raise
    finally:
        report.note(name, _read(log)[-LOG:])
    return _read(log)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# ---- all of it -----------------------------------------------------------------------------------

Part = Callable[[Report, argparse.Namespace, Clock], None]
PARTS: dict[str, list[Part]] = {
    "smol": [first_boot, serving, decode, products, prefill],
    "8b": [first_boot, serving, decode, products, prefill],
    "card": [card, kernels],
}


def measure(given: argparse.Namespace, out: Path) -> Report:
    """Every part in turn; `given.out` is a folder for what is thrown away, `out` keeps the rest."""
    clock, report = Clock(given.budget_s), Report(given.work, out, given.out)
    for part in PARTS[given.work]:
        if given.only and part.__name__ not in given.only:
            continue
        print(f"---- {part.__name__}, {clock.left:.0f} s left", flush=True)
        try:
            if clock.left < LEAST_S:
                raise RuntimeError("no time was left")
            part(report, given, clock)
        except FOUND as error:
            why = f"{type(error).__name__}: {error}"[:300]
            report.add([Figure(part.__name__.replace("_", " "), None, why=why)])
        report.save()
    return report


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="tests.bench.acceptance", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=sorted(PARTS))
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="folder of WORK.json and WORK.log")
    parser.add_argument("--budget-s", type=float, default=400.0, help="for all of it")
    parser.add_argument("--only", type=lambda text: text.split(","), help="PART,...")
    parser.add_argument("--rows", type=h200_serving.rows_of,
                        help="CLIENTS:REQUESTS[:INPUT[:OUTPUT]],... instead of the work's own")
    parser.add_argument("--loads", type=Path, help="folder of load.py, prompts.py, toolcheck.py")
    parser.add_argument("--serve-args", default="", help="more options of `slipstream serve`")
    parser.add_argument("--ids", nargs=2, type=int, default=(1000, 30_000), help="of prompts")
    parser.add_argument("--processes", type=int, help="of the clients")
    parser.add_argument("--device", default="auto", help="of bench decode and prefill")
    parser.add_argument("--batches", default="1,32,128,200", help="of bench decode")
    parser.add_argument("--context", type=int, help="of bench decode")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each of their measurements")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels and picks; "
                                                   "without it a new one")
    parser.add_argument("--tests", nargs="+", help="files instead of our own")
    given = parser.parse_args()
    tools = h200_serving.WORK["tools"] if given.loads is not None else []
    given.rows = given.rows or [*h200_serving.WORK.get(given.work, []), *tools]
    given.context = given.context or CONTEXT.get(given.work)
    given.ready = "/ready"
    return given


def main() -> int:
    """The command: see the head of this file; 1 = something was missed or has no value."""
    given = arguments()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        given.out = Path(folder)
        given.cache = (given.cache or given.out / "cache").resolve()
        os.environ["TRITON_CACHE_DIR"] = str(given.cache / "triton")
        os.environ["XDG_CACHE_HOME"] = str(given.cache)
        if given.loads is not None:
            shutil.copytree(given.loads, given.out / "loads", dirs_exist_ok=True)
        (out / f"{given.work}.log").unlink(missing_ok=True)
        report = measure(given, out)
    report.show()
    return int(any(one.verdict in ("MISSED", "no value") for one in report.figures))


if __name__ == "__main__":
    sys.exit(main())

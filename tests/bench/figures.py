"""What is asked of the GPU, and measured figures beside it.  Measures nothing.

The targets are those of the H200, speculation off; vLLM 0.26's own values on that card are named
where a target is a multiple of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]  # of bench serve, load.py or bench decode


@dataclass(frozen=True, slots=True)
class Target:
    """A bound: at least `value` when `least`, else at most."""

    value: float
    least: bool = False

    def met(self, value: float) -> bool:
        """Whether this is good enough."""
        return value >= self.value if self.least else value <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.value:,g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value; a `why` instead when there is none."""

    name: str
    value: float | None
    unit: str = ""
    target: Target | None = None
    why: str = ""

    @property
    def verdict(self) -> str:
        """met or missed; "no value" when it should have one; empty when nothing is asked."""
        if self.value is None:
            return "no value"
        if self.target is None:
            return ""
        return "met" if self.target.met(self.value) else "MISSED"

    def __str__(self) -> str:
        shown = self.why if self.value is None else f"{self.value:,.4g} {self.unit}"
        if self.value is not None and self.value >= 1000:
            shown = f"{self.value:,.0f} {self.unit}"
        asked = f"  {self.target}" if self.target is not None else ""
        return f"{self.verdict:<8} {self.name:<44} {shown:<16}{asked}".rstrip()

    def record(self) -> Row:
        """For the JSON file."""
        return {**asdict(self), "verdict": self.verdict}


def least(value: float) -> Target:
    """No less than this."""
    return Target(value, True)


def most(value: float) -> Target:
    """No more than this."""
    return Target(value)


FIELDS = {  # of a row of bench serve: name and unit
    "output_tok_s": ("output", "tok/s"), "tpot_mean_ms": ("TPOT mean", "ms"),
    "ttft_p50_ms": ("TTFT p50", "ms"), "itl_p99_ms": ("ITL p99", "ms"),
    "server_cpu_ms": ("CPU a token", "ms"), "errors": ("errors", ""),
    "client_busy": ("busiest client process", ""),
}
EVERY = {"errors": most(0), "client_busy": most(0.5)}  # a client at least twice as fast as needed
TOOLS = {  # by clients; twice vLLM's 431 / 3,200 / 10,000 tok/s, half its CPU
    1: (least(862), most(1.45)), 16: (least(6400), most(0.225)), 64: (least(20_000), most(0.09)),
}
SERVING: dict[tuple[str, int], dict[str, Target]] = {
    ("smol", 1): {"tpot_mean_ms": most(0.7), "ttft_p50_ms": most(6)},
    ("smol", 32): {"output_tok_s": least(25_000)},
    ("smol", 200): {"output_tok_s": least(30_000), "server_cpu_ms": most(0.05)},
    ("8b", 1): {"tpot_mean_ms": most(4.0), "ttft_p50_ms": most(32)},
    ("8b", 32): {"output_tok_s": least(3200), "itl_p99_ms": most(30)},
    ("8b", 200): {"output_tok_s": least(4400), "server_cpu_ms": most(0.08),
                  "itl_p99_ms": most(60)},
    **{("tools", clients): {"output_tok_s": rate, "server_cpu_ms": cpu}
       for clients, (rate, cpu) in TOOLS.items()},
}  # fmt: skip
BOOT = {"smol": most(8), "8b": most(20)}  # seconds to the first answer, kernels cached
WARM_TURN = most(0.3)  # TTFT of a second turn, of that without a cache
CALLS, SCHEMAS = 40, 10  # toolcheck.py: calls that must be valid, odd schemas
SHORT_S = 0.1  # of a start: not worth a word
INVARIANT = most(1.05)  # the best row-invariant product, of the best of all


def of_boot(work: str, boot: Row, cold: bool) -> Iterator[Figure]:
    """The first answer after a start; a first ever start has no target."""
    name = "first ever boot" if cold else "boot, kernels cached"
    target = None if cold else BOOT.get(work)
    yield Figure(f"{name}: to the first answer", boot["first_answer_s"], "s", target)
    yield Figure(f"{name}: memory", boot["rss_mb"], "MB")


def of_serving(work: str, row: Row) -> Iterator[Figure]:
    """A row of bench serve, or why there is none."""
    clients = row["clients"]
    name = f"{work}, {clients} client{'s' if clients > 1 else ''}"
    if "why" in row:
        yield Figure(name, None, why=row["why"])
        return
    targets = {**EVERY, **SERVING.get((work, clients), {})}
    for field, (title, unit) in FIELDS.items():
        if row[field] is not None:
            yield Figure(f"{name}: {title}", row[field], unit, targets.get(field))


def of_load(level: Row) -> Iterator[Figure]:
    """A level of load.py, the client that other servers' tool prompts were measured with."""
    name = f"tools by load.py, {level['conc']}"
    rate, cpu = TOOLS.get(level["conc"], (None, None))
    yield Figure(f"{name}: output", level["out_tok_s"], "tok/s", rate)
    yield Figure(f"{name}: CPU a token", level["cpu_ms_per_out_tok"], "ms", cpu)
    yield Figure(f"{name}: answered", level["ok"], f"of {level['n']}", least(level["n"]))
    yield Figure(f"{name}: client's own CPU", level["client_cpu_s"] / level["wall_s"], "of a core")


def of_sessions(found: Row) -> Iterator[Figure]:
    """Second turns of load.py's sessions."""
    if "ratio_warm_to_cold" not in found:
        yield Figure("second turn", None, why=f"no session was answered: {found['rows'][:1]}")
        return
    yield Figure("second turn: TTFT, of cold", found["ratio_warm_to_cold"], "", WARM_TURN)
    yield Figure("second turn: TTFT", found["ttft2_p50"] * 1e3, "ms")
    cached = sorted(one or 0 for one in found["cached_tokens"])
    yield Figure("second turn: cached tokens", cached[len(cached) // 2],
                 f"of {found['prompt2_p50']:.0f}")


def of_calls(found: Row) -> Iterator[Figure]:
    """Forced tool calls and odd schemas of toolcheck.py.

    An odd schema is right when it is refused with status 400, or when the answer satisfies it.
    """
    yield Figure("forced tool calls: valid", found["valid"], f"of {found['of']}", least(CALLS))
    wrong = [one for one in found["rows"] if one["verdict"] != "valid"
             and not one["verdict"].startswith("cut by max_tokens")]
    yield Figure("forced tool calls: wrong though not cut", len(wrong), "", most(0))
    yield Figure("forced tool calls: wire breaks", sum(found["wire_breaks"].values()), "", most(0))
    right = [one for one in found["odd"]
             if one["status"] == 400 or (one["status"] == 200 and one["verdict"] == "valid")]
    ignored = [one["schema"] for one in found["odd"] if one not in right]
    yield Figure("odd schemas: refused or enforced", len(right),
                 f"of {len(found['odd'])}{' not ' if ignored else ''}{', '.join(ignored)}",
                 least(SCHEMAS))


def of_product(row: Row) -> Figure:
    """What the row-invariant product of one shape costs; see bench_products.py."""
    costs = {int(rows): cost for rows, cost in row["costs"].items()}
    worst = max(costs, key=lambda rows: costs[rows])
    shown = " ".join(f"{rows}:{cost:.2f}" for rows, cost in sorted(costs.items()))
    return Figure(f"invariant {row['what']} {row['columns']}x{row['depth']}", costs[worst],
                  f"at {worst} rows; {shown}", INVARIANT)


def owners(timeline: list[str]) -> str:
    """Who took how many seconds of a start, in the order of their beginning; no short ones."""
    found = (re.match(r"(.+?) +[\d.]+ +[\d.]+ +([\d.]+)( |$)", line) for line in timeline)
    return ", ".join(f"{one[1]} {one[2]}" for one in found if one and float(one[2]) >= SHORT_S)


def stages(rows: list[Row]) -> list[str]:
    """Rows of bench decode, a line for each batch: microseconds and percent of the floor."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        what = str(row["what"])
        if not what.startswith("decode"):
            lines[what] = [f"{row['value']:,.0f} {row['unit']} {row['beside']}"]
            continue
        name, _, stage = what.partition(": ")
        share = f" {row['beside'].partition(' ')[0]}" if "%" in str(row["beside"]) else ""
        lines.setdefault(name, []).append(f"{stage} {row['value']:,.0f}{share}")
    return [f"{name}: {'; '.join(parts)}" for name, parts in lines.items()]

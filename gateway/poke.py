"""Small looks at one layer from the command line: tokens, blocks, a report.  Changes nothing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from cache.prefix import BLOCK, chain, root

if TYPE_CHECKING:
    from gateway.serve_bench import Load, Row


def show_tokens(tokenizer_json: str, text: str) -> None:
    """Print id, piece and text of every token."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    table = Table("position", "id", "piece", "text", box=None)
    for position, (id, piece) in enumerate(zip(encoding.ids, encoding.tokens, strict=True)):
        table.add_row(str(position), str(id), repr(piece), repr(tokenizer.decode([id], False)))
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    console.print(f"{len(encoding.ids):,} tokens, {len(text):,} characters", highlight=False)


def show_blocks(tokenizer_json: str, text: str, other: str | None) -> None:
    """Print the key of each full block, and whether `other`'s blocks would give it."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    known = [] if other is None else tokenizer.encode(other, add_special_tokens=False).ids
    parent = root(b"")
    keys, warm = chain(parent, ids), chain(parent, known)
    hits = common(keys, warm)
    table = Table("block", "tokens", "key", "begins", "cache", box=None)
    for index, key in enumerate(keys):
        start = index * BLOCK
        begins = tokenizer.decode(ids[start : start + 8], False)
        state = "" if other is None else ("hit" if index < hits else "miss")
        table.add_row(
            str(index), f"{start}..{start + BLOCK - 1}", key.hex()[:16], repr(begins), state
        )
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    tail = len(ids) - len(keys) * BLOCK
    said = f"{len(ids):,} tokens = {len(keys)} full blocks of {BLOCK} and {tail} left over"
    if other is not None:
        said += f"; {hits * BLOCK:,} tokens would come from the cache"
    console.print(said, highlight=False)


def common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many leading keys are equal."""
    for index, (one, two) in enumerate(zip(first, second, strict=False)):
        if one != two:
            return index
    return min(len(first), len(second))


def show_bench(name: str, rows: Iterable[Mapping[str, object]], folder: Path) -> None:
    """Print each row as it is measured; add all of them as one JSON line to folder/name.jsonl."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    kept: list[Mapping[str, object]] = []
    for row in rows:
        kept.append(row)
        console.print(f"{row['what']:<58} {row['value']:>10,.2f} {row['unit']:<8} {row['beside']}")
    _keep(name, folder, rows=kept)


def _keep(name: str, folder: Path, **what: object) -> None:
    """Add one JSON line to folder/name.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {"bench": name, "commit": _commit(), "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "machine": platform.machine(), "cores": os.cpu_count(), **what}
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def show_serve(load: Load, rows: Iterable[Row], folder: Path) -> None:
    """Print a table of `bench serve`, one column for each number of clients; keep all of it."""
    measured = []
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for row in rows:
        measured.append(msgspec.to_builtins(row))
        console.print(f"{row.clients} clients: {row.output_tok_s:,.0f} tok/s")
        if row.errors:
            console.print(f"{row.errors} errors, the first: {row.first_error}")
    work = Path(load.prompts).name or f"{load.input} in, {load.output} out"
    what = f"{load.model}, {load.endpoint}: {work}"
    table = Table(what, box=None)
    for one in measured:
        table.add_column(f"{one['clients']} clients", justify="right")
    for field, title in _SERVE_ROWS.items():
        table.add_row(title, *(_cell(one[field]) for one in measured))
    console.print(table)
    asked = {field: value for field, value in asdict(load).items() if field != "headers"}
    _keep("serve", folder, load=asked, rows=measured)


_SERVE_ROWS = {  # field of gateway/serve_bench.py's Row -> title
    "requests": "requests", "errors": "errors",
    "output_tok_s": "output tok/s", "total_tok_s": "total tok/s",
    "ttft_p50_ms": "TTFT p50, ms", "ttft_p99_ms": "TTFT p99, ms",
    "tpot_mean_ms": "TPOT mean, ms", "tpot_p50_ms": "TPOT p50, ms",
    "itl_p99_ms": "ITL p99, ms", "gap_p99_ms": "gap between reads p99, ms",
    "cached_share": "cached share of prompts",
    "server_cpu_ms": "server CPU, ms a token",
    "root_cpu_ms": "its first process alone", "server_rss_mb": "server RSS, MB",
    "client_cpu_us": "client CPU, us an event", "client_busy": "busiest client process",
}


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return str(value)


def _commit() -> str:
    """The commit of the source tree; empty outside of one."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run(  # noqa: S603 a fixed command
        [git, "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
        text=True, check=False,
    )
    return done.stdout.strip()


def show_report(rows: Iterable[tuple[str, str, bool]]) -> bool:
    """Print (what, value, fine); return whether all of it is fine."""
    table = Table("", "what", "value", box=None)
    good = True
    for what, value, fine in rows:
        table.add_row("[green]ok[/green]" if fine else "[red]no[/red]", what, value)
        good = good and fine
    Console(soft_wrap=True).print(table)
    return good

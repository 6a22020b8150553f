"""Show what a JSON Schema lets a model say.  Decides nothing: engine/grammar/explain.py knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from engine.grammar.schema import Checked, check

SHOWN_ROWS = 200  # of the table
_POINTER = 60  # characters of a pointer that others are lined up with
_WIDTH = 96  # characters of the sample in one line

Explain = Callable[[Checked], Any]  # a checked schema -> engine.grammar.explain.Explainer


def opened(path: str) -> tuple[Any, bool]:
    """The schema in a file, and whether it is a tool's parameters; raise click.UsageError.

    A whole tool or response_format of OpenAI's is taken for the schema inside it.
    """
    with click.open_file(path, "rb") as file:
        raw = file.read()
    try:
        read = json.loads(raw)
    except json.JSONDecodeError as error:
        raise click.UsageError(
            f"{path} is no JSON: line {error.lineno}, column {error.colno}: {error.msg}. "
            "Give a file that holds one JSON Schema."
        ) from None
    except UnicodeDecodeError:
        raise click.UsageError(f"{path} is no UTF-8 text. Give a JSON Schema.") from None
    except RecursionError:
        raise click.UsageError(f"{path} is nested too deeply. Flatten it.") from None
    match read:
        case {"type": "function", "function": {"name": _} as function}:
            return function.get("parameters"), True
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema, False
    return read, False


def show_grammar(path: str, explain: Explain, model: str, *, strict: bool, seed: int) -> None:
    """Print what of the schema is enforced, a random sample, and what the grammar costs.

    Raises BadSchema (a ValueError) for a schema that is malformed, or refused when strict.
    """
    schema, is_tool = opened(path)
    checked = check(schema, strict=strict, root="object" if is_tool else "any")
    explained = explain(checked)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    rows = explained.rows(schema)
    shown = rows[:SHOWN_ROWS]
    wide = min(max((len(row.pointer) for row in shown), default=0), _POINTER)
    for row in shown:  # a table would wrap pointers that somebody wants to copy
        why = f": {row.why}" if row.why else ""
        keywords = ", ".join(row.keywords)
        console.print(f"{row.pointer or '/':<{wide}}  {row.state:<9}  {keywords}{why}")
    if len(rows) > SHOWN_ROWS:
        console.print(f"... and {len(rows) - SHOWN_ROWS:,} rows more")
    sample, cost = explained.sample(model, seed)
    console.print("\na random sample; = marks what the grammar forced:")
    _show_sample(console, sample)
    share = 100 * sample.forced / max(sample.tokens, 1)
    console.print(f"\n{sample.tokens:,} tokens of {model}, {sample.forced:,} of them forced "
                  f"({share:.0f} %)" + ("" if sample.whole else "; the sample found no end"))
    console.print(f"compiled in {cost.compile_ms:.1f} ms, first mask {cost.first_mask_ms:.1f} ms "
                  "of CPU")


def _show_sample(console: Console, sample: Any) -> None:
    text = "".join(letter if letter.isprintable() else "?" for letter in sample.text)
    marks = "".join(("=" if forced else " ") * len(piece) for piece, forced in sample.pieces)
    for start in range(0, len(text), _WIDTH):
        console.print(text[start : start + _WIDTH])
        if line := marks[start : start + _WIDTH].rstrip():
            console.print(line)


def show_lark(path: str, explain: Explain, *, strict: bool) -> None:
    """Print the grammar itself, as the engine gets it."""
    schema, is_tool = opened(path)
    checked = check(schema, strict=strict, root="object" if is_tool else "any")
    click.echo(explain(checked).lark, nl=False)


def show_checks(path: str, explain: Explain, instances: Path, *, strict: bool) -> None:
    """Print one JSON line for each line of `instances`: whether the grammar takes it."""
    schema, is_tool = opened(path)
    explained = explain(check(schema, strict=strict, root="object" if is_tool else "any"))
    with instances.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            found = explained.rejection(line.rstrip("\r\n"))
            said: dict[str, object] = {"line": number, "accepted": found is None}
            if found is not None:
                said |= {"at": found.at, "expected": found.expected}
            click.echo(json.dumps(said, ensure_ascii=False))

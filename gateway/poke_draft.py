"""`slipstream draft`: an answer, each token in the colour of who guessed it.  Decodes none."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

COLOURS = {
    "target": "", "forced": "green", "suffix": "cyan", "prediction": "magenta", "eagle3": "yellow",
}  # fmt: skip


def show_draft(pieces: Iterable[str], sources: Sequence[str]) -> None:
    """Print the tokens' texts as they come, and what the drafts were worth.

    `sources` grows while the answer streams: who guessed each token, as far as it is known; the
    last ones may never be.
    """
    console = Console(highlight=False, soft_wrap=True)
    begin, seen = 0.0, Counter[str]()
    for place, piece in enumerate(pieces):
        begin = begin or time.perf_counter()
        source = sources[place] if place < len(sources) else "target"
        seen[source] += 1
        console.print(Text(piece, COLOURS.get(source, "red")), end="")
    took = time.perf_counter() - begin
    console.print()
    total = seen.total()
    if not total:
        console.print("No token came.")
        return
    console.rule(style="dim")
    for source, count in seen.most_common():
        what = "drawn by the model, not guessed" if source == "target" else f"guessed: {source}"
        console.print(Text(f"{count:5}  {count / total:4.0%}  {what}", COLOURS.get(source, "red")))
    steps = max(seen["target"], 1)
    console.print(f"{total} tokens in about {steps} steps, {total / steps:.2f} a step; "
                  f"{(total - 1) / took if took > 0 else 0:.0f} tokens a second after the first.")


def fields(max_tokens: int, schema: Path | None, prediction: Path | None) -> dict[str, Any]:
    """Of the request; raise ValueError for a schema that is no JSON."""
    found: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": True}
    if schema is not None:
        form = {"name": "answer", "schema": json.loads(schema.read_text())}
        found["response_format"] = {"type": "json_schema", "json_schema": form}
    if prediction is not None:
        found["prediction"] = {"type": "content", "content": prediction.read_text()}
    return found


def token_texts(frames: Iterator[dict[str, Any]]) -> Iterator[str]:
    """The text of each token of a streamed chat answer with logprobs, in whole characters."""
    bytes_of = itertools.chain.from_iterable(
        (frame["choices"][0].get("logprobs") or {}).get("content") or []
        for frame in frames if frame.get("choices")
    )  # fmt: skip
    held = b""
    for token in bytes_of:
        held += bytes(token["bytes"] or ())
        try:
            yield held.decode()
            held = b""
        except UnicodeDecodeError:
            yield ""

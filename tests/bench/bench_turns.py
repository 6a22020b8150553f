"""First tokens of a session's two turns, one client, little of it the client's own time.

    python -m tests.bench.bench_turns http://127.0.0.1:8000 smollm2 --loads FOLDER

The sessions are those of load.py's prompts.py: a long first prompt that nobody shares, then a turn
that continues it.  Prints medians, and what the server says was cached.  Judges no figure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.bench.bench_speculation import module


def turn(
    line: http.client.HTTPConnection, model: str, messages: list[dict[str, str]], session: str
) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token, the text, the usage."""
    body = json.dumps({
        "model": model, "messages": messages, "max_tokens": 32, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    })
    began = time.perf_counter()
    line.request("POST", "/v1/chat/completions", body,
                 {"content-type": "application/json", "x-session-affinity": session})
    answer, first, text = line.getresponse(), 0.0, ""
    usage: dict[str, Any] = {}
    while raw := answer.readline():
        if not raw.startswith(b"data: {"):
            continue
        event = json.loads(raw[6:])
        if event.get("error"):
            raise RuntimeError(str(event["error"]))
        piece = (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
        if piece and not first:
            first = time.perf_counter() - began
        text += piece
        usage = event.get("usage") or usage
    return first, text, usage


def main() -> int:
    """The command: see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("model")
    parser.add_argument("--loads", type=Path, required=True, help="folder of prompts.py")
    parser.add_argument("--sessions", type=int, default=24)
    given = parser.parse_args()
    line = http.client.HTTPConnection(urlsplit(given.base_url).netloc)
    made = module(given.loads, "prompts").sessions(given.sessions + 2, salt=f"{time.time_ns()}-")
    cold, warm, cached = list[float](), list[float](), list[int]()
    for one in made:
        name = f"turns-{one['id']}"
        first, text, _ = turn(line, given.model, one["turn1"], name)
        more = [*one["turn1"], {"role": "assistant", "content": text},
                {"role": "user", "content": one["turn2_user"]}]
        second, _, usage = turn(line, given.model, more, name)
        cold.append(first)
        warm.append(second)
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    low, high = (1e3 * statistics.median(times[2:]) for times in (warm, cold))  # two to warm up
    print(f"first token: turn 1 {high:.2f} ms, turn 2 {low:.2f} ms ({low / high:.2f}); "
          f"{statistics.median(cached):.0f} of {usage['prompt_tokens']} tokens cached")
    return 0


if __name__ == "__main__":
    sys.exit(main())

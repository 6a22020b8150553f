"""Replay texts through suffix drafts: tau, acceptance, calibration, time, bytes.  No model.

    python -m tests.bench.bench_suffix --git . --commits 40          edits of a repository's past
    python -m tests.bench.bench_suffix FOLDER_OR_FILE.jsonl          texts of your own

A line of a file is a turn: `prompt`, `output` (text or ids), and maybe `session`, `predicted`,
`kind`.  A prompt that begins with the text of the session's turn before it gets that turn's ids, as
the gateway gives them.  `--git` makes agent sessions of commits (read a file, edit it hunk by
hunk) and whole files rewritten, with the file before as the prediction.  Time is the thread's CPU
time; tau counts a step's own token too.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from engine.checkpoint import open_checkpoint
from engine.proposer import Turn
from speculative.suffix import SuffixDrafts

BINS = 10
SPEAK = "<|im_start|>assistant\n"
KEEP = Path(tempfile.gettempdir()) / "suffix_turns.jsonl"


class Item(NamedTuple):
    """One turn, in token ids."""

    kind: str
    session: str | None
    prompt: list[int]
    output: list[int]
    predicted: list[int]


@dataclass
class Figures:
    """What came of the guesses of some turns."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    guessed: int = 0  # steps with a guess
    reached: list[int] = field(default_factory=lambda: [0] * 16)  # by place in the chain
    right: list[int] = field(default_factory=lambda: [0] * 16)
    said: list[list[float]] = field(default_factory=lambda: [[] for _ in range(BINS)])
    seen: list[list[bool]] = field(default_factory=lambda: [[] for _ in range(BINS)])
    us: list[float] = field(default_factory=list)
    first_us: list[float] = field(default_factory=list)  # with the indexing of the prompt
    bytes: int = 0

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.steps)

    def book(self, survival: list[float], matched: int) -> None:
        """One guess and how many of its tokens were right."""
        self.steps += 1
        self.tokens += matched + 1
        self.drafted += len(survival)
        self.guessed += bool(survival)
        for place, chance in enumerate(survival):
            self.reached[place] += place <= matched
            self.right[place] += place < matched
            slot = min(BINS - 1, int(chance * BINS))
            self.said[slot].append(chance)
            self.seen[slot].append(place < matched)


def replay(items: list[Item], limit: int, drafts: Any = None) -> dict[str, Figures]:
    """All turns one after another, each step guessed and verified; figures by kind and in all."""
    drafts = drafts or SuffixDrafts()
    figures: dict[str, Figures] = defaultdict(Figures)
    for number, item in enumerate(items):
        key = (str(number), 0)
        tokens = list(item.prompt)
        session = None if item.session is None else item.session.encode()
        end = len(item.prompt) + len(item.output)
        text = item.prompt + item.output
        new = True
        while (at := len(tokens)) < end:
            room = min(limit, end - at - 1)  # as the engine asks
            turn = Turn(key, tokens, len(item.prompt), room, session, b"", list, item.predicted)
            start = time.thread_time_ns()
            guess = drafts.guess(turn, (), room)
            us = (time.thread_time_ns() - start) / 1e3
            matched = 0
            while matched < len(guess.tokens) and text[at + matched] == guess.tokens[matched]:
                matched += 1
            drafts.observe(key, len(guess.tokens), matched)
            tokens += text[at : at + matched + 1]
            for kind in (item.kind, "all"):
                book = figures[kind]
                book.book(guess.survival, matched)
                (book.first_us if new else book.us).append(us)
                book.bytes = max(book.bytes, drafts.nbytes)
            new = False
        drafts.forget(key)
    return figures


def read(path: Path, encode: Callable[[str], list[int]]) -> Iterator[Item]:
    """The turns of a file, or of all files of a folder."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    past: dict[str, tuple[str, list[int]]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            session = row.get("session")
            before, known = past.get(session, ("\0", []))
            prompt, output, predicted = (row.get(k, "") for k in ("prompt", "output", "predicted"))
            if isinstance(prompt, list):
                ids = prompt
            elif prompt.startswith(before):
                ids = known + encode(prompt[len(before) :])
            else:
                ids = encode(prompt)
            said = output if isinstance(output, list) else encode(output)
            guess = predicted if isinstance(predicted, list) else encode(predicted)
            if session is not None and isinstance(prompt, str) and isinstance(output, str):
                past[session] = (prompt + output, ids + said)
            yield Item(row.get("kind", file.stem), session, ids, said, guess)


def git(folder: Path, commits: int) -> Iterator[dict[str, Any]]:
    """Turns made of a repository's newest commits, oldest first."""

    def ask(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
        return done.stdout

    for commit in reversed(ask("log", f"-{commits}", "--format=%h").split()):
        names = ask("show", "--format=", "--name-only", "--diff-filter=M", commit).split()
        talk = said("user", f"Do: {ask('log', '-1', '--format=%s', commit)}") + SPEAK
        for name in [n for n in names if n.endswith((".py", ".md"))][:4]:
            old, new = ask("show", f"{commit}~1:{name}"), ask("show", f"{commit}:{name}")
            if not 200 < len(old) < 20000 or not new:
                continue
            for output, answer in agent(name, old, new):
                yield {"kind": "agent", "session": commit, "prompt": talk, "output": output}
                talk += output + answer
            old, new = old[:8000], new[:8000]
            asked = said("user", f"Rewrite {name}.\n{old}") + SPEAK
            yield {"kind": "rewrite", "prompt": asked, "output": new}
            yield {"kind": "predict", "prompt": asked, "output": new, "predicted": old}


def said(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def agent(name: str, old: str, new: str) -> Iterator[tuple[str, str]]:
    """An agent's calls that make one file of another, each with the answer that it got."""

    def call(function: str, **arguments: str) -> str:
        made = json.dumps({"name": function, "arguments": arguments})
        return f"<tool_call>\n{made}\n</tool_call>"

    yield call("read_file", path=name), f"<|im_end|>\n{said('tool', old)}{SPEAK}"
    a, b = old.splitlines(True), new.splitlines(True)
    hunks = [op for op in difflib.SequenceMatcher(None, a, b, False).get_opcodes()
             if op[0] != "equal"]
    for _, i, j, k, m in hunks[:6]:
        i, k = max(0, i - 1), max(0, k - 1)
        yield (
            call("edit_file", path=name, old="".join(a[i:j]), new="".join(b[k:m])),
            f"<|im_end|>\n{said('tool', 'ok')}{SPEAK}",
        )


def table(by_limit: dict[int, dict[str, Figures]]) -> None:
    """Print all figures."""
    for limit, figures in by_limit.items():
        for kind, f in sorted(figures.items()):
            places = " ".join(
                f"{r / max(1, n):.2f}" for r, n in zip(f.right[:limit], f.reached, strict=False)
            )
            print(
                f"limit {limit}  {kind:10} tau {f.tau:.2f}  steps {f.steps:6}  guessed "
                f"{f.guessed / f.steps:.2f}  right/drafted {sum(f.right) / max(1, f.drafted):.2f}"
                f"  by place {places}"
            )
    figures = by_limit[max(by_limit)]["all"]
    print("survival said -> seen (count): " + "  ".join(
        f"{np.mean(said):.2f} -> {np.mean(seen):.2f} ({len(said)})"
        for said, seen in zip(figures.said, figures.seen, strict=True) if said
    ))
    for name, us in (("us a guess", figures.us), ("us with the prompt", figures.first_us)):
        print(f"{name}: p50 {np.percentile(us, 50):.1f}  p99 {np.percentile(us, 99):.1f}")
    print(f"bytes at most: {figures.bytes:,}")


def items_of(given: argparse.Namespace) -> list[Item]:
    """The turns that the command line names."""
    tokenizer = Tokenizer.from_str(open_checkpoint(given.tokenizer).tokenizer_json)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    if given.git is None:
        return list(read(given.path, encode))
    rows = "\n".join(json.dumps(row) for row in git(given.git, given.commits))
    made = Path(given.keep)
    made.write_text(rows)
    return list(read(made, encode))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="a .jsonl file, or a folder of them")
    parser.add_argument("--git", type=Path, help="a repository to make turns of")
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--keep", default=str(KEEP), help="--git writes it")
    parser.add_argument("--tokenizer", default="smollm2", help="a checkpoint")
    parser.add_argument("--limits", default="3,5,7")
    given = parser.parse_args()
    if (given.path is None) == (given.git is None):
        parser.error("name a file or folder, or --git REPOSITORY")
    items = items_of(given)
    print(f"{len(items)} turns, {sum(len(i.prompt) for i in items):,} prompt tokens, "
          f"{sum(len(i.output) for i in items):,} output tokens")
    table({int(limit): replay(items, int(limit)) for limit in given.limits.split(",")})


if __name__ == "__main__":
    main()

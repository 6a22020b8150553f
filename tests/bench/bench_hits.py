"""Replay sessions with and without drafts: how much of each prompt the cache held.  Times nothing.

    python -m tests.bench.bench_hits                                made-up agents, a tiny model
    python -m tests.bench.bench_hits --trace claude_code_agent.jsonl --sessions 6 --scale 32
    python -m tests.bench.bench_hits --alone                        one request at a time

Where the pool is short, who ends first decides what is evicted, and drafts change who ends first:
`--alone` shows what is left without that.

An engine of its own for each way to draft, and the same turns, a round of them at a time.  Made-up
turns go on from what the model said; a turn of a trace has the trace's prompt, `--scale` times
shorter (blocks of 64 tokens become 64 / scale).  Suffix drafts know each answer as its prediction,
the head is told most of it, so that most drafts are right.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from engine.loop import Engine
from engine.messages import Sampling, SessionEnd, Submit, TurnEnd
from tests.driver import Run, make
from tests.heads import Knowing, config, head_of
from tests.proposers import Eager
from tests.tiny import write_llama

WAYS = ("off", "suffix", "hybrid", "eagle3", "hybrid + eagle3")
MAX_LEN = 4096
BYTES = 256


class Turn(NamedTuple):
    """One request of a session."""

    session: int
    prompt: list[int]  # behind the first `keep` tokens of the session's text so far
    keep: int | None  # None = all of it
    count: int  # output tokens
    tool: bool  # the next one brings a tool's result


@dataclass
class Hits:
    """What the turns of a replay found, in order."""

    cached: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)  # tokens
    answers: dict[tuple[int, int], tuple[int, list[int]]] = field(default_factory=dict)
    # for Knowing: by seed and choice, the prompt's length and the output
    accepted: int = 0
    preemptions: int = 0

    @property
    def share(self) -> float:
        return sum(self.cached) / sum(self.prompts)


def agents(count: int, turns: int, seed: int = 1) -> list[list[Turn]]:
    """Rounds of turns: a system prompt that all share, results, edits of the past, side jobs."""
    chance = random.Random(seed)

    def text(length: int) -> list[int]:
        return [chance.randrange(BYTES) for _ in range(length)]

    system, file, rounds = text(201), text(120), []
    for number in range(turns):
        asked = []
        for session in range(count):
            if chance.random() < 0.1 and number:
                continue
            new = text(chance.randint(6, 40))
            if chance.random() < 0.5:
                new += file[chance.randrange(60) :]  # read again: what suffix drafts live on
            keep = None
            if not number:
                new, keep = system + new, 0
            elif chance.random() < 0.15:
                keep = chance.randint(180, 260)  # the past was rewritten from here on
            asked.append(Turn(session, new, keep, chance.randint(4, 30), chance.random() < 0.6))
        rounds.append(asked)
    return rounds


def traced(file: Path, count: int, scale: int, seed: int = 1) -> list[list[Turn]]:
    """The first `count` sessions of an agents' trace that fit, their turns side by side."""
    size, found = 64 // scale, []
    for line in file.read_text().splitlines():
        raw = json.loads(line)
        asked, lists = [], []
        for _, _, out, _, _, _, flags, back, same, *runs in raw["r"]:
            blocks = lists[len(lists) - back][:same] if back else []
            for start, length in zip(runs[::2], runs[1::2], strict=True):
                blocks = [*blocks, *range(start, start + length)]
            lists.append(blocks)
            prompt = [token for block in blocks for token in _block(len(found), block, size)]
            asked.append(Turn(len(found), prompt, 0, max(1, min(out // scale, 40)), flags & 2 > 0))
        if all(0 < len(turn.prompt) < MAX_LEN - 41 for turn in asked):
            found.append(asked)
        if len(found) == count:
            break
    longest = max(map(len, found))
    return [[asked[i] for asked in found if i < len(asked)] for i in range(longest)]


def _block(session: int, block: int, size: int) -> list[int]:
    chance = random.Random(session * 1_000_003 + block)
    return [chance.randrange(BYTES) for _ in range(size)]


def engine(folder: Path, way: str, blocks: int, plain: Hits | None) -> Engine:
    """An engine that drafts in this way; `plain` is what the turns give without drafts."""
    sources = {"suffix": ("suffix",)}.get(way, ("forced", "suffix"))
    host = Eager(sources) if way in ("suffix", "hybrid", "hybrid + eagle3") else None
    answers = plain.answers if plain else {}
    made = Knowing(head_of(config(), max_len=MAX_LEN + 64), answers)
    head = made if "eagle3" in way else None
    return make(folder, drafts=host, head=head, max_drafts=4, blocks=blocks)


def replay(
    folder: Path, way: str, rounds: Sequence[Sequence[Turn]], blocks: int, plain: Hits | None = None
) -> Hits:
    """All rounds, one after the other; a session whose text has grown too long begins anew.

    `plain`: what came of them without drafts; the answers must be the same.
    """
    made, hits = engine(folder, way, blocks, plain), Hits()
    texts: dict[int, list[int]] = {}
    for number, turns in enumerate(rounds):
        asks = []
        for turn in turns:
            before = texts.get(turn.session, [])
            prompt = [*before[: turn.keep], *turn.prompt]
            if len(prompt) + turn.count > MAX_LEN:
                made.inbox.put(SessionEnd(_key(turn.session)))
                prompt = turn.prompt
            seed = 1000 * number + turn.session
            _, known = plain.answers[seed, 0] if plain else (0, [])
            asks.append(Submit(
                f"{number}.{turn.session}", prompt, turn.count,
                Sampling(temperature=0.7, seed=seed), session=_key(turn.session), predicted=known,
            ))  # fmt: skip
        run = Run(made).put(*asks).drain()
        assert not run.failed and not run.refused, (run.failed, run.refused)
        for turn, ask in zip(turns, asks, strict=True):
            said = run.tokens[ask.id, 0]
            texts[turn.session] = [*ask.prompt, *said]
            hits.answers[ask.sampling.seed, 0] = len(ask.prompt), said
            assert plain is None or plain.answers[ask.sampling.seed, 0][1] == said
            hits.cached.append(run.outs[ask.id, 0][-1].cached)
            hits.prompts.append(len(ask.prompt))
            made.inbox.put(TurnEnd(_key(turn.session), turn.tool))
    hits.accepted = made.guessing.accepted
    hits.preemptions = made.scheduler.preemptions
    return hits


def _key(session: int) -> bytes:
    return session.to_bytes(16, "big")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1024, 96])
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds = agents(given.sessions, given.turns)
    if given.trace:
        rounds = traced(given.trace, given.sessions, given.scale)
    if given.alone:
        rounds = [[turn] for turns in rounds for turn in turns]
    with tempfile.TemporaryDirectory() as home:
        folder = write_llama(Path(home) / "model", max_len=MAX_LEN)
        for blocks in given.blocks:
            print(f"{sum(map(len, rounds))} turns, {blocks} blocks of 64 tokens")
            plain = replay(folder, "off", rounds, blocks)
            for way in WAYS:
                found = replay(folder, way, rounds, blocks, plain) if way != "off" else plain
                worst = max(a - b for a, b in zip(plain.cached, found.cached, strict=True))
                print(f"  {way:16} {found.share:7.2%} of prompt tokens cached; at worst a turn has "
                      f"{worst} fewer; {found.accepted} drafts right, "
                      f"{found.preemptions} preemptions", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

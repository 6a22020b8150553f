"""An engine whose model wants to say a given thing.  Only logits are made up; checks nothing.

Weights, KV, grammar, closing plans, drafts, sampling and scheduler are the product's own: to the
logits of each row a bonus is added for the token that continues what the model wants.  What the
grammar forbids it still cannot say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import torch

from engine.loop import Engine
from engine.proposer import Draft, Turn
from gateway import app
from gateway.local_link import LocalLink
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.text import Vocabulary
from tests.asking import open_gateway
from tests.driver import make
from tests.proposers import OneByOne
from tests.scripted import EOS, byte_tokenizer_json

BONUS = 1e3  # far beyond any logit

#: The prompt and the output so far -> what it wants next, the dearest first; b"" is the end.
Want = Callable[[str, bytes], Sequence[bytes]]
Result = TypeVar("Result")


def wanting(*texts: str) -> Want:
    """The first of these texts that the output so far begins, and then the end."""
    raw = [text.encode() for text in texts]

    def want(_: str, said: bytes) -> list[bytes]:
        return [one[len(said) :] for one in raw if one.startswith(said)]

    return want


class Pieces:
    """The longest token that a text begins with; a control token is written as its name."""

    def __init__(self, tokenizer_json: str, stop: int) -> None:
        self.vocabulary = Vocabulary(tokenizer_json)
        self.ids = {self.spelled([id]): id for id in range(len(self.vocabulary)) if id != stop}
        self._stop = stop
        self._longest = max(map(len, self.ids))

    def spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.vocabulary.spelled(id) for id in ids)

    def first(self, text: bytes) -> int:
        if not text:
            return self._stop
        lengths = range(min(self._longest, len(text)), 0, -1)
        return next(self.ids[text[:count]] for count in lengths if text[:count] in self.ids)

    def all(self, text: bytes) -> list[int]:
        """The whole text, and the end."""
        found = []
        while text:
            found.append(self.first(text))
            text = text[len(self.spelled(found[-1:])) :]
        return [*found, self._stop]


class Wishes:
    """Adds the bonus to an engine's logits.  The engine must not run a step ahead of the host."""

    def __init__(self, engine: Engine, pieces: Pieces, want: Want) -> None:
        assert engine.runner.depth == 0
        self._pieces, self._want = pieces, want
        self._prompts: dict[str, str] = {}  # by request
        self._rows: list[list[int]] = []  # the tokens with a bonus, for each row of the step
        runner = engine.runner
        self._settle, self._logits = runner.settle, runner.model.logits
        runner.settle, runner.model.logits = self.settle, self.logits

    def settle(self, flight) -> None:
        self._rows = [
            self._wanted(row.seq, row.draft[:count])
            for row in flight.plan.rows if row.last
            for count in range(row.drafts + 1)
        ]  # fmt: skip
        self._settle(flight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._logits(hidden)
        for row, tokens in enumerate(self._rows):
            for rank, token in enumerate(tokens):
                found[row, token] += BONUS / (rank + 1)
        return found

    def _wanted(self, seq, drafted: Sequence[int]) -> list[int]:
        prompt = self._prompts.get(seq.submit.id)
        if prompt is None:
            prompt = self._pieces.spelled(seq.tokens[: seq.prompt_len]).decode("utf-8", "replace")
            self._prompts[seq.submit.id] = prompt
        said = self._pieces.spelled([*seq.tokens[seq.prompt_len :], *drafted])
        return [self._pieces.first(text) for text in self._want(prompt, said)]


@dataclass
class Drafts(OneByOne):
    """Guesses what a text is to be continued with: right ones, or wrong ones on purpose."""

    pieces: Pieces
    rule: Callable[[bytes], list[int]]  # the output so far -> draft tokens
    source: str = "wishes"

    def guess(self, turn: Turn) -> Draft:
        said = self.pieces.spelled(turn.tokens[turn.prompt_len :])
        return Draft(self.rule(said)[: turn.limit])


def right(pieces: Pieces, want: Want) -> Drafts:
    """All that the model wants to say, the end too."""

    def rule(said: bytes) -> list[int]:
        wanted = want("", said)
        return pieces.all(wanted[0]) if wanted else []

    return Drafts(pieces, rule)


@dataclass
class Room:
    """A gateway over such an engine, while it runs."""

    client: httpx.AsyncClient
    gateway: Gateway
    engine: Engine

    async def ask(self, **body: object) -> httpx.Response:
        start = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        return await self.client.post("/v1/chat/completions", json={**start, **body})


def in_room(
    folder: Path,
    want: Want,
    use: Callable[[Room], Awaitable[Result]],
    *,
    prompts: Prompts | None = None,
    drafts: Callable[[Pieces], Drafts] | None = None,
    tokenizer_json: str = "",
    prepare: Callable[[Engine], None] = lambda _: None,
    **settings: object,
) -> Result:
    """Run `use` with a gateway over a wishing engine; `prepare` may change the engine first."""

    async def go() -> Result:
        pieces = Pieces(tokenizer_json or byte_tokenizer_json(), EOS)
        engine = make(folder, drafts=drafts(pieces) if drafts else None, **settings)
        Wishes(engine, pieces, want)
        prepare(engine)
        link = LocalLink(lambda: engine)
        await link.start()
        await link.ready()
        gateway = open_gateway(link)
        if prompts is not None:
            gateway.prompts = prompts
        transport = httpx.ASGITransport(app.build(gateway))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await use(Room(client, gateway, engine))
        finally:
            await link.stop()

    return asyncio.run(go())

"""Conversations as prompt ids and grammars, in process and many at once.  Sends nothing anywhere.

For those who drive an engine themselves, as the training of drafts does: prompts and grammars are
then those that a server would have made of the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import anyio
import msgspec

from engine.messages import Grammar
from gateway.prompt import Prompts
from gateway.protocol import Message
from gateway.tools import choice, pick


class Asked(Protocol):
    """What of a conversation is read here."""

    @property
    def messages(self) -> Sequence[dict[str, Any]]:
        """As on the wire of OpenAI's chat endpoint."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """As on the wire."""

    @property
    def choice(self) -> str:
        """What the output must be: "required", "auto"; empty = free text, with the tools shown."""


class _Shape(Protocol):
    @property
    def max_len(self) -> int: ...


class Opened(Protocol):
    """What of a checkpoint is read here."""

    @property
    def tokenizer_json(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def stop_ids(self) -> list[int]: ...
    @property
    def config(self) -> _Shape: ...


class Asker:
    """One model's prompts."""

    def __init__(self, checkpoint: Opened) -> None:
        """Raise BadTokenizer or BadTemplate when the model's files cannot be used."""
        template = checkpoint.chat_template
        self.format = pick(template, None)
        self._prompts = Prompts(
            checkpoint.tokenizer_json, template, max_len=checkpoint.config.max_len,
            format=self.format, add_bos=checkpoint.add_bos, bos_id=checkpoint.bos_id,
            stop_ids=checkpoint.stop_ids,
        )

    @property
    def markers(self) -> Sequence[str]:
        """Texts whose tokens calls are made of."""
        return [self.format.begin, self.format.opening, self.format.example]

    def __call__(self, asked: Sequence[Asked]) -> list[tuple[list[int], Grammar | None]]:
        """The prompt's ids and the grammar of each conversation; raise BadRequest, BadSchema."""
        return anyio.run(self._all, asked)

    async def _all(self, asked: Sequence[Asked]) -> list[tuple[list[int], Grammar | None]]:
        return [await self._one(one) for one in asked]

    async def _one(self, asked: Asked) -> tuple[list[int], Grammar | None]:
        messages = msgspec.convert(list(asked.messages), list[Message])
        grammar = None
        if asked.choice:
            bound = self._prompts.format
            grammar = choice.plan(asked.tools, asked.choice, None, None, bound).grammar
        prompt = await self._prompts.chat(messages, asked.tools)
        return prompt.ids, grammar

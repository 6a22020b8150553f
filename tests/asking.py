"""A gateway over a scripted engine, asked in process.  Opens no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar

import httpx

from engine.messages import Admitted, Out, Step, Submit
from gateway import app
from gateway.config import GatewayConfig
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.tools import load
from tests.scripted import EOS, Script, ScriptedLink, byte_tokenizer_json

HERMES = load("hermes")
USER = {"role": "user", "content": "hi"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
Result = TypeVar("Result")


@cache
def tokenizer() -> str:
    return byte_tokenizer_json()


def open_gateway(link: ScriptedLink, max_len: int = 4096, **settings: object) -> Gateway:
    """A gateway that has everything but a socket."""
    prompts = Prompts(tokenizer(), None, max_len=max_len, format=HERMES, stop_ids=[EOS])
    return Gateway.open(GatewayConfig(**settings), link, prompts, "tiny")  # type: ignore[arg-type]


def with_client(one: Gateway, use: Callable[[httpx.AsyncClient], Awaitable[Result]]) -> Result:
    """Run `use` with a client of this gateway, in an event loop of its own."""

    async def run() -> Result:
        transport = httpx.ASGITransport(app.build(one))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await use(client)

    return asyncio.run(run())


def post(
    one: Gateway | ScriptedLink,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    **fields: object,
) -> httpx.Response:
    """One request; a gateway that was asked before is asked again in a new loop."""
    gateway = one if isinstance(one, Gateway) else open_gateway(one)
    start: dict[str, object] = {"model": "tiny"}
    start |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [USER]}
    return with_client(
        gateway, lambda client: client.post(path, json={**start, **fields}, headers=headers)
    )


def saying(text: str, group: int = 4, **more: object) -> ScriptedLink:
    """An engine that always says this."""
    return ScriptedLink(lambda _: Script.say(text, group, **more))


def cut(text: str | bytes, group: int = 4) -> ScriptedLink:
    """An engine whose tokens run out after this."""
    ids = list(text.encode() if isinstance(text, str) else text)
    batches = [ids[i : i + group] for i in range(0, len(ids), group)]
    return ScriptedLink(lambda _: Script(batches, finish="length", stopped=False))


def failing_at(batch: int) -> ScriptedLink:
    """An engine that gives up before this batch."""
    return saying("some words here", 2, fail_after=batch)


class PlayedLink(ScriptedLink):
    """An engine that plays exactly these outs, one list a step."""

    def __init__(self, outs: Callable[[Submit], list[list[Out]]], admit_s: float = 0.0) -> None:
        super().__init__(lambda _: Script([]))
        self._outs = outs
        self._admit_s = admit_s

    async def _play(self, submit: Submit) -> None:
        await asyncio.sleep(self._admit_s)
        self.boxes.deliver([Admitted(submit.id, 0, 0)])
        for number, outs in enumerate(self._outs(submit)):
            await asyncio.sleep(0)
            self.boxes.deliver([Step(number, outs)])

"""Points of the closing sweep asked over a real gateway and engine, streamed and not.  Prints none.

What a client rebuilds from the stream must be the unstreamed body, letter for letter.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import jsonschema

from engine.checkpoint import Checkpoint
from engine.loop import Engine
from gateway import app
from gateway.config import GatewayConfig
from gateway.local_link import LocalLink
from gateway.prompt import Prompts
from gateway.state import Gateway
from gateway.tools import Tool, load
from tests.auditor import Auditor
from tests.schemas import tool
from tests.sweep import DRAWS, NAME, OTHER, Point

FIELD = "x-slipstream-call"


def ask(
    engine: Callable[[], Engine],
    checkpoint: Checkpoint,
    schemas: Mapping[str, dict[str, Any]],
    points: Sequence[Point],
) -> Counter[str]:
    """Ask each point twice, all of one layout at the same time; what became of them.

    `engine` makes one for each layout.  Raises AssertionError where the two ways differ, or a call
    is open or invalid, or `finish_reason` is wrong.
    """
    counts: Counter[str] = Counter()
    for layout in sorted({point.layout for point in points}):
        fmt = load(layout)
        able = [point for point in points if point.layout == layout and not fmt.unenforced(
            Tool(NAME, "", schemas[point.schema], True))]  # fmt: skip
        answers = asyncio.run(_asked(engine, checkpoint, layout, [
            _body(point, schemas[point.schema]) | {"stream": stream}
            for point in able for stream in (False, True)
        ]))  # fmt: skip
        for at, point in enumerate(able):
            counts[_same(point, schemas[point.schema], *answers[2 * at : 2 * at + 2])] += 1
    return counts


async def _asked(
    engine: Callable[[], Engine], checkpoint: Checkpoint, layout: str, bodies: list[dict[str, Any]]
) -> list[httpx.Response]:
    prompts = Prompts(
        checkpoint.tokenizer_json, None, max_len=checkpoint.config.max_len, format=load(layout),
        stop_ids=checkpoint.stop_ids,
    )  # fmt: skip
    link = LocalLink(engine)
    await link.start()
    await link.ready()
    one = app.build(Gateway.open(GatewayConfig(), link, prompts, "sweep"))
    try:
        transport = httpx.ASGITransport(one)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=None
        ) as client:
            asks = (client.post("/v1/chat/completions", json=body) for body in bodies)
            return list(await asyncio.gather(*asks))
    finally:
        await link.stop()


def _body(point: Point, schema: dict[str, Any]) -> dict[str, Any]:
    draw = DRAWS[point.draw]
    body: dict[str, Any] = {
        "model": "sweep", "messages": [{"role": "user", "content": f"Do it, {point.most}."}],
        "max_tokens": point.most, "temperature": draw.temperature, "seed": point.most,
    }  # fmt: skip
    if point.kind == "answer":
        shape = {"name": "answer", "strict": True, "schema": schema}
        return body | {"response_format": {"type": "json_schema", "json_schema": shape}}
    named = {"type": "function", "function": {"name": NAME}}
    choice = named if point.kind == "named" else point.kind
    tools = [tool(NAME, schema), tool(OTHER.name, dict(OTHER.parameters))]
    return body | {"tools": tools, "tool_choice": choice}


def _same(point: Point, schema: dict[str, Any], one: httpx.Response, stream: httpx.Response) -> str:
    assert one.status_code == stream.status_code == 200, (point, one.text, stream.text)
    (choice,) = one.json()["choices"]
    message, finish = choice["message"], choice["finish_reason"]
    heard = Auditor().hear(stream.content).choices[0]
    calls = message.get("tool_calls", [])
    assert heard.finish == finish, point
    assert (heard.content or "") == (message["content"] or ""), point
    assert [(call["name"], call["arguments"]) for call in heard.calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ], point
    early = FIELD in one.headers
    assert early == (FIELD in stream.text), point
    shown = {NAME: schema, OTHER.name: OTHER.parameters}
    for call in calls:
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), shown[call["function"]["name"]]
        )
    if point.kind == "answer" and message["content"]:
        jsonschema.validate(json.loads(message["content"]), schema)
    return _ended(point, bool(calls), message["content"] or "", finish, early)


def _ended(point: Point, calls: bool, content: str, finish: str, early: bool) -> str:
    """What became of it; AssertionError when `finish_reason` does not say so."""
    if point.kind == "answer" or not calls:
        assert finish in ("stop", "length"), (point, finish)
        if point.kind in ("required", "named"):
            assert (content, finish, early) == ("", "length", False), point
            return "wire: not opened"
        what = "text only" if point.kind == "auto" else "answer" if content else "not opened"
        return f"wire: {what}"
    if early:
        assert finish == "length", point
        return "wire: call, closed early"
    assert finish in ("tool_calls", "stop" if point.kind == "named" else "length"), (point, finish)
    return "wire: call"

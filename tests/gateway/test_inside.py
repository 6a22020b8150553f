"""The app without a socket: what leaving it leaves behind.  Starts no engine."""

from __future__ import annotations

import asyncio

from gateway.app import build
from gateway.events import Finish, Text
from gateway.inside import Inside, events, frames
from tests.asking import USER, open_gateway, saying

BODY = {"model": "tiny", "messages": [USER], "stream": True}


def test_closing_ends_every_task_of_the_loop():
    inside = Inside(build(open_gateway(saying("hello"))))
    inside.open()
    said = list(events(frames(inside.post("/v1/chat/completions", BODY))))
    assert "".join(one.text for one in said if isinstance(one, Text)) == "hello"
    assert isinstance(said[-1], Finish)
    assert asyncio.all_tasks(inside._loop)  # the lifespan's at least
    inside.close()
    assert not asyncio.all_tasks(inside._loop)
    inside.close()  # twice is safe

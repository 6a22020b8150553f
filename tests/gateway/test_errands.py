"""Forty requests of ten families with tool_choice auto: the right call comes, streamed and not.

The engine is the product's own with a model that wants the right call (tests/errands.py): text,
the lazy trigger, grammar, closing plans, tokens and wire are all on the way.
"""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest

from tests.asking import HERMES
from tests.auditor import Auditor
from tests.cases import MORE
from tests.errands import ERRANDS, LEADS, ODD, want
from tests.schemas import FAMILIES, tool
from tests.schemas import ODD as ODD_SCHEMAS
from tests.sdk import comparable, rebuilt
from tests.tiny import write_llama
from tests.wishing import Room, in_room

SYSTEM = {"role": "system", "content": "You call the given tool with fitting arguments."}
ASKED = [
    (family, name, text, right)
    for family, (name, turns) in ERRANDS.items() for text, right in turns.items()
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errands") / "model"
    return write_llama(folder, max_len=4096, layers=1, hidden=32, heads=2, kv_heads=1,
                       intermediate=32)  # fmt: skip


def body(name: str, schema: dict, text: str, choice: object = "auto", **more: object) -> dict:
    return {
        "messages": [SYSTEM, {"role": "user", "content": text}],
        "tools": [tool(name, schema)], "tool_choice": choice, "max_tokens": 300,
        "temperature": 0, **more,
    }  # fmt: skip


def asked(folder, bodies: list[dict]) -> list:
    """The answers to these, ten at a time."""

    async def use(room: Room) -> list:
        found = []
        for at in range(0, len(bodies), 10):
            found += await asyncio.gather(*(room.ask(**one) for one in bodies[at : at + 10]))
        return found

    return in_room(folder, want, use, prefix_caching=False, blocks=2048)


def test_there_are_forty_and_every_right_call_satisfies_its_schema():
    assert len(ASKED) == 40 and set(ERRANDS) == set(FAMILIES)
    for family, _, _, right in ASKED:
        jsonschema.validate(right, FAMILIES[family])


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_the_right_call_comes_in_every_family(choice, folder):
    def wanted(name: str) -> object:
        named = {"type": "function", "function": {"name": name}}
        return named if choice == "named" else choice

    some = ASKED if choice == "auto" else ASKED[::3]  # under auto all forty
    bodies = [body(name, FAMILIES[family], text, wanted(name)) for family, name, text, _ in some]
    answers = asked(folder, [*({**one, **MORE} for one in bodies), *bodies[::4]])
    for number, (_, name, text, right) in enumerate(some):
        stream = answers[number]
        heard = Auditor(include_usage=True).hear(stream.content).choices[0]
        (call,) = heard.calls
        assert (call["name"], json.loads(call["arguments"])) == (name, right), text
        assert heard.finish == ("stop" if choice == "named" else "tool_calls")
        lead = LEADS[[one[2] for one in ASKED].index(text) % len(LEADS)] if choice == "auto" else ""
        assert (heard.content or "") == lead
        completion = comparable(rebuilt(stream.content))
        if number % 4 == 0:
            assert completion == comparable(answers[len(some) + number // 4].json())
        spoken = lead + HERMES.write([(name, json.dumps(right))])
        tokens = len(spoken) + (choice != "named")  # whose end is known without a stop id
        assert completion["usage"]["completion_tokens"] == tokens


def test_an_odd_schema_is_enforced_under_auto_or_refused_with_its_pointer(folder):
    text, name, _ = ODD
    bodies = [body(name, schema, text, max_tokens=150) for schema, _ in ODD_SCHEMAS.values()]
    streams = asked(folder, [{**one, **MORE} for one in bodies])
    for (label, (schema, refusal)), stream in zip(ODD_SCHEMAS.items(), streams, strict=True):
        if refusal is not None:
            assert stream.status_code == 400, label
            assert refusal[2] in stream.json()["error"]["message"]
            assert (refusal[1] or "/") in stream.json()["error"]["message"]
            continue
        (call,) = Auditor(include_usage=True).hear(stream.content).choices[0].calls
        jsonschema.validate(json.loads(call["arguments"]), schema)

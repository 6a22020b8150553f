"""Made-up conversations: the same for a seed, sound, and held out by schema and sentence."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import jsonschema
import pytest

from engine.checkpoint import open_checkpoint
from engine.grammar.schema import check
from gateway.asked import Asker
from speculative.train import tools
from speculative.train.prompts import DOMAINS, TEMPERATURES, conversation, held_out
from tests.tiny import write_llama

MANY = 4000


@pytest.fixture(scope="module")
def many():
    return [conversation(number, 3) for number in range(MANY)]


def schemas(conversations) -> set[str]:
    return {
        json.dumps(tool["function"]["parameters"], sort_keys=True)
        for one in conversations for tool in one.tools
    }


def sentences(conversations) -> set[str]:
    return {
        message["content"]
        for one in conversations for message in one.messages if message["role"] == "user"
    }


def test_no_held_out_schema_or_sentence_is_ever_trained_on(many):
    held = [one for one in many if one.held_out]
    trained = [one for one in many if not one.held_out]
    assert 0.01 < len(held) / MANY < 0.03
    assert len(schemas(held)) > 20
    assert len(sentences(held)) > 40
    assert not schemas(held) & schemas(trained)
    assert not sentences(held) & sentences(trained)
    for side, some in ((True, held), (False, trained)):
        assert {held_out(text) for text in schemas(some) | sentences(some)} == {side}


def test_a_conversation_is_a_function_of_seed_and_number(many):
    again = [conversation(number, 3) for number in (5, 1, 3999)]
    assert again == [many[5], many[1], many[3999]]
    assert conversation(5, 4).messages != many[5].messages
    assert len({one.seed for one in many}) == MANY


def test_domains_temperatures_and_grammars_have_their_shares(many):
    domains = Counter(one.domain for one in many)
    assert set(domains) == set(DOMAINS)
    assert 0.37 < domains["chat"] / MANY < 0.43
    for heat in TEMPERATURES:
        assert abs(sum(one.temperature == heat for one in many) / MANY - 1 / 3) < 0.01
    asked = [one for one in many if one.domain == "tool"]
    assert 0.45 < sum(bool(one.choice) for one in asked) / len(asked) < 0.55
    assert not any(one.choice for one in many if one.domain != "tool")


def test_the_last_message_is_whom_the_model_answers(many):
    for one in many:
        last = one.messages[-1]["role"]
        assert last == ("tool" if one.domain == "result" else "user")
        assert bool(one.tools) is (one.domain != "chat")


def test_earlier_calls_satisfy_the_schemas_that_they_are_shown_with(many):
    for one in many[:400]:
        by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in one.tools}
        for message in one.messages:
            for call in message.get("tool_calls", ()):
                given = json.loads(call["function"]["arguments"])
                jsonschema.validate(given, by_name[call["function"]["name"]])


def test_every_kind_of_tool_can_be_enforced_strictly():
    for number in range(300):
        one = tools.tool(number, 1)
        check(one.wire["function"]["parameters"], strict=True, root="object")
        json.loads(tools.result(one, tools.arguments(one, Random(number)), Random(number)))


def test_sides_follow_from_the_text_alone():
    sides = [held_out(f"text {number}") for number in range(5000)]
    assert sides == [held_out(f"text {number}") for number in range(5000)]
    assert 60 < sum(sides) < 140


def test_prompts_and_grammars_are_those_of_the_gateway(tmp_path, many):
    asker = Asker(open_checkpoint(str(write_llama(tmp_path / "m", layers=1, max_len=8192))))
    some = many[:30]
    for one, (ids, grammar) in zip(some, asker(some), strict=True):
        text = bytes(id for id in ids if id < 256).decode()
        assert one.messages[-1]["content"] in text
        assert all(tool["function"]["name"] in text for tool in one.tools)
        assert (grammar is not None) is bool(one.choice)
        if one.choice == "auto":
            assert grammar.trigger

"""What the wire accepts and refuses, field by field.  No HTTP, no engine."""

from __future__ import annotations

import json

import msgspec
import pytest

from engine.messages import Sampling
from gateway.errors import BadRequest
from gateway.validate import chat_request, completion_request, sampling

USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def call(**function: object) -> list[dict]:
    changed = {**CALL, "function": {**CALL["function"], **function}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [changed]}]


REFUSED = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [USER, {"role": "tool", "content": "3"}]}, "messages[1].tool_call_id"),
    (
        {"messages": [USER, {"role": "tool", "content": "3", "tool_call_id": "call_9"}]},
        "messages[1].tool_call_id",
    ),
    ({"messages": call(arguments="{}{}")}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": call(arguments="[1]")}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": call(arguments="[" * 9999)}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": call(arguments={"a": 1})}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": call(name="no spaces")}, "messages[1].tool_calls[0].function.name"),
    ({"tool_overflow": "explode"}, "tool_overflow"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda x: str(x)[:60])
def test_a_field_out_of_its_type_or_range_is_refused_by_its_path(fields, param):
    with pytest.raises(BadRequest) as caught:
        chat_request(chat(**fields))
    assert caught.value.param == param
    assert caught.value.status == 400


def test_a_missing_field_is_named():
    with pytest.raises(BadRequest) as caught:
        chat_request(b'{"model": "m"}')
    assert caught.value.param == "messages"


def test_a_conversation_may_have_4096_messages_and_no_more():
    message = {"role": "user", "content": "x"}
    assert len(chat_request(chat(messages=[message] * 4096)).messages) == 4096
    with pytest.raises(BadRequest, match="4096") as caught:
        chat_request(chat(messages=[message] * 4097))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"model": NaN}', b"\xff", b'"\\ud800"', b"null", b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(BadRequest):
        chat_request(body)


def test_unknown_fields_and_nulls_are_ignored():
    request = chat_request(
        chat(store=True, verbosity="low", temperature=None, n=None, tools=None, stop=None)
    )
    assert request.choices == 1
    assert request.stops == []
    assert request.limit is None
    assert request.best == -1


def test_parts_are_joined_and_a_refusal_part_is_text():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    request = chat_request(chat(messages=[{"role": "user", "content": parts}]))
    assert request.messages[0].text == "ab"


@pytest.mark.parametrize("content", [None, "", "see"])
def test_an_assistant_message_may_be_empty_beside_its_calls(content):
    messages = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert chat_request(chat(messages=messages)).messages[1].text == (content or "")


def test_max_completion_tokens_wins_over_max_tokens():
    assert chat_request(chat(max_tokens=5, max_completion_tokens=9)).limit == 9
    assert chat_request(chat(max_tokens=5)).limit == 5


def test_sampling_has_openai_defaults_and_a_minted_seed():
    first = sampling(chat_request(chat()), 259, -1)
    second = sampling(chat_request(chat()), 259, -1)
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert 0 <= first.seed < 2**63 and first.seed != second.seed


def test_sampling_takes_every_field_over():
    request = chat_request(
        chat(
            temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, repetition_penalty=1.2,
            frequency_penalty=0.3, presence_penalty=0.4, min_tokens=3, logit_bias={"258": -100},
        )
    )  # fmt: skip
    found = sampling(request, 259, 4)
    assert found.temperature == 0 and found.top_p == 0.5 and found.top_k == 0
    assert found.min_p == 0.1 and found.seed == 2**64 - 1 and found.repetition == 1.2
    assert found.frequency == 0.3 and found.presence == 0.4 and found.min_tokens == 3
    assert found.bias == ((258, -100.0),) and found.logprobs == 4


@pytest.mark.parametrize("key", ["259", "-1", "x", "1.0", "", "٣"])
def test_a_bias_for_an_id_outside_the_vocabulary_is_refused(key):
    with pytest.raises(BadRequest) as caught:
        sampling(chat_request(chat(logit_bias={key: 1})), 259, -1)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_text_completions_refuse_what_they_cannot_do(fields, param):
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    with pytest.raises(BadRequest) as caught:
        completion_request(body)
    assert caught.value.param == param


def test_what_a_request_leaves_out_comes_from_the_model():
    own = Sampling(temperature=0.2, top_p=0.9, top_k=7, min_p=0.1, repetition=1.1)
    silent = sampling(chat_request(chat()), 259, -1, own)
    assert msgspec.structs.replace(silent, seed=0) == own
    loud = chat_request(
        chat(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    )
    assert msgspec.structs.replace(sampling(loud, 259, -1, own), seed=0) == Sampling()

"""POST /v1/completions in process: prompts of every shape, streamed or not.  No sockets."""

from __future__ import annotations

import json
from collections import defaultdict

import httpx
import pytest
from openai.types import Completion

from engine.messages import Hello, Out, Submit, TokenLogprobs
from tests.asking import PlayedLink, cut, open_gateway, post, saying
from tests.scripted import EOS, Script, ScriptedLink

PATH = "/v1/completions"


def echoing(group: int = 3) -> ScriptedLink:
    """An engine that says the prompt backwards."""
    return ScriptedLink(lambda s: Script.say(bytes(s.prompt).decode()[::-1], group))


def ask(link: ScriptedLink, **fields: object) -> httpx.Response:
    return post(link, PATH, **fields)


def added_up(stream: bytes) -> dict[int, tuple[str, str]]:
    """(text, finish) of each choice; checks the frames on the way."""
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    *frames, done, empty = stream.decode().split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    for frame in frames:
        parsed = json.loads(frame.removeprefix("data: "))
        assert parsed["object"] == "text_completion" and parsed["id"].startswith("cmpl-")
        for choice in parsed["choices"]:
            assert choice["index"] not in ends
            assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert texts.keys() == ends.keys()
    return {index: (texts[index], ends[index]) for index in ends}


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"prompt": "abc"}, ["cba"]),
        ({"prompt": ["abc", "de"]}, ["cba", "ed"]),
        ({"prompt": [97, 98]}, ["ba"]),
        ({"prompt": [[97, 98], [99]]}, ["ba", "c"]),
        ({"prompt": ["abc", "de"], "n": 2}, ["cba", "cba", "ed", "ed"]),
        ({"prompt": "abc", "echo": True}, ["abccba"]),
        ({"prompt": [[97, 98]], "echo": True, "n": 2}, ["abba", "abba"]),
        ({"prompt": "abcdef", "stop": "cb"}, ["fed"]),
    ],
)
@pytest.mark.parametrize("group", [1, 2, 100])
def test_prompts_of_every_shape_give_their_choices_in_order(fields, texts, group):
    body = ask(echoing(group), **fields).json()
    Completion.model_validate(body, strict=True)
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    streamed = added_up(ask(echoing(group), stream=True, **fields).content)
    assert streamed == {index: (text, "stop") for index, text in enumerate(texts)}


def test_usage_counts_all_prompts_and_all_choices_once():
    fields = {"prompt": ["abc", "de"], "n": 2}
    usage = ask(echoing(), **fields).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 14)
    streamed = ask(echoing(), stream=True, stream_options={"include_usage": True}, **fields).text
    *_, last, _, _ = streamed.split("\n\n")
    assert json.loads(last[6:])["usage"] == usage
    assert json.loads(last[6:])["choices"] == []


def test_sixteen_tokens_are_the_default_and_the_context_is_checked():
    link = saying("x")
    ask(link)
    ask(link, max_tokens=5, ignore_eos=True, min_tokens=5)
    assert [submit.max_tokens for submit in link.submits] == [16, 5]
    assert [submit.stop_ids for submit in link.submits] == [[EOS], []]
    assert link.submits[1].sampling.min_tokens == 5
    answer = ask(link, prompt=["x", "y" * 4090])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_running_out_of_tokens_is_length():
    assert ask(cut("words")).json()["choices"][0]["finish_reason"] == "length"


def test_tool_calls_in_text_are_text():
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert ask(saying(text)).json()["choices"][0]["text"] == text


def test_logprobs_are_four_lists_streamed_or_not():
    def outs(submit: Submit) -> list[list[Out]]:
        best = [TokenLogprobs(-0.5, [(id, -0.5), (120, -2.0)]) for id in b"abc"]
        return [
            [Out(submit.id, 0, [97], logprobs=best[:1])],
            [Out(submit.id, 0, [98, 99], "length", logprobs=best[1:])],
        ]

    found = ask(PlayedLink(outs), logprobs=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", "c"]
    assert found["token_logprobs"] == [-0.5] * 3
    assert found["top_logprobs"][1] == {"b": -0.5, "x": -2.0}
    assert found["text_offset"] == [0, 1, 2]
    pieces = defaultdict(list)
    for frame in ask(PlayedLink(outs), logprobs=2, stream=True).text.split("\n\n")[:-2]:
        for name, values in (json.loads(frame[6:])["choices"][0]["logprobs"] or {}).items():
            pieces[name] += values
    assert pieces == found
    plain = ask(PlayedLink(outs), logprobs=0)
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 8}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"stop": [""]}, "stop[0]"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_a_400_with_its_param(fields, param):
    link = saying("x")
    answer = ask(link, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert link.submits == []


def test_one_part_that_fails_ends_the_whole_request_and_frees_the_others():
    def script(submit: Submit) -> Script:
        return Script.say(
            "some words", 1, delay_s=0.01, fail_after=2 if submit.prompt[0] == 98 else None
        )

    for stream in (True, False):
        link = ScriptedLink(script)
        gateway = open_gateway(link)
        answer = post(gateway, PATH, prompt=["a", "b", "c"], stream=stream)
        if stream:
            assert answer.text.count("data: [DONE]") == 1 and '"error"' in answer.text
        else:
            assert answer.status_code == 500
        assert len(link.closed) == 2 and not link.boxes.open_boxes()
        assert gateway.admission.open == 0


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_no_more_is_asked_than_the_engine_can_hold(path: str):
    link = saying("x")
    link.hello = Hello(1, "scripted", 259, 100, 64, 2, [EOS], "test")  # the model's is 4,096
    post(link, path)
    assert len(link.submits[0].prompt) + link.submits[0].max_tokens <= 100
    answer = post(link, path, max_tokens=99)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(link.submits) == 1

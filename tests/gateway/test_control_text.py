"""What callers write is text in every family's prompt, wherever they write it.  No engine."""

from __future__ import annotations

import json

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.marks import Marks
from gateway.prompt import _style
from gateway.protocol import Function, Message, ToolCall
from gateway.render import Template
from gateway.tools import load
from tests.families import FAMILIES, open_prompts
from tests.prompting import CHATML, prompts

OPENED = {name: open_prompts(family) for name, family in FAMILIES.items()}
IDS = ("abcdefgh1", "abcdefgh2")


def fragments(name: str) -> st.SearchStrategy[str]:
    """Text made of the family's control tokens, of pieces of them, and of what stands around."""
    family = FAMILIES[name]
    tokens = [*family.markers, *family.added, "<|endoftext|>"]
    pieces = {token[:at] for token in tokens for at in range(1, len(token))}
    pieces |= {token[at:] for token in tokens for at in range(1, len(token))}
    words = ["a", " ", "\n", '"', "\\", "{}", "</", "|", "functions.add:0", "é", "\ue000", "[]"]
    piece = st.sampled_from(tokens) | st.sampled_from(sorted(pieces)) | st.sampled_from(words)
    return st.lists(piece, min_size=1, max_size=5).map("".join)


def conversation(texts: list[str], name: str) -> tuple[list[Message], tuple[dict, ...]]:
    """Callers' texts at every place that they can reach; the tool's name is theirs as well."""
    a, b, c, d, e, f, g, h = texts
    arguments = json.dumps({f"k{a}": b, "n": {f"m{c}": [d]}, "t": e}, ensure_ascii=False)
    calls = [ToolCall(id=IDS[0], function=Function(name, arguments))]
    messages = [
        Message("system", f"s{a}"), Message("user", f"{b}u"), Message("assistant", f"v{c}v"),
        Message("user", d + "u" + e),
        Message("assistant", f"{f}w", tool_calls=calls, reasoning_content=f"r{g}r"),
        Message("tool", f"{h}t", tool_call_id=IDS[0]),
        Message("assistant", f"x{a}", reasoning=f"{b}q"), Message("user", f"{c}u{c}"),
    ]  # fmt: skip
    properties = {f"k{a}": {"type": "string", "description": b, "enum": [c, d], f"x{e}": f}}
    parameters = {"type": "object", "properties": properties, "required": [f"k{a}"], "title": g}
    tool = {"name": name, "description": f"{h}d", "parameters": parameters}
    return messages, ({"type": "function", "function": tool},)


def controls(family: str, texts: list[str], name: str = "add") -> tuple[list[int], bytes]:
    """The control tokens of the prompt, and its text."""
    made, _ = OPENED[family]
    messages, tools = conversation(texts, name)
    ids = anyio.run(made.chat, messages, tools).ids
    return [id for id in ids if id in made._controls], b"".join(map(made.vocabulary.spelled, ids))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_text_of_a_caller_becomes_a_control_token_or_another_text(name, data):
    texts = data.draw(st.lists(fragments(name), min_size=8, max_size=8))
    found, text = controls(name, texts)
    plain, _ = controls(name, ["o"] * 8)
    assert found == plain
    if any("</think>" in one for one in texts):
        return  # a template may cut there; here it sees no mark to cut at
    bare = Template(
        FAMILIES[name].template, Marks([]), {"bos_token": "<|endoftext|>", "eos_token":
        FAMILIES[name].stop}, objects=True, style=_style(load(FAMILIES[name].layout)),
    )  # fmt: skip
    assert text.decode() == bare.text(*conversation(texts, "add"), {})


@pytest.mark.parametrize("name", FAMILIES)
def test_each_control_token_at_each_place_stays_text(name):
    plain, _ = controls(name, ["o"] * 8)
    made, _ = OPENED[name]
    for token in made._controls.values():
        for place in range(8):
            texts = ["o"] * 8
            texts[place] = token
            found, text = controls(name, texts)
            assert found == plain
            # Mistral's has no system messages, and harmony's shows little of a tool.
            assert token.encode() in text or name in ("mistral", "harmony")
    assert len(made._controls) >= len(set(FAMILIES[name].markers))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_name_of_a_tool_becomes_no_control_token(name):
    plain, _ = controls(name, ["o"] * 8)
    made, _ = OPENED[name]
    for token in made._controls.values():
        bare = "".join(letter for letter in token if letter.isascii() and letter.isalnum())
        for tried in {bare, token.strip("<|>[]/")} - {""}:
            if tried.isascii() and tried.replace("_", "").isalnum():
                assert controls(name, ["o"] * 8, tried)[0] == plain


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("im_end", "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
         "<|{{ c.function.name }}|>{% endfor %}{% endfor %}"),
        ("im_end", "{{ tools }}{% for m in messages %}<|{{ m.name }}|>{% endfor %}"),
        ("im_end", "{% for t in tools %}<|{{ t.function.name }}|>{% endfor %}"),
    ],
)  # fmt: skip
def test_a_template_that_prints_a_name_between_brackets_makes_no_control_token(name, template):
    made = prompts(template=template + CHATML)
    messages, tools = conversation(["o"] * 8, name)
    renamed, others = conversation(["o"] * 8, "im_edn")
    found, wanted = (
        [id for id in anyio.run(made.chat, *given).ids if id in (0, 1, 2)]
        for given in ((messages, tools), (renamed, others))
    )
    assert found == wanted

"""Arguments in history keep what they say and how they were written.  No template, no engine."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.arguments import (
    BY_JSON,
    BY_PYTHON,
    DEPTH,
    BadArguments,
    Items,
    Object,
    check,
    literal_of,
    meaning,
    parsed,
)
from gateway.protocol import Function, Message, ToolCall
from gateway.spellings import Spellings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), JSON, max_size=4),
       st.sampled_from([None, 1]), st.booleans())  # fmt: skip
def test_what_python_writes_is_read_as_python_reads_it(value, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert parsed(text) == json.loads(text)
    assert json.loads(str(parsed(text))) == value
    assert meaning(text) == meaning(json.dumps(value, sort_keys=True, separators=(",", ":")))


@given(st.text("{}[]:, \"'\\u0019.eE-+tfn", max_size=20))
def test_it_reads_no_more_than_json(text):
    try:
        wanted = json.loads(text, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        wanted = None
    if isinstance(wanted, dict):
        assert parsed(text) == wanted
        check(text)
    else:
        for read in (parsed, check):
            with pytest.raises(BadArguments):
                read(text)


def test_integers_of_any_size_are_read():
    for digits in (17, 18, 19, 400, 4_000, 5_000):
        spelled = "-" + "9" * digits
        made = parsed(f'{{"a": {spelled}}}')
        assert str(made["a"]) == spelled and spelled in meaning(str(made))


def test_values_print_as_they_were_written():
    made = parsed('{"a": 1.50, "b":[1e3,-0 ], "c": {"d":1.0}, "e": "x", "f": true}')
    assert [str(made[key]) for key in "abce"] == ["1.50", "[1e3, -0]", '{"d": 1.0}', "x"]
    assert isinstance(made["b"], Items) and isinstance(made["c"], Object)
    assert made["a"] == 1.5 and made["b"] == [1000, 0] and made["f"] is True
    words = parsed('{"a": true, "b": false, "c": null}', BY_JSON)
    assert [str(one) for one in words.values()] == ["true", "false", "null"]
    assert [bool(one) for one in words.values()] == [True, False, False]


def test_a_python_literal_keeps_numbers():
    text = '{"a": [1.50, true, null, "é\\n"], "b": {"c": -0}}'
    assert literal_of(parsed(text)) == '{"a": [1.50, True, None, "é\\n"], "b": {"c": -0}}'


def test_for_a_layout_of_literals_each_argument_is_one():
    made = parsed('{"a": [1.50, true, {"b": null}], "c": false}', BY_PYTHON)
    assert [str(one) for one in made.values()] == ['[1.50, True, {"b": None}]', "False"]
    assert str(made) == '{"a": [1.50, true, {"b": null}], "c": false}'


def test_the_depth_has_a_limit():
    fine = '{"a":' * (DEPTH - 1) + "{}" + "}" * (DEPTH - 1)
    assert parsed(fine)
    with pytest.raises(BadArguments):
        parsed('{"a":' + fine + "}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}'), ('{"a": 1.0}', '{"a": 1}'),
        ('{"a": 1e3}', '{"a":1000}'),
        ('{"a": 1.50}', '{"a": 1.5}'), ('{"a": "\\u00e9\\/"}', '{"a": "é/"}'), ("{ }", "{}"),
    ],
)  # fmt: skip
def test_texts_that_say_the_same_mean_the_same(one, other):
    assert meaning(one) == meaning(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'), ('{"a": 1}', '{"a": "1"}'), ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"), ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 99999999999999999999}', '{"a": "99999999999999999999"}'),
        ('{"a": ""}', '{"a": " "}'),
    ],
)  # fmt: skip
def test_texts_that_say_something_else_do_not(one, other):
    assert meaning(one) != meaning(other)


def history(name: str, text: str) -> list[Message]:
    call = ToolCall(id="c", function=Function(name, text))
    return [Message("assistant", None, tool_calls=[call])]


def text_of(messages) -> str:
    return messages[0].tool_calls[0].function.arguments


def test_spellings_come_back_in_their_scope_and_for_their_function():
    known = Spellings(10_000)
    assert text_of(known.restored(b"a", history("add", '{"a":1}'))) == '{"a":1}'
    known.remember(b"a", [("add", '{"a": 1.0}')])
    for _ in range(2):  # the second time by its text
        assert text_of(known.restored(b"a", history("add", '{"a":1}'))) == '{"a": 1.0}'
    assert text_of(known.restored(b"b", history("add", '{"a":1}'))) == '{"a":1}'
    assert text_of(known.restored(b"a", history("sub", '{"a":1}'))) == '{"a":1}'
    assert text_of(known.restored(b"a", history("add", '{"a":2}'))) == '{"a":2}'


def test_spellings_forget_the_oldest_and_keep_to_their_size():
    known = Spellings(4_000)
    for number in range(100):
        known.remember(b"a", [("add", f'{{"a": {number}.0}}')])
        known.restored(b"a", history("add", f'{{"a":{number}}}'))
    assert 0 <= known._left and 0 < len(known._written) < 12
    assert text_of(known.restored(b"a", history("add", '{"a":99}'))) == '{"a": 99.0}'
    assert text_of(known.restored(b"a", history("add", '{"a":1}'))) == '{"a":1}'

"""Control tokens on their way to a scanner: stand-ins, literals, the decoder between."""

from __future__ import annotations

import random

from engine.messages import Out
from gateway.choices import Choice
from gateway.events import CallArgs, CallEnd, CallStart, Finish, Text
from gateway.text import Detokenizer, Vocabulary
from gateway.tools.control import UNBOUND, bind, without
from tests.calls import dialect, with_controls
from tests.gateway.test_text import sentence_piece_json

ODD = bind(["[A]", "[A][B]", "｜c｜", "[gone]"], {"[A]": 7, "[A][B]": 8, "｜c｜": 9, "[other]": 3})


def test_a_literal_is_cut_at_its_longest_markers() -> None:
    assert ODD.ids == {"[A]": 7, "[A][B]": 8, "｜c｜": 9}
    assert ODD.lark('x[A][B]\n[A]"｜c｜[gone]') == r'"x" <[8]> "\n" <[7]> "\"" <[9]> "[gone]"'
    assert ODD.lark("") == UNBOUND.lark("") == ""
    assert UNBOUND.lark("[A]") == '"[A]"'
    seen = ODD.seen("x[A][B]y[A]")
    assert len(seen) == 4 and ODD.shown(seen) == "x[A][B]y[A]" and without(seen) == "xy"
    assert sorted(ODD.stand_ins()) == [7, 8, 9] and len(set(ODD.stand_ins().values())) == 3
    assert UNBOUND.seen("[A]") == "[A]" and not UNBOUND.stand_ins()


def test_stand_ins_come_in_order_with_the_text_however_the_ids_are_grouped() -> None:
    tokenizer_json, ids = with_controls(["[A]", "[B]"])
    vocabulary, shown = Vocabulary(tokenizer_json), {ids["[A]"]: "\ud800", ids["[B]"]: "\ud801"}
    one, two = shown
    half, rest = "é".encode()
    tokens = [*b"a", one, *b"b", half, rest, two, half, one, rest, *b"c", 257, half, two, half]
    want = "a\ud800bé\ud801\ufffd\ud800\ufffdc\ufffd\ud801\ufffd"
    rng = random.Random(1)
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(tokens) + 1), k=rng.randrange(8)))
        decoder = Detokenizer(vocabulary, shown)
        found = "".join(decoder.push(tokens[a:b])
                        for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True))  # fmt: skip
        assert found + decoder.close() == want
    assert Detokenizer(vocabulary).push([*b"a", one, *b"b"]) == "ab", "others never see one"


def test_a_control_token_leaves_the_answers_first_space_to_the_text_behind_it() -> None:
    tokenizer_json, ids = with_controls(["[A]"], sentence_piece_json())
    vocabulary = Vocabulary(tokenizer_json)
    space = next(id for id, raw in enumerate(vocabulary.bytes) if raw.startswith(b" "))
    control = ids["[A]"]
    word = vocabulary.bytes[space].decode()
    decoder = Detokenizer(vocabulary, {control: "\ud800"})
    assert decoder.push([control]) == "\ud800" and decoder.pending
    assert decoder.push([space, control, space]) == f"{word[1:]}\ud800{word}"


def test_a_choice_reads_calls_between_control_tokens_and_drops_the_others() -> None:
    said = dialect("kimi", True)
    tokens = said.tokens("Hm." + said.written([("f", '{"x": "<|tool_call_end|>"}')]))
    for size in (1, 2, 3, len(tokens)):
        choice = Choice(0, Vocabulary(said.tokenizer_json), scanner=said.fmt.scanner(),
                        stand_ins=said.fmt.stand_ins)  # fmt: skip
        events = []
        for at in range(0, len(tokens), size):
            last = at + size >= len(tokens)
            events += choice.take(Out("r", 0, tokens[at : at + size], "stop" * last)).events
        text = "".join(e.text for e in events if isinstance(e, Text))
        arguments = "".join(e.text for e in events if isinstance(e, CallArgs))
        assert (text, arguments) == ("Hm.", '{"x": "<|tool_call_end|>"}')
        assert [type(e) for e in events if not isinstance(e, Text | CallArgs)] == [
            CallStart, CallEnd, Finish
        ]  # fmt: skip
        assert choice.finish == "tool_calls" and choice.calls == [("f", arguments)]
        assert choice.ids == tokens
    plain = Choice(0, Vocabulary(said.tokenizer_json))
    said_all = plain.take(Out("r", 0, tokens, "stop")).events
    assert isinstance(said_all[0], Text) and said_all[0].text.startswith("Hm.functions.f:0{")

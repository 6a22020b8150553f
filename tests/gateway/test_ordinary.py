"""The short way of a usual token writes the bytes of the long way, or leaves it to it.  No I/O."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Out, TokenLogprobs
from gateway.choices import Choice
from gateway.ordinary import Ordinary
from gateway.sse import ChatFrames, TextFrames
from gateway.text import Vocabulary
from gateway.tools.hermes import FORMAT
from gateway.tools.marked import Marked
from gateway.tools.marked_scanner import MarkedScanner
from tests.calls import Dialect, dialect
from tests.gateway.test_text import sentence_piece_json
from tests.scripted import EOS, byte_tokenizer_json

VOCABULARIES = [byte_tokenizer_json(), sentence_piece_json()]
KINDS = [ChatFrames, TextFrames]


class Socket:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.free = True

    def room(self) -> bool:
        return self.free

    def write(self, data: bytes) -> None:
        self.written.append(data)


class Stream:
    """One choice whose first token was shown by the long way."""

    def __init__(
        self, vocabulary: Vocabulary, kind=ChatFrames, scanner=None, stand_ins=None
    ) -> None:
        self.choice = Choice(0, vocabulary, scanner=scanner, stand_ins=stand_ins)
        self.frames = kind("id", 1, "m", choices=1, include_usage=False)
        self.socket = Socket()
        self.ticks = 0
        self.long = 0  # outs that went the long way
        self.errors: list[Exception] = []
        self.past(Out("r", 0, [ord("<")]))
        self.long = 0
        self.sink = Ordinary(
            self.choice, partial(self.frames.around, 0), self.socket,
            tick=self.tick, stop=self.errors.append, otherwise=self.past,
        )  # fmt: skip

    def tick(self) -> None:
        self.ticks += 1

    def past(self, out: Out) -> bool:
        self.long += 1
        if piece := self.frames.batch((self.choice.take(out),)):
            self.socket.write(piece)
        return True

    @property
    def state(self) -> tuple[object, ...]:
        choice = self.choice
        return b"".join(self.socket.written), choice.ids, choice.tokens, choice.calls, choice._call


def calling(fmt: Marked = FORMAT) -> MarkedScanner:
    ids = iter(range(100))
    marks = replace(fmt.marks, mint=lambda: f"call_{next(ids)}")
    return replace(fmt, marks=marks).scanner()


text = st.text(st.sampled_from('a<" \\\n\x00\x7fé東😀\u2028\ufeff'), max_size=6)


@pytest.mark.parametrize("json", VOCABULARIES, ids=["bytes", "sentencepiece"])
@pytest.mark.parametrize("kind", KINDS)
@given(groups=st.lists(st.lists(st.integers(0, 300), max_size=4), max_size=12),
       said=st.lists(text, max_size=4))
def test_any_tokens_in_any_groups_give_the_bytes_of_the_long_way(json, kind, groups, said):
    groups = [*groups, *([byte] for one in said for byte in one.encode()),
              *(list(one.encode()) for one in said)]
    short, long = (Stream(Vocabulary(json), kind) for _ in range(2))
    for _ in range(2):  # the second time every whole token is known
        for ids in groups:
            assert short.sink(Out("r", 0, list(ids)))
            long.past(Out("r", 0, list(ids)))
    assert short.state == long.state
    assert not short.errors


ARGUMENTS = r'{"a": "} <é{\"]", "b": [{}, "\n", "\\"]}'
PIECES = ["half", "call", "calls", "call ", "\n", " ", "x < y", "{", "}", "ok", '"', "\\", "begin"]
SAID = [dialect(name, bound) for name in ("hermes", "mistral13", "mistral", "kimi", "deepseek")
        for bound in (False, True)]  # fmt: skip


def spelled(said: Dialect, piece: str) -> str:
    call = said.written([("get", ARGUMENTS)])
    both = said.written([("get", ARGUMENTS), ("put", "{}")])
    named = {"call": call, "calls": both, "call ": call + " ", "half": call[: len(call) - 9],
             "begin": said.seen(said.fmt.begin)}  # fmt: skip
    return named.get(piece, piece)


@pytest.mark.parametrize("said", SAID, ids=lambda s: f"{s.fmt.name}-{len(s.ids)}")
@given(texts=st.lists(st.sampled_from(PIECES), max_size=6),
       cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_calls_however_cut_give_the_bytes_and_the_calls_of_the_long_way(said, texts, cuts):
    tokens = said.tokens("".join(spelled(said, piece) for piece in texts))
    groups, start = [], 0
    for size in itertools.cycle(cuts):
        if start >= len(tokens):
            break
        groups.append(tokens[start : start + size])
        start += size
    vocabulary = Vocabulary(said.tokenizer_json)
    for id in range(128):
        vocabulary.quote(id)
    short, long = (
        Stream(vocabulary, scanner=calling(said.fmt), stand_ins=said.fmt.stand_ins)
        for _ in range(2)
    )
    for ids in groups:
        assert short.sink(Out("r", 0, list(ids)))
        long.past(Out("r", 0, list(ids)))
    for stream in (short, long):
        stream.past(Out("r", 0, [ord(".")], "length"))
    assert short.state == long.state
    assert not short.errors


def test_the_strings_of_arguments_that_end_with_their_object_go_the_short_way():
    said = dialect("mistral13", True)
    vocabulary = Vocabulary(said.tokenizer_json)
    for id in range(128):
        vocabulary.quote(id)
    stream = Stream(vocabulary, scanner=calling(said.fmt), stand_ins=said.fmt.stand_ins)
    stream.past(Out("r", 0, said.tokens(said.written([("get", '{"')]))))
    assert stream.long == 1
    for text, long in (("a", 1), ("}", 1), ("{", 1), ('"', 2), (":", 3), ('"', 4), ("x", 4),
                       ("\\", 5), ("n", 6), ("y", 6), ("}", 6), ('"', 7), ("}", 8)):  # fmt: skip
        stream.sink(Out("r", 0, list(text.encode())))
        assert stream.long == long, text
    assert stream.choice.calls == [("get", '{"a}{":"x\\ny}"}')]


def test_arguments_and_text_between_their_marks_go_the_short_way():
    vocabulary = Vocabulary(byte_tokenizer_json())
    for id in range(128):
        vocabulary.quote(id)
    stream = Stream(vocabulary, scanner=calling())
    stream.past(Out("r", 0, list(FORMAT.write([("get", "{")])[: -len(FORMAT.marks.end)].encode())))
    for text, long in (("a: b", 1), ("}", 2), ("x", 3), ("y", 3), ("}\n", 4), ("</tool_call>", 5),
                       ("\n", 6), ("z", 7), ("z", 7), ("<", 8), ("z", 9), ("z", 9)):
        stream.sink(Out("r", 0, list(text.encode())))
        assert stream.long == long, text
    assert stream.choice.calls == [("get", "{a: b}xy")]


def test_a_choice_that_began_anew_is_read_by_its_new_decoder_and_scanner():
    vocabulary = Vocabulary(byte_tokenizer_json())
    stream = Stream(vocabulary, scanner=calling())
    stream.choice.begin()
    half = "é".encode()[0]
    stream.past(Out("r", 0, [*b"<tool_call>", half]))
    vocabulary.quote(ord("a"))
    stream.sink(Out("r", 0, [ord("a")]))
    assert stream.long == 2 and "\ufffda".encode() in stream.socket.written[-1]


def test_a_token_goes_the_short_way_from_its_first_use_on():
    stream = Stream(Vocabulary(byte_tokenizer_json()))
    for used in range(1, 4):
        for id in b"ab":
            stream.sink(Out("r", 0, [id]))
        assert stream.long == 0
        assert stream.ticks == 2 * used
    for pair in ("ab", "bc", "de"):
        stream.sink(Out("r", 0, list(pair.encode())))
        assert (stream.long, stream.socket.written[-1].count(b'"%b"' % pair.encode())) == (0, 1)
    for one in ([], [EOS], list("é".encode()), [ord("a"), EOS], [10_000]):
        before = stream.long
        stream.sink(Out("r", 0, one))
        assert stream.long == before + 1, one


def test_a_token_after_half_a_code_point_or_with_logprobs_goes_the_long_way():
    vocabulary = Vocabulary(byte_tokenizer_json())
    for id in b"ab":
        vocabulary.quote(id)
    stream = Stream(vocabulary)
    stream.sink(Out("r", 0, ["é".encode()[0]]))
    stream.sink(Out("r", 0, [ord("a")]))
    assert stream.long == 2 and "\ufffda".encode() in stream.socket.written[-1]
    stream.sink(Out("r", 0, [ord("b")]))
    assert stream.long == 2
    stream.sink(Out("r", 0, [ord("b")], logprobs=[TokenLogprobs(-1.0, [])]))
    assert stream.long == 3 and b"-1.0" in stream.socket.written[-1]


def test_without_room_nothing_is_taken():
    stream = Stream(Vocabulary(byte_tokenizer_json()))
    stream.sink(Out("r", 0, [97]))
    before = stream.state
    stream.socket.free = False
    assert stream.sink(Out("r", 0, [97])) is False
    assert stream.state == before and stream.ticks == 1


def test_an_error_stops_this_turn_and_no_other():
    stream = Stream(Vocabulary(byte_tokenizer_json()))
    stream.sink(Out("r", 0, [97]))
    stream.sink._write = partial(int, "x")
    assert stream.sink(Out("r", 0, [97])) is True
    assert [type(error) for error in stream.errors] == [TypeError]

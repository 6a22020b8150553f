"""The matcher and its masks: against brute force, against xgrammar, and by random walks."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from engine.grammar.masks import Masks
from engine.grammar.matcher import KEPT, Compiled, Compiler, GrammarRefused
from engine.grammar.prose import Prose
from engine.grammar.schema import check, embed
from engine.grammar.state import State
from engine.messages import Grammar
from tests.schemas import FAMILIES, ODD, merged_tokenizer_json, record, whole
from tests.scripted import EOS, byte_tokenizer_json

VOCAB = 300  # more rows than the byte tokenizer has ids: the rest may never be sampled
STOPS = [EOS, 256]

Rows = list[set[int]]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(byte_tokenizer_json(), VOCAB, STOPS)


@pytest.fixture(scope="module")
def merged() -> tuple[Compiler, int]:
    words = ['{"', '":', '"}', '"name', '"}}', "true", "null", "12", "</tool"]
    text, size = merged_tokenizer_json(words)
    return Compiler(text, size, [EOS]), size


def of_schema(schema: dict[str, Any]) -> Grammar:
    return Grammar(f"start: %json {embed(schema)}\n")


AB = of_schema(record({"a": whole(1, 20), "b": {"enum": ["x", "xy"]}}))
AB_TEXT = b'{"a": 12, "b": "xy"}'


def bits(rows: torch.Tensor) -> Rows:
    """The allowed ids of each row."""
    flags = np.unpackbits(rows.numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in flags]


def brute(state: State, vocab: int, stops: Sequence[int]) -> set[int]:
    """What may come next, by trying every id."""
    legal = {token for token in range(vocab) if state.clone().accept(token)}
    return legal | (set(stops) if state.accepting else set())


def test_a_mask_allows_exactly_the_tokens_that_can_be_accepted(compiler: Compiler) -> None:
    state, masks = compiler.compile(AB).start(), Masks(VOCAB, 1)
    for token in AB_TEXT:
        assert bits(masks.fill([(0, state, [])]))[0] == brute(state, VOCAB, STOPS)
        assert not state.accepting and not state.finished
        assert state.accept(token)
    assert bits(masks.fill([(0, state, [])]))[0] == set(STOPS)
    assert state.accepting and state.finished


def test_the_rows_of_drafts_are_those_of_the_states_behind_them(
    merged: tuple[Compiler, int],
) -> None:
    compiler, vocab = merged
    compiled, masks = compiler.compile(AB), Masks(vocab, 64)
    tokens = compiler.vocabulary.tokenizer.tokenize_bytes(AB_TEXT)
    assert len(tokens) < len(AB_TEXT)
    rng = random.Random(1)
    for _ in range(40):
        at, k = rng.randrange(len(tokens) + 1), rng.randrange(6)
        draft = tokens[at : at + k]
        if draft and rng.random() < 0.5:
            draft[rng.randrange(len(draft))] = rng.randrange(vocab)
        state = compiled.start()
        state.accept_all(tokens[:at])
        rows = bits(masks.fill([(3, state, draft)], rows=12))
        legal = masks.legal[0]
        assert legal == state.valid_prefix(draft)
        for i in range(len(draft) + 1):
            ahead = state.clone()
            if i <= legal:
                assert ahead.accept_all(draft[:i]) == i
                assert rows[3 + i] == bits(Masks(vocab, 1).fill([(0, ahead, [])]))[0]
                # A forced span is masked to its canonical tokens, though others could be accepted.
                forced = set(ahead.forced()[:1])
                assert rows[3 + i] in (forced, brute(ahead, vocab, [EOS]))
            else:
                assert rows[3 + i] == set()
        assert state.steps == at


def test_a_step_mixes_free_rows_and_many_sequences_and_forgets_the_last_step(
    compiler: Compiler,
) -> None:
    masks, everything = Masks(VOCAB, 16), set(range(VOCAB))
    one, two = compiler.compile(AB).start(), compiler.compile(AB).start()
    one.accept_all(AB_TEXT[:-2])
    rows = bits(masks.fill([(1, one, list(AB_TEXT[-2:])), (5, two, [0x7B, 0x7B])], rows=9))
    assert rows[1:4] == [{ord('"')}, {ord("}")}, set(STOPS)]
    assert rows[5:8] == [{ord("{")}, {ord('"')}, set()]
    assert masks.legal == [2, 1]
    assert rows[0] == rows[4] == rows[8] == everything
    assert bits(masks.fill([], rows=16)) == [everything] * 16
    assert masks.legal == []


def test_the_mask_has_the_shape_and_type_that_sampling_wants() -> None:
    rows = Masks(65, 4).fill([], rows=3)
    assert rows.dtype == torch.int32 and tuple(rows.shape) == (3, 3)
    assert bits(rows)[0] == set(range(65))


def test_a_stop_id_is_never_fed_and_ends_what_counts_of_a_draft(compiler: Compiler) -> None:
    compiled, masks = compiler.compile(AB), Masks(VOCAB, 8)
    state = compiled.start()
    state.accept_all(AB_TEXT[:-1])
    before = bits(masks.fill([(0, state, [])], rows=1))
    rows = bits(masks.fill([(0, state, [ord("}"), EOS, EOS])], rows=4))
    assert rows == [{ord("}")}, set(STOPS), set(), set()]
    assert masks.legal == [1]
    assert state.valid_prefix([ord("}"), EOS]) == 1
    assert state.accept_all([ord("}"), EOS, ord("}")]) == 1
    assert not state.accept(EOS) and not state.accept(256)
    state.rollback(1)
    assert bits(masks.fill([(0, state, [])], rows=1)) == before
    assert not state.finished and state.accept(ord("}")) and state.finished


def test_an_illegal_token_changes_nothing(compiler: Compiler) -> None:
    state = compiler.compile(AB).start()
    state.accept_all(b'{"a": ')
    for bad in (ord("x"), ord("0"), 259, VOCAB - 1, VOCAB, -1, 2**40):
        assert not state.accept(bad)
        assert state.valid_prefix([bad]) == 0
    assert state.accept_all(b"1x") == 1
    assert state.accept_all(b'9, "b": "x"}') == 12
    assert state.finished and not state.broken


def test_a_clone_goes_its_own_way_and_rollback_reaches_the_start(compiler: Compiler) -> None:
    state = compiler.compile(AB).start()
    state.accept_all(AB_TEXT[:9])
    other = state.clone()
    assert other.accept_all(AB_TEXT[9:]) == len(AB_TEXT) - 9 and other.finished
    assert not state.finished and state.steps == 9
    other.rollback(other.steps)
    assert other.steps == 0 and other.accept_all(AB_TEXT) == len(AB_TEXT)
    with pytest.raises(AssertionError):
        state.rollback(10)


def test_forced_tokens_are_the_only_legal_way_on(merged: tuple[Compiler, int]) -> None:
    compiler, vocab = merged
    state, masks = compiler.compile(AB).start(), Masks(vocab, 1)
    found = 0
    for token in compiler.vocabulary.tokenizer.tokenize_bytes(AB_TEXT):
        forced = state.forced()
        ahead = state.clone()
        assert ahead.accept_all(forced) == len(forced)
        found += len(forced)
        for next_forced in forced[:1]:
            assert next_forced in bits(masks.fill([(0, state, [])]))[0]
        state.accept(token)
    assert found > 10
    assert state.finished and state.forced() == []


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"number+opt"}))
def test_masks_agree_with_xgrammar(compiler: Compiler, name: str) -> None:
    """An independent engine as the oracle.

    Known differences: in strings with a maxLength it takes control characters but no escapes, so
    the walk takes none; ranges of numbers are left out, as it takes exponents and few digits.
    """
    letters = [bytes([b]) for b in range(256)]
    info = xgrammar.TokenizerInfo(
        [*letters, b"", b"", b""], xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=STOPS
    )
    theirs = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(
            json.dumps(FAMILIES[name]), any_whitespace=False, separators=(", ", ": ")
        )
    )
    ours, masks = compiler.compile(of_schema(FAMILIES[name])).start(), Masks(VOCAB, 1)
    mask = xgrammar.allocate_token_bitmask(1, VOCAB)
    rng, compared = random.Random(name), 0
    known = {*range(32), 127, 92}
    for _ in range(300):
        mask.fill_(-1)  # xgrammar leaves a row alone when everything is allowed
        theirs.fill_next_token_bitmask(mask)
        mine, other = bits(masks.fill([(0, ours, [])]))[0], bits(mask)[0]
        assert mine ^ other <= known, (mine - other, other - mine)
        compared += 1
        if ours.finished:
            break
        token = rng.choice(sorted((mine & other) - {*STOPS, 92}))
        assert ours.accept(token) and theirs.accept_token(token)
    assert compared > 10


def walk(compiled: Compiled, vocab: int, rng: random.Random) -> bytes | None:
    """Sample uniformly from the masks; None when it did not end in time."""
    state, masks, out = compiled.start(), Masks(vocab, 1), bytearray()
    for _ in range(4_000):
        allowed = sorted(bits(masks.fill([(0, state, [])]))[0])
        assert allowed, bytes(out)
        token = rng.choice(allowed)
        if token in STOPS:
            return bytes(out)
        assert state.accept(token)
        out.append(token)
    return None


ENFORCED = FAMILIES | {name: schema for name, (schema, bad) in ODD.items() if bad is None}


@pytest.mark.parametrize("name", ENFORCED)
def test_whatever_a_grammar_lets_through_satisfies_its_schema(
    compiler: Compiler, name: str
) -> None:
    schema = ENFORCED[name]
    compiled = compiler.compile(of_schema(check(schema, strict=True).schema))
    rng = random.Random(name)
    texts = [text for _ in range(6) if (text := walk(compiled, VOCAB, rng)) is not None]
    assert len(texts) >= 3
    for text in texts:
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema).validate(value)
        assert b"\n" not in text


RELAXED = {
    name: schema
    for name, (schema, bad) in ODD.items()
    if bad is not None and bad[0] == "unsupported_schema_keyword"
}


@pytest.mark.parametrize("name", RELAXED)
def test_a_relaxed_grammar_still_gives_objects_with_the_right_keys(
    compiler: Compiler, name: str
) -> None:
    schema = RELAXED[name]
    compiled = compiler.compile(of_schema(check(schema, strict=False).schema))
    text = None
    for seed in range(4):
        text = text or walk(compiled, VOCAB, random.Random(seed))
    assert text is not None
    value = json.loads(text)
    assert set(schema["required"]) <= value.keys() <= schema["properties"].keys()


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(compiler: Compiler) -> None:
    assert compiler.cached(Grammar("start: /never/")) is None
    first = compiler.compile(Grammar('start: "kept 0"'))
    assert compiler.compile(Grammar('start: "kept 0"')) is first
    for i in range(1, KEPT + 1):
        compiler.compile(Grammar(f'start: "kept {i}"'))
    assert compiler.cached(Grammar('start: "kept 0"')) is None
    assert compiler.cached(Grammar(f'start: "kept {KEPT}"')) is not None


def test_the_pool_answers_exactly_once_with_the_grammar_or_the_refusal(compiler: Compiler) -> None:
    got: list[tuple[str, object]] = []
    ready = threading.Semaphore(0)

    def done(result: Compiled | GrammarRefused) -> None:
        got.append((threading.current_thread().name, result))
        ready.release()

    for lark in ('start: "fine"', "start: ("):
        compiler.submit(Grammar(lark), done)
        assert ready.acquire(timeout=10)
    assert [type(result) for _, result in got] == [Compiled, GrammarRefused]
    assert all(name.startswith("grammar") for name, _ in got)


@pytest.mark.parametrize(
    "lark",
    [
        "start: (",
        'start: %json {"$ref": "#"}',
        'start: %json {"enum": []}',
        'start: %json {"type": "string", "pattern": "(?=a)"}',
        "start: nowhere",
        "",
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_without_its_text(
    compiler: Compiler, lark: str
) -> None:
    with pytest.raises(GrammarRefused) as caught:
        compiler.compile(Grammar(lark))
    assert caught.value.code
    assert len(caught.value.message) < 400 and "start:" not in caught.value.message


def test_a_matcher_that_hits_its_limit_allows_nothing_not_even_a_stop_id() -> None:
    compiler = Compiler(byte_tokenizer_json(), VOCAB, STOPS)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}}
    state = compiler.compile(Grammar(f'start: "A" | "a" %json {embed(wide)}\n')).start()
    masks = Masks(VOCAB, 4)
    rows = bits(masks.fill([(0, state, list(b'a{"'))], rows=4))
    assert state.broken and rows == [set()] * 4 and masks.legal == [0]
    assert not state.finished and not state.accepting
    assert not state.accept(ord("a")) and state.forced() == []


def test_the_first_mask_is_kept(compiler: Compiler) -> None:
    compiled = compiler.compile(AB)
    assert bits(torch.from_numpy(compiled.first_mask.copy()[None]))[0] == {ord("{")}


AUTO = """start: TEXT | head body
TEXT: /(.|\\n)*/
head[lazy]: /(.|\\n)*/ "<tool_call>"
body: "\\n{\\"a\\": " ("1" | "12") "}"
"""


def test_remembered_masks_of_free_text_are_those_of_the_matcher() -> None:
    words = ["<tool", "_call>", "<tool_call", "call>", "<t", "ll>", "><", "ab"]
    text, vocab = merged_tokenizer_json(words)
    compiler = Compiler(text, vocab, [EOS])
    slow, quick = (
        compiler.compile(Grammar(AUTO)),
        compiler.compile(Grammar(AUTO, "", "<tool_call>")),
    )
    ours, theirs, rng = Masks(vocab, 8), Masks(vocab, 8), random.Random(3)
    pieces = ["<", "<tool", "_call", "x", ">", "é", "🌊", "<<", "\n", "ꯁ", "<tool_call>\n{"]
    free = called = 0
    for _ in range(120):
        said = "".join(rng.choices(pieces, k=rng.randrange(12))).encode()
        tokens = compiler.vocabulary.tokenizer.tokenize_bytes(said)
        a, b = quick.start(), slow.start()
        at = a.accept_all(tokens[: rng.randrange(len(tokens) + 1)])
        assert b.accept_all(tokens[:at]) == at
        if rng.random() < 0.3:
            back = rng.randrange(at + 1)
            a.rollback(back)
            b.rollback(back)
            at -= back
        a = a.clone() if rng.random() < 0.5 else a
        draft = tokens[at : at + 4]
        rows = bits(ours.fill([(0, a, draft)], rows=6))
        assert rows == bits(theirs.fill([(0, b, draft)], rows=6)), said
        assert ours.legal == theirs.legal
        keys = a.prose_keys(draft[: ours.legal[0]])
        free, called = free + len(keys), called + (len(keys) <= ours.legal[0])
    assert slow.start().prose_masks == {}
    assert free > 200 and called > 10
    assert len(quick.start().prose_masks) < free / 4


def test_what_follows_an_unfinished_code_point_depends_only_on_its_key() -> None:
    for text in ("é", "ࠀ", "퀀", "ꯁ", "𐀀", "🌊", "\U00100000"):
        raw = text.encode()
        for cut in range(1, len(raw)):
            prose = Prose(b"<tool_call>").after(b"<to" + raw[:cut])
            assert prose is not None and prose.key[0] == -1 and prose.key[1] > 0
            whole_again = prose.after(raw[cut:])
            assert whole_again is not None and whole_again.key == (0, 0)
    keys = {
        lead: Prose(b"<tool_call>", bytes([lead])).key for lead in (0xE0, 0xE1, 0xED, 0xF0, 0xF1)
    }
    assert len(set(keys.values())) == 5
    assert (
        Prose(b"<tool_call>", "日".encode()[:2]).key == Prose(b"<tool_call>", "é".encode()[:1]).key
    )

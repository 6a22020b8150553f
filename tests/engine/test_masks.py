"""Masks of whole steps: one native call, which touches no row and no state but its own.  No GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

import engine.grammar.masks
from engine.grammar.masks import Masks, Request
from engine.grammar.matcher import Compiler
from engine.grammar.state import State
from engine.messages import Grammar
from tests.engine.test_closing import SCHEMAS
from tests.engine.test_closing_planner import lark
from tests.engine.test_matcher import AB, AB_TEXT, AUTO, of_schema
from tests.schemas import merged_tokenizer_json
from tests.scripted import EOS, byte_tokenizer_json

# llguidance gives the ids of the last three to the special tokens.
WORDS = ['{"', '":', '"}', "<tool", "_call>", "say", "true", "ab", "q1", "q2", "q3"]
CALL = b'say ab <tool_call>\n{"a": 12}'
NATIVE = ("fill_next_token_bitmask_par", "fill_next_token_bitmask_par_with_draft_tokens")

Rows = NDArray[np.int32]


class Twins:
    """A sequence as the engine keeps it, and a copy that no step's masks ever saw."""

    def __init__(self, start: Callable[[], State], tokens: Sequence[int]) -> None:
        self.start = start
        self.tokens = tokens
        self.restart()

    def restart(self) -> None:
        self.ours, self.apart = self.start(), self.start()

    def drafts(self, rng: random.Random, vocab: int) -> list[int]:
        """What may come next: none, right, spoilt somewhere, ended, or wrong at once."""
        at = self.ours.steps
        drafts = list(self.tokens[at : at + rng.randrange(5)])
        kind = rng.choice(["none", "none", "right", "right", "spoilt", "ended", "wrong"])
        if kind == "none":
            return []
        if kind == "spoilt" and drafts:
            drafts[rng.randrange(len(drafts))] = rng.randrange(vocab)
        if kind == "ended":
            drafts += [EOS, EOS]
        if kind == "wrong":
            drafts = [rng.choice([EOS, vocab, -1, 0xFF, vocab - 1]), *drafts]
        return drafts

    def advance(self, rng: random.Random, drafts: Sequence[int], legal: int) -> None:
        """Go on by what was drafted, by what the text says, or back; or begin again at its end."""
        taken = list(drafts[: rng.randrange(legal + 1)])
        at = self.ours.steps
        if taken != list(self.tokens[at : at + len(taken)]):
            taken = []  # legal but not of the text: drafts could not follow it
        if not taken and rng.random() < 0.5:
            taken = list(self.tokens[at : at + 2])
        assert self.ours.accept_all(taken) == self.apart.accept_all(taken) == len(taken)
        if rng.random() < 0.2:
            back = rng.randrange(self.ours.steps + 1)
            self.ours.rollback(back)
            self.apart.rollback(back)
        if self.ours.finished and rng.random() < 0.3:
            self.restart()


def stands(state: State) -> tuple[object, ...]:
    """All that can be asked of a state, without changing it."""
    state = state.clone()
    flags = state.steps, state.finished, state.accepting, state.broken
    return *flags, state.forced(), state.prose_keys([])


def opened(vocab: int, rows: int) -> Rows:
    flags = np.zeros((rows, (vocab + 31) // 32 * 32), dtype=np.uint8)
    flags[:, :vocab] = 1
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def one_by_one(requests: Sequence[Request], vocab: int, rows: int) -> tuple[Rows, list[int]]:
    """The masks of a step by llguidance's plain call alone, a row at a time; and what is legal."""
    masks, counts = opened(vocab, rows), []
    for row, state, drafts in requests:
        masks[row : row + len(drafts) + 1] = 0
        legal = state.clone().accept_all(drafts)
        ahead = state.clone()
        for i in range(legal + 1):
            fill_next_token_bitmask(ahead.matcher, masks, row + i)
            assert i == legal or ahead.accept(drafts[i])
        counts.append(legal)
    return masks, counts


def grammars(vocab: int) -> list[tuple[Grammar, bytes]]:
    return [
        (AB, AB_TEXT),
        (Grammar(AUTO), CALL),
        (Grammar(AUTO, "", "<tool_call>"), CALL),
        (Grammar(f'start: ("say" | " " | "ab" | <[257]> | <[{vocab - 1}]>)+ "."'), b"say ab."),
    ]


def twins_of(unused: int) -> tuple[list[Twins], int]:
    """Four of each grammar, and the vocabulary's size: `unused` ids have no token."""
    text, size = merged_tokenizer_json(WORDS)
    compiler = Compiler(text, size + unused, [EOS])
    cut = compiler.vocabulary.tokenizer.tokenize_bytes
    return [
        Twins(compiler.compile(grammar).start, cut(said))
        for grammar, said in grammars(size + unused)
        for _ in range(4)
    ], size + unused


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("unused", [0, 5])
def test_the_masks_of_mixed_steps_are_those_of_each_request_alone(
    unused: int, threads: int
) -> None:
    twins, vocab = twins_of(unused)
    rng = random.Random(unused + threads)
    masks, mixed, closed = Masks(vocab, 160, threads), 0, 0
    for _ in range(150):
        chosen = rng.sample(twins, rng.randrange(1, len(twins) + 1))
        drafts = [twin.drafts(rng, vocab) for twin in chosen]
        at, firsts = rng.randrange(2), []
        for draft in drafts:  # mostly with no row between them
            firsts.append(at)
            at += len(draft) + 1 + rng.choice([0, 0, 0, 1])
        order = rng.sample(range(len(chosen)), len(chosen))
        ours: list[Request] = [(firsts[i], chosen[i].ours, drafts[i]) for i in order]
        apart: list[Request] = [(firsts[i], chosen[i].apart, drafts[i]) for i in order]
        got = masks.fill(ours, rows=at).numpy()
        wanted, legal = one_by_one(apart, vocab, at)
        assert (got == wanted).all(), (drafts, np.flatnonzero((got != wanted).any(axis=1)))
        assert masks.legal == legal
        for i, count in zip(order, legal, strict=True):
            assert stands(chosen[i].ours) == stands(chosen[i].apart)
            closed += chosen[i].ours.finished
            chosen[i].advance(rng, drafts[i], count)
        mixed += any(legal) and not all(legal)
    assert mixed > 100 and closed > 20


def check_apart(
    apart: Masks, requests: Sequence[Request], lean: set[int], got: Rows, masks: Masks
) -> int:
    """Rows of one token are told, not written; all else is the same.  Return how many there are."""
    rows = apart.fill(requests, len(got), lean, apart=True).numpy()
    assert apart.legal == masks.legal and not masks.only
    assert sorted((*apart.filled, *apart.only)) == masks.filled
    assert not apart.only.keys() & set(apart.filled)
    for row, wanted in enumerate(got):
        if row in apart.only:
            bits = np.unpackbits(wanted.view(np.uint8), bitorder="little")
            assert bits.nonzero()[0].tolist() == [apart.only[row]]
        elif row in apart.filled:
            assert (rows[row] == wanted).all()
    return len(apart.only)


@pytest.mark.parametrize("unused", [0, 5])
def test_a_lean_request_has_its_first_row_that_is_not_forced_and_all_that_are(unused: int) -> None:
    twins, vocab = twins_of(unused)
    rng = random.Random(unused)
    masks, whole, open_row = Masks(vocab, 160), Masks(vocab, 160), opened(vocab, 1)[0]
    apart, lone, left_open, forced = Masks(vocab, 160), 0, 0, 0
    for _ in range(100):
        chosen = rng.sample(twins, rng.randrange(1, len(twins) + 1))
        requests: list[Request] = []
        at = 0
        for twin in chosen:
            drafts = twin.drafts(rng, vocab)
            requests.append((at, twin.ours, drafts))
            at += len(drafts) + 1
        lean = {i for i in range(len(requests)) if rng.random() < 0.7}
        got = masks.fill(requests, at, lean).numpy().copy()
        wanted = whole.fill(requests, at).numpy()
        assert masks.legal == whole.legal and whole.filled == list(range(at))
        lone += check_apart(apart, requests, lean, got, masks)
        for i, (row, state, drafts) in enumerate(requests):
            walker, gaps = state.clone(), 0
            for place in range(len(drafts) + 1):
                here = row + place
                gap = place <= whole.legal[i] and walker.only is None
                gaps += gap
                if i in lean and ((gap and gaps > 1) or place > whole.legal[i]):
                    assert (got[here] == open_row).all() and here not in masks.filled
                    left_open += 1
                else:
                    assert (got[here] == wanted[here]).all() and here in masks.filled
                    forced += i in lean and place > 0
                if place < whole.legal[i]:
                    assert walker.accept(drafts[place])
        for (_, _, drafts), twin, legal in zip(requests, chosen, masks.legal, strict=True):
            twin.advance(rng, drafts, legal)
    assert left_open > 100 and forced > 50 and lone > 100
    assert masks.filled == sorted(masks.filled)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The native calls that were made, by name."""
    made: list[str] = []

    def counted(name: str) -> Callable[..., None]:
        native = getattr(engine.grammar.masks, name)

        def call(*arguments: object) -> None:
            made.append(name)
            native(*arguments)

        return call

    for name in NATIVE:
        monkeypatch.setattr(engine.grammar.masks, name, counted(name))
    return made


def test_a_step_makes_one_native_call_and_none_when_all_is_known(calls: list[str]) -> None:
    vocab = 259
    compiler, masks = Compiler(byte_tokenizer_json(), vocab, [EOS]), Masks(vocab, 32)
    start, prose = compiler.compile(AB).start, Grammar(AUTO, "", "<tool_call>")
    right, wrong, done = list(AB_TEXT[:3]), [ord("x"), EOS], start()
    done.accept_all(AB_TEXT)
    plain, drafted = NATIVE
    steps: list[tuple[list[Request], list[str]]] = [
        # What must come needs no call: only the end of it is not known before.
        ([(0, start(), right), (4, start(), []), (5, start(), wrong), (8, done, [])], [plain]),
        ([(0, start(), []), (1, start(), wrong)], []),
        ([(0, start(), right), (4, start(), list(AB_TEXT))], [drafted]),
        ([(0, compiler.compile(prose).start(), [97, 98]), (3, start(), [])], [drafted]),
        ([(0, compiler.compile(prose).start(), [97, 98])], []),
        ([(0, compiler.compile(prose).start(), [97]), (2, done, [])], [plain]),
        ([], []),
    ]
    for requests, made in steps:
        calls.clear()
        masks.fill(requests)
        assert calls == made


def test_a_broken_matcher_closes_its_own_rows_only(calls: list[str]) -> None:
    vocab = 259
    compiler, masks = Compiler(byte_tokenizer_json(), vocab, [EOS]), Masks(vocab, 16)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}}
    broken = compiler.compile(Grammar('start: "A" | "a" ' + of_schema(wide).lark[len("start: ") :]))
    state, start = broken.start(), compiler.compile(AB).start
    around: list[Request] = [(0, start(), []), (5, start(), []), (6, start(), list(AB_TEXT[:2]))]
    wanted, legal = one_by_one(around, vocab, 9)
    wanted[1:5] = 0
    for drafts in (list(b'a{"'), [ord("a"), 0, 0], [0, 0, 0]):  # whole only the first time
        calls.clear()
        got = masks.fill([(1, state, drafts), *around], rows=9).numpy()
        assert state.broken and (got == wanted).all()
        assert masks.legal == [0, *legal] and len(calls) == 1


def test_a_state_in_which_every_token_is_legal_is_open_beside_drafts(calls: list[str]) -> None:
    """The smallest vocabulary: no token is left that such a state refuses."""
    parsed = json.loads(byte_tokenizer_json())
    parsed["model"]["vocab"] = {"a": 0, "b": 1}
    parsed["added_tokens"] = [{**parsed["added_tokens"][0], "id": 2}]
    compiled = Compiler(json.dumps(parsed), 3, [2]).compile(Grammar("start: /[ab]*/"))
    state, masks = compiled.start(), Masks(3, 8)
    rows = masks.fill([(0, compiled.start(), [0, 1]), (3, state, []), (4, compiled.start(), [2])])
    assert rows.flatten().tolist() == [7, 7, 7, 7, 7, 0, 7, 7]
    assert calls == [NATIVE[1]] and masks.legal == [2, 0, 0]
    assert state.accepting and not state.finished and state.accept(1)


@pytest.mark.parametrize("seed", range(3))
def test_where_a_text_is_forced_a_mask_is_its_next_token_alone(seed: int) -> None:
    """That rows need no computing there is llguidance's way, and to be seen with each version."""
    text, size = merged_tokenizer_json(w.replace(" ", "Ġ") for w in WORDS)
    compiler, chance, forced = Compiler(text, size, [EOS]), random.Random(seed), 0
    mask = np.zeros((1, (size + 31) // 32), dtype=np.int32)

    def legal(state: State) -> list[int]:
        fill_next_token_bitmask(state.matcher, mask)
        return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()

    for schema in SCHEMAS.values():
        state = compiler.compile(lark(schema)).start()
        for _ in range(30):
            walker = state.clone()
            for token in state.forced():
                assert legal(walker) == [token]
                assert walker.accept(token)
                forced += 1
            choice = [token for token in legal(state) if token not in compiler.vocabulary.stops]
            if not choice or not state.accept(chance.choice(choice)):
                break
    assert forced > 100


@pytest.mark.parametrize("seed", range(4))
def test_what_is_legal_does_not_know_in_which_steps_the_text_came(seed: int) -> None:
    """A tokenizer may cut a text otherwise where it begins in the middle of it: a word of one
    character that spans several tokens, here of words that overlap."""
    words = ["ab", "abc", "bc", "bca", "ca", "cab", "xa", '{"', '": "']
    text, size = merged_tokenizer_json(w.replace(" ", "Ġ") for w in words)
    compiler, chance = Compiler(text, size, [EOS]), random.Random(seed)
    masks, rows = Masks(size, 128), 0
    for _ in range(30):
        ends = "".join(chance.choice("abcx😀") for _ in range(chance.randrange(3, 14)))
        grammar = Grammar(f'start: ("x" | "b") "{ends}" /[ab]/ "{ends[::-1]}"\n')
        state, tokens, alone = compiler.compile(grammar).start(), list[int](), list[Any]()
        while not state.finished:
            alone.append(masks.fill([(0, state, [])], 1).numpy()[0].copy())
            legal = np.unpackbits(alone[-1].view(np.uint8), bitorder="little").nonzero()[0]
            tokens.append(int(chance.choice(legal)))
            assert state.accept(tokens[-1])
        state, at = compiler.compile(grammar).start(), 0
        while at < len(tokens):
            count = chance.randrange(len(tokens) - at)
            got = masks.fill([(0, state, tokens[at : at + count])], count + 1).numpy()
            assert masks.legal == [count]
            assert all((got[i] == alone[at + i]).all() for i in range(count + 1))
            assert state.accept_all(tokens[at : at + count + 1]) == count + 1
            at += count + 1
            rows += count + 1
    assert rows > 300

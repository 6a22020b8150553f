"""Generation into shards: whole, resumable, the same however it was cut; and tau by an engine."""

from __future__ import annotations

import math

import pytest

from engine.checkpoint import open_checkpoint
from speculative.train import shards
from speculative.train.generate import Generation, Preparing, missing, prepared, submit_of
from speculative.train.prompts import MOST_TOKENS, conversation
from speculative.train.serving import measure
from speculative.train.shards import Run
from tests.driver import answers, make
from tests.proposers import AdversarialDrafts
from tests.training import VOCAB, ShortAsker, target_folder

SEED = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("generate") / "model", damping=0.5)


def run_of(model, conversations: int = 4, max_len: int = 400) -> Run:
    checkpoint = open_checkpoint(str(model))
    return Run(str(model), checkpoint.fingerprint.hex(), VOCAB, SEED, conversations, max_len)


def go(model, folder, wanted, *, deadline=math.inf, run=None, at_once=4, tell=lambda _: None):
    run = run or run_of(model)
    shards.begin(folder, run)
    engine = make(model, max_sequences=16, speculative="off")
    try:
        work = Generation(engine, folder, run, at_once=at_once)
        asked = prepared(ShortAsker(None), SEED, missing(folder, run, wanted))
        return work.go(asked, deadline, tell), work
    finally:
        engine.close()


def texts(folder):
    return {
        entry.number: ids.tolist()
        for shard in shards.every(folder) for entry, ids in shard.sequences()
    }


def test_every_conversation_of_a_shard_is_answered_as_its_entry_says(model, tmp_path):
    lines: list[str] = []
    done, work = go(model, tmp_path, range(2), tell=lines.append)
    assert sorted(done) == shards.numbers(tmp_path) == [0, 1]
    found = {
        entry.number: (entry, ids)
        for shard in shards.every(tmp_path) for entry, ids in shard.sequences()
    }
    assert sorted(found) == list(range(8))
    for number, (entry, ids) in found.items():
        asked = conversation(number, SEED)
        assert (entry.domain, entry.temperature, entry.held_out, entry.seed) == (
            asked.domain, asked.temperature, asked.held_out, asked.seed)
        assert bytes(ids[: entry.prompt].tolist()).decode() == f"{asked.domain} {number}"
        answer = ids[entry.prompt :].tolist()
        assert 1 <= len(answer) <= MOST_TOKENS[entry.domain]
        assert len(answer) == MOST_TOKENS[entry.domain] or answer[-1] == 258
    assert work.tokens == sum(shard.index.tokens for shard in shards.every(tmp_path))
    assert len(lines) == 2 and "tokens/s" in lines[0]


def test_a_run_that_was_cut_gives_the_tokens_of_one_that_was_not(model, tmp_path):
    go(model, tmp_path / "whole", range(3))
    go(model, tmp_path / "cut", range(1))
    done, work = go(model, tmp_path / "cut", range(3), deadline=-math.inf)
    assert done == [] and shards.numbers(tmp_path / "cut") == [0]
    assert work.tokens == 0
    (tmp_path / "cut" / "00000.json").unlink()
    done, _ = go(model, tmp_path / "cut", [2])
    assert done == [2]
    done, _ = go(model, tmp_path / "cut", range(3), at_once=2)
    assert sorted(done) == [0, 1]
    assert texts(tmp_path / "cut") == texts(tmp_path / "whole")
    assert go(model, tmp_path / "cut", range(3))[0] == []


def test_an_unfinished_shard_leaves_nothing(model, tmp_path):
    class Ending:
        """Time that ends after the first shard."""

        def __init__(self) -> None:
            self.lines = 0

        def __call__(self, line: str) -> None:
            self.lines += 1
            raise TimeoutError

    with pytest.raises(TimeoutError):
        go(model, tmp_path, range(3), tell=Ending())
    assert len(shards.numbers(tmp_path)) == 1
    assert len(list(tmp_path.glob("*.ids"))) == 1


def test_what_is_too_long_is_counted_and_left_out(model, tmp_path):
    run = run_of(model, max_len=200)  # less than a chat's answer
    go(model, tmp_path, range(2), run=run)
    found = list(shards.every(tmp_path))
    chats = sum(conversation(number, SEED).domain == "chat" for number in range(8))
    assert chats and sum(shard.index.skipped for shard in found) >= chats
    assert all(e.domain != "chat" for shard in found for e in shard.index.entries)


def test_other_processes_prepare_the_same_prompts(model):
    checkpoint = open_checkpoint(str(model))
    numbers = list(range(70))  # more than a piece
    many = Preparing("gateway.asked:Asker", checkpoint, SEED, 1)
    alone = Preparing("gateway.asked:Asker", checkpoint, SEED, 0)
    try:
        assert list(many.of(numbers)) == list(alone.of(numbers))
    finally:
        many.close()
        alone.close()


def test_tau_is_measured_by_what_the_engine_accepted(model):
    asked = list(prepared(ShortAsker(None), SEED, range(6)))
    plain = make(model, max_sequences=8, speculative="off")
    off = measure(plain, asked, drafts="off", most=4, at_once=3)
    plain.close()
    assert {one.domain for one in off} == {one.conversation.domain for one in asked}
    assert all(one.tau == 1 and not one.drafted for one in off)
    drafts = AdversarialDrafts(answers_of(model, asked), VOCAB, 258)
    engine = make(model, max_sequences=8, drafts=drafts)
    drafted = measure(engine, asked, drafts="auto", most=4, at_once=3)
    engine.close()
    assert [(one.domain, one.answers, one.tokens) for one in drafted] == [
        (one.domain, one.answers, one.tokens) for one in off]
    for one in drafted:
        assert 0 < one.accepted < one.drafted
        assert 1.2 < one.tau == round(one.tokens / (one.tokens - one.accepted), 4) < 5


def answers_of(model, asked):
    """The plain answers, by request."""
    engine = make(model, max_sequences=8, speculative="off")
    found = answers(engine, *(submit_of(one, engine.hello.stop_ids) for one in asked))
    engine.close()
    return found

"""Bugs that other engines had with drafts, and where each is tested for ours.  Times nothing.

Numbers are those of the list of such bugs that the project began with; what no other file had is
tested here and in test_known_bugs_state.py, how outputs end in tests/gateway/test_draft_ends.py.

     1  test_eagle3_engine::test_after_each_step_the_kv_is_that_of_an_extend_from_scratch
     2  test_head::test_rows_are_those_of_the_reference
        test_eagle3::test_a_whole_sequence_drafts_what_the_reference_drafts
     3  test_probe::test_the_layers_that_a_head_learnt_on_are_found
        test_dialects::test_one_head_in_every_dialect_gives_the_same_logits
        test_dialects::test_layer_ids_of_both_conventions_become_boundaries
     4  test_eagle3::test_positions_far_beyond_what_drafts_are_trained_on
        test_dialects::test_rotary_settings_are_the_drafts_own_and_reach_the_served_length
     5  test_known_bugs::test_a_text_that_reaches_the_longest_length_leaves_the_drafts_of_others
     6  test_known_bugs::test_drafts_of_every_length_stay_within_the_blocks_of_their_sequence
        test_eagle3_engine::test_drafts_at_the_longest_text_stay_within_blocks_and_positions
     7  test_caching::test_nothing_is_published_beyond_what_was_accepted
     8  test_prefix_hits::test_each_turn_finds_what_it_finds_without_drafts
     9  test_eagle3::test_slots_that_nobody_wrote_are_never_read
        test_eagle3_engine::test_a_warm_cache_drafts_what_a_cold_one_drafts
    10  test_known_bugs::test_no_step_writes_to_a_block_that_is_shared_or_cached
    11  test_known_bugs::test_no_draft_however_wrong_ends_a_step_or_reaches_the_model
        test_cases_engine::test_case_09_a_draft_is_cut_where_the_grammar_ends_it
    12  test_known_bugs_state::test_after_each_step_a_matcher_stands_where_a_fresh_one_would
    13  test_draft_ends::test_the_rules_behind_a_thought_hold_wherever_in_a_draft_it_ends
    14  test_known_bugs_state::test_a_preemption_at_each_step_leaves_the_answers
        test_depth::test_a_flying_sequence_is_never_preempted_and_the_next_plan_waits
        test_eagle3_engine::test_a_preempted_sequence_drafts_as_if_it_had_not_been
    15  test_known_bugs::test_no_draft_however_wrong_ends_a_step_or_reaches_the_model
        test_known_bugs::test_a_prediction_with_ids_that_the_model_lacks_costs_nothing
    16  test_known_bugs::test_a_row_that_is_no_number_fails_its_request_by_name_and_nobody_else
        test_known_bugs::test_what_a_failed_request_computed_is_not_found_by_the_next_one
    17  test_exactness::test_every_way_to_run_a_request_gives_the_same_tokens
        test_exactness::test_a_wrong_history_is_noticed
    18  test_sampling::test_draws_have_the_enumerated_distribution
        test_accept::test_any_draft_gives_the_output_of_none
    19  test_known_bugs_state::test_logprobs_are_those_without_drafts_beside_requests_that_want_none
    20  test_exactness::test_every_way_to_run_a_request_gives_the_same_tokens
        test_exactness::test_a_wrong_noise_key_is_noticed
    21  does not apply: there are no adapters
    22  test_known_bugs_state::test_a_length_that_changes_with_every_step_changes_no_answer
        test_known_bugs_state::test_a_head_drafts_behind_steps_without_drafts_as_if_there_were_none
    23  test_bits::test_logits_of_a_row_do_not_know_its_drafts_nor_its_neighbours
        test_card::test_drafts_of_any_length_change_no_bit
    24  test_speculation::test_however_many_tokens_come_at_once_the_events_say_the_same
        test_every_split::test_what_was_written_is_read_back_at_every_split
    25  test_draft_ends::test_a_grammar_that_is_complete_ends_the_answer_wherever_in_a_draft
    26  test_draft_ends::test_an_end_of_any_kind_wherever_in_a_draft_is_the_end
        test_accept::test_each_kind_of_end_at_each_place_cuts_the_run
    27  test_speculation::test_events_are_those_without_drafts
        test_reasoning_tokens::test_reasoning_tokens_are_counted_the_same_in_any_groups_streamed_and_not
    28  test_known_bugs_state::test_random_aborts_amid_drafts_leave_the_pool_full
        test_loop::test_ten_thousand_random_aborts_leave_the_pool_full
    29  does not apply: the cache has one tier (and block keys know nothing of drafts)
    30  test_noise::test_the_extreme_words_give_finite_noise_and_keep_the_upper_tail
        test_accept::test_any_draft_gives_the_output_of_none (no coin decides: the rule is equality)
    31  test_eagle3_engine::test_a_head_that_has_learnt_is_accepted_and_changes_nothing
    32  test_eagle3_engine::test_chunked_prompts_draft_what_whole_ones_draft
    33  does not apply: prompts and outputs are computed in one process
    34  does not apply: a model is on one device
    35  test_known_bugs_state::test_another_tenant_with_the_same_session_gets_no_word_of_it
        test_suffix::test_a_probe_of_another_tenant_finds_nothing
        test_caching::test_tenants_never_share_blocks
"""

from __future__ import annotations

import ast
import math
import random
import re
from pathlib import Path

import msgspec
import pytest

from engine.messages import Sampling, Submit
from engine.scheduler import Scheduler
from tests.driver import Run, answers, make
from tests.exact import requests
from tests.heads import Watched, eagle_of, one_thread
from tests.proposers import Eager
from tests.tiny import write_llama
from tests.watching import KINDS, Watch, drafting, spoil

TESTS = Path(__file__).parents[1]
alone = pytest.fixture(autouse=True, scope="module")(one_thread)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("known") / "model", max_len=512)


@pytest.fixture(scope="module")
def truth(folder):
    """One request at a time, no cache, no drafts, whole prompts: what all others must equal."""
    engine = make(folder, prefix_caching=False, max_batch_tokens=4096)
    known: dict[bytes, Run] = {}

    def ask(submit: Submit) -> Run:
        key = msgspec.msgpack.encode(submit)
        if key not in known:
            known[key] = Run(engine).put(submit).drain()
        return known[key]

    return ask


def expected(truth, asks: list[Submit]) -> dict:
    return {key: text for one in asks for key, text in truth(one).tokens.items()}


def prompt(count: int, seed: int = 3) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(count)]


# ---- the list itself ---------------------------------------------------------------------------


def table() -> dict[int, str]:
    """What the docstring says of each row."""
    parts = re.split(r"(?m)^ {4,5}(\d{1,2})  ", __doc__)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def defined(file: str) -> set[str]:
    (path,) = TESTS.rglob(f"{file}.py")
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


def test_every_row_is_tested_by_tests_that_exist_or_says_why_not():
    rows = table()
    assert list(rows) == list(range(1, 36))
    for number, text in rows.items():
        named = re.findall(r"(\w+)::(\w+)", text)
        assert named or "not apply" in text, number
        for file, test in named:
            assert test.startswith("test_") and test in defined(file), (number, file, test)


# ---- 5, 6, 10: who else is in the batch, where it is written ------------------------------------


@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_a_text_that_reaches_the_longest_length_leaves_the_drafts_of_others(folder, left):
    """Its own drafts stop at its last token; a short text beside it goes on with all of its own."""
    short = Submit("short", prompt(9, 6), 80, Sampling(temperature=0.0, seed=1))
    long = Submit("long", prompt(452), 60 - left, Sampling(seed=5))
    seen = []
    for asks in ([short], [short, long]):
        head = Watched(eagle_of())
        engine = make(folder, head=head, max_drafts=4)
        answers(engine, *asks)
        seen.append(head.chains)
    alone, beside = seen
    assert len(alone) > 50 and alone.items() <= beside.items()
    assert max(at for seed, at in beside if seed == 5) > 505 - left


@pytest.mark.parametrize("kind", ["hybrid", "adversarial", "both", "garbage"])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("left", [1, 2, 3, 9, 17])
def test_drafts_of_every_length_stay_within_the_blocks_of_their_sequence(
    folder, truth, kind, most, left
):
    asks = [
        Submit("a", prompt(512 - left), left, Sampling(temperature=0.0)),
        Submit("b", prompt(126, 5), left + 3, Sampling(seed=2)),  # over a block's end
    ]
    texts = expected(truth, asks)
    engine = drafting(folder, kind, asks, texts, most, blocks=12)
    watch = Watch(engine)
    assert answers(engine, *asks) == texts
    assert watch.seen["rows"] > 600


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1])
def test_no_step_writes_to_a_block_that_is_shared_or_cached(folder, truth, kind, depth):
    """Hits to the end of a block and inside one, forks, and a pool that runs short."""
    asks = requests("hot", "free", 3)
    texts = expected(truth, asks)
    engine = drafting(folder, kind, asks, texts, 6, depth=depth, blocks=24, max_batch_tokens=64)
    watch = Watch(engine)
    for turn in range(2):
        again = [msgspec.structs.replace(one, predicted=texts[one.id, 0]) for one in asks]
        assert answers(engine, *again) == texts, turn
    assert watch.seen["shared"] > 20 and watch.seen["drafts beside shared"] > 3


def test_a_write_to_a_shared_block_is_noticed(folder, monkeypatch):
    """A fork that takes the last block of its leader instead of a copy."""
    fork = Scheduler._fork

    def careless(self, seq):
        fork(self, seq)
        for other in self.running:
            if other is not seq and other.submit.id == seq.submit.id:
                self.pool.release(other.blocks[-1:])
                self.pool.share(seq.blocks[-1:])
                other.blocks[-1:] = seq.blocks[-1:]
        self._copies.clear()

    monkeypatch.setattr(Scheduler, "_fork", careless)
    ask = Submit("a", prompt(70), 20, Sampling(seed=4), n=2)
    engine = drafting(folder, "random", [ask], {})
    Watch(engine)
    with pytest.raises(AssertionError, match="was written"):
        answers(engine, ask)


# ---- 11, 15, 16: ids that are none, rows without a number ---------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("grammar", ["free", "json", "choice", "tight"])
def test_no_draft_however_wrong_ends_a_step_or_reaches_the_model(folder, truth, grammar, depth):
    """Ids below zero and beyond the vocabulary, too many of them, behind the grammar's end."""
    asks = requests("hot", grammar, 2)
    texts = expected(truth, asks)
    engine = drafting(folder, "garbage", asks, texts, 5, depth=depth)
    Watch(engine)
    assert answers(engine, *asks) == texts
    assert engine.guessing.host.told > 50 and engine.guessing.accepted > 20


@pytest.mark.parametrize("bad", [[259] * 9, [65, 300, 66], [-1] * 9, [2**40, 5], [65, -7, 66]])
def test_a_prediction_with_ids_that_the_model_lacks_costs_nothing(folder, truth, bad):
    """A tokenizer may know more tokens than its model has rows."""
    ask = Submit("a", prompt(30), 25, Sampling(temperature=0.0))
    other = Submit("b", prompt(30, 4), 25, Sampling(seed=2))
    engine = make(folder, drafts=Eager(), max_drafts=8)
    Watch(engine)
    got = answers(engine, msgspec.structs.replace(ask, predicted=bad), other)
    assert got == expected(truth, [ask, other])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("grammar", ["free", "json"])
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("place", [0, 7, 12])
def test_a_row_that_is_no_number_fails_its_request_by_name_and_nobody_else(
    folder, truth, kind, grammar, value, place
):
    """Whether it is the row of the newest token or one of those that verify drafts."""
    asks = requests("hot", grammar, 2)
    texts = expected(truth, asks)
    engine = drafting(folder, kind, asks, texts)
    hit = spoil(engine, "r1", place, value)
    run = Run(engine).put(*asks).drain()
    assert hit and list(run.failed) == ["r1"] and engine.pool.used == 0
    told = run.failed["r1"]
    assert told.code == "model_failed" and "NaN" in told.message and "--dtype" in told.message
    for key, text in texts.items():
        if key[0] != "r1":
            assert run.tokens[key] == text and run.finish(key)
        else:
            assert run.tokens.get(key, []) == text[: len(run.tokens.get(key, []))]
            assert len(run.tokens.get(key, [])) <= place


def test_a_row_that_is_no_number_behind_a_wrong_draft_is_not_looked_at(folder, truth):
    """It would be computed behind a token that the answer does not have."""
    ask = Submit("a", prompt(40), 20, Sampling(temperature=0.0))
    text = expected(truth, [ask])
    engine = drafting(folder, "adversarial", [ask], text, 5)
    settle, logits, verified = engine.runner.settle, engine.runner.model.logits, []

    def settled(flight):
        (row,) = flight.plan.rows
        verified[:] = [i for i in range(1, row.drafts + 1)
                       if row.draft[:i] != tuple(text["a", 0][row.position - 40 :][:i])]
        settle(flight)

    spoiled = []

    def sick(hidden):
        found = logits(hidden).clone()
        found[[i for i in verified if i < len(found)]] = math.nan
        spoiled.extend(verified)
        return found

    engine.runner.settle, engine.runner.model.logits = settled, sick
    assert answers(engine, ask) == text
    assert len(spoiled) > 5


@pytest.mark.parametrize("kind", [None, "hybrid", "both"])
def test_what_a_failed_request_computed_is_not_found_by_the_next_one(folder, truth, kind):
    """A fault that has passed must not live on in the cache."""
    ask = Submit("ask", prompt(200), 20, Sampling(seed=8))
    texts = expected(truth, [ask])
    engine = drafting(folder, kind, [ask], texts)
    model = engine.runner.model
    whole, model.embedding = model.embedding, model.embedding.clone()
    model.embedding[prompt(200)[100]] = math.nan
    run = Run(engine).put(ask).drain()
    assert run.failed["ask"].code == "model_failed" and run.outs == {}
    model.embedding = whole
    for turn, least in ((0, 0), (1, 150)):
        again = msgspec.structs.replace(ask, id=f"again{turn}")
        run = Run(engine).put(again).drain()
        assert run.tokens[again.id, 0] == texts["ask", 0]
        assert run.outs[again.id, 0][-1].cached >= least

"""`slipstream train-draft` from the first prompt to a folder that serves, on a tiny model."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from click.testing import CliRunner

import slipstream
from speculative.train import STAGES, shards
from speculative.train.command import train_draft
from speculative.train.optimise import train
from tests.training import Clock, target_folder

SMALL = ("--device", "cpu", "--dtype", "float32", "--shards", "2", "--per-shard", "30",
         "--max-len", "400", "--kv-bytes", "40000000", "--vocab", "220", "--rows", "2",
         "--length", "400", "--unroll", "3", "--steps", "6", "--measured", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return target_folder(tmp_path_factory.mktemp("command") / "model")


def run(model, out, *options: str):
    command = train_draft("tests.training:ShortAsker")
    return CliRunner().invoke(command, [str(model), "--out", str(out), *SMALL, *options],
                              catch_exceptions=False)


def test_all_stages_leave_a_head_and_its_card_and_run_again_for_nothing(model, tmp_path):
    done = run(model, tmp_path, "--stages", ",".join(STAGES))
    assert done.exit_code == 0, done.output
    for stage in STAGES:
        assert f"{stage}: " in done.output
    head = tmp_path / "head"
    config = json.loads((head / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["draft_vocab_size"] == 220
    card = json.loads((head / "card.json").read_text())
    assert card["steps"] == 6
    assert {one["drafts"] for one in card["served"]} == {"off", "eagle3", "suffix"}
    text = (head / "README.md").read_text()
    assert "tau(4)" in text and "Measured with the engine" in text
    state = (tmp_path / "state.safetensors").read_bytes()
    again = run(model, tmp_path)
    assert "all 2 shards are there" in again.output
    assert (tmp_path / "state.safetensors").read_bytes() == state


def test_steps_that_only_a_time_can_plan_are_refused_before_anything_is_made(model, tmp_path):
    with pytest.raises(ValueError, match="give --minutes"):
        run(model, tmp_path, "--steps", "auto")
    assert not list(tmp_path.iterdir())


def test_processes_fill_shards_of_their_own_and_the_rest_sees_all(model, tmp_path):
    second = run(model, tmp_path, "--stages", "generate", "--first-shard", "1")
    assert "generate: 1 shards" in second.output and "0 shards are missing" in second.output
    assert shards.numbers(tmp_path / "shards") == [1]
    assert "all 1 shards are there" in run(
        model, tmp_path, "--stages", "generate", "--first-shard", "1").output
    first = run(model, tmp_path, "--stages", "generate", "--shards", "1")
    assert "generate: 1 shards" in first.output
    seen = run(model, tmp_path, "--stages", "vocabulary,optimise", "--first-shard", "1")
    entries = [e for shard in shards.every(tmp_path / "shards") for e in shard.index.entries]
    assert sorted(e.number for e in entries) == list(range(60))
    assert f"optimise: {sum(not e.held_out for e in entries)} answers" in seen.output


def test_the_engine_is_measured_without_the_trainer_s_state(model, tmp_path):
    run(model, tmp_path)
    (tmp_path / "state.safetensors").unlink()
    head = (tmp_path / "head" / "model.safetensors").read_bytes()
    done = run(model, tmp_path, "--stages", "measure")
    assert "measure: eagle3" in done.output
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == head
    card = json.loads((tmp_path / "head" / "card.json").read_text())
    assert card["steps"] == 6 and len(card["served"]) >= 3
    with pytest.raises(ValueError, match="run the stage `optimise` first"):
        run(model, tmp_path, "--stages", "export")


def test_steps_that_time_decides_are_told_in_the_card(model, tmp_path, monkeypatch):
    run(model, tmp_path, "--stages", "generate,vocabulary", "--per-shard", "12")
    with monkeypatch.context() as patch:
        # 51 seconds, of which each step takes one.
        patch.setattr("speculative.train.command.time.monotonic", lambda: 0.0)
        patch.setattr("speculative.train.stages.train", partial(train, clock=Clock(1.0)))
        done = run(model, tmp_path, "--stages", "optimise", "--per-shard", "12",
                   "--steps", "auto", "--minutes", "0.85")
    assert "from step 0 of what time allows" in done.output
    planned = int(re.search(r"time for (\d+) steps", done.output)[1])
    assert 46 <= planned <= 51
    run(model, tmp_path, "--stages", "export", "--per-shard", "12", "--steps", "auto")
    text = (tmp_path / "head" / "README.md").read_text()
    assert f"{planned} steps, what the time allowed, of 2 rows" in text


def test_a_run_with_no_time_left_says_what_is_to_do(model, tmp_path, monkeypatch):
    clock = iter([0.0, 1e6])
    monkeypatch.setattr("speculative.train.command.time.monotonic", lambda: next(clock))
    done = run(model, tmp_path, "--stages", "generate,vocabulary", "--minutes", "0.1")
    assert done.exit_code == 0
    assert done.output == "generate: no time is left; run it again\n"
    assert not (tmp_path / "vocabulary.json").exists()


@pytest.mark.parametrize(("options", "sentence"), [
    (("--stages", "generate,trane"), "'trane' is no stage"),
    (("--minutes", "0"), "0 is not in the range"),
    (("--steps", "0"), "'0' is neither a number from 1 on nor `auto`"),
])
def test_a_wrong_option_is_one_sentence(model, tmp_path, options, sentence):
    done = CliRunner().invoke(
        train_draft("tests.training:ShortAsker"), [str(model), "--out", str(tmp_path), *options])
    assert done.exit_code == 2
    assert sentence in done.output


@pytest.mark.parametrize(("options", "sentence"), [
    (("--rows", "0"), "--rows is 0"),
    (("--micro", "-1"), "--micro is -1"),
    (("--first-shard", "2"), "--first-shard is 2, but the last of --shards 2 is 1"),
    (("--stages", "measure"), "run the stage `export` first"),
    (("--rate", "2"), "--rate is 2.0"),
    (("--stages", "vocabulary"), "run the stage `generate`"),
    (("--stages", "optimise"), "run the stage `vocabulary` first"),
])
def test_what_cannot_be_names_the_limit_or_the_next_step(model, tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(model, tmp_path, *options)


def test_the_command_is_slipstreams():
    shown = CliRunner().invoke(slipstream.cli, ["train-draft", "--help"])
    assert shown.exit_code == 0
    assert "Train an EAGLE-3 draft head" in shown.output

"""Wrong files of a draft say which tensor, both shapes and what to do; none of them runs code."""

from __future__ import annotations

import json

import pytest
import torch

from engine.model_config import BadCheckpoint
from engine.weights import BadWeights
from speculative import checkpoint
from speculative.served import _Eagle3
from tests.head_files import CPU, F64, TARGET, a_head, opened, target_tables, written


def wrong(tmp_path, words, error=BadWeights, dialect="specforge", **how):
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", dialect, shape, weights, kept, **how)
    with pytest.raises(error, match=words) as told:
        opened(folder)
    assert str(told.value).rstrip().endswith(".")
    return str(told.value)


@pytest.mark.parametrize("name, shape, words", [
    ("midlayer.self_attn.q_proj.weight", (64, 64), r"\(64, 64\).*need \(64, 128\)"),
    ("midlayer.mlp.up_proj.weight", (97, 64), r"\(97, 64\).*need \(96, 64\)"),
    ("fc.weight", (64, 128), r"\(64, 128\).*need \(64, 192\).*reads 3 layers.*\[2, 4, 5\]"),
    ("norm.weight", (63,), r"\(63,\).*need \(64,\)"),
    ("lm_head.weight", (199, 64), r"\(199, 64\).*need \(200, 64\)"),
    ("embed_tokens.weight", (259, 32), r"\(259, 32\).*need \(259, 64\)"),
])
def test_a_tensor_of_another_shape_is_named_with_both(tmp_path, name, shape, words):
    told = wrong(tmp_path, words, tensors={name: torch.zeros(shape)})
    assert told.startswith(name) and "model.safetensors" in told


def test_missing_and_left_over_tensors_are_named(tmp_path):
    wrong(tmp_path, r"needs layers.0.mlp.down_proj.weight of shape \(64, 96\); its files have none",
          without=("midlayer.mlp.down_proj.weight",))
    wrong(tmp_path, r"has layers.1.mlp.up_proj.weight of shape \(2, 2\), which this draft does not",
          tensors={"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)})


def test_what_belongs_to_the_target_is_left_aside(tmp_path):
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "speculators", shape, weights, kept, tensors={
        "verifier_lm_head.weight": torch.zeros(3, 3), "verifier_norm.weight": torch.zeros(3),
        "rotary_emb.inv_freq": torch.zeros(8),
    })
    opened(folder)


def test_the_same_tensor_under_two_names_is_refused(tmp_path):
    twice = {"layers.0.mlp.up_proj.weight": torch.zeros(96, 64)}
    wrong(tmp_path, "is there again as", tensors=twice)


@pytest.mark.parametrize("change, words", [
    (lambda d2t: d2t[:-1].clone(), r"d2t has the shape \(199,\).*\(200,\)"),
    (lambda d2t: d2t + 100, "must rise and lie within the model's 0 to 258"),
    (lambda d2t: d2t - 300, "must rise and lie within"),
    (lambda d2t: torch.zeros_like(d2t).index_fill(0, torch.tensor([7]), 5), "must rise"),
])
def test_a_wrong_d2t_is_refused(tmp_path, change, words):
    _, _, kept = a_head()
    offsets = kept - torch.arange(200)
    wrong(tmp_path, words, tensors={"d2t": change(offsets)})


def test_d2t_and_t2d_must_say_the_same(tmp_path):
    _, _, kept = a_head()
    flags = torch.zeros(259, dtype=torch.bool)
    flags[kept] = True
    more, other = flags.clone(), flags.clone()
    more[int((~flags).nonzero()[0])] = True
    other[int(kept[3])], other[int((~flags).nonzero()[0])] = False, True
    wrong(tmp_path, "t2d keeps 201 tokens, d2t 200", tensors={"t2d": more})
    wrong(tmp_path, "not the same ones", tensors={"t2d": other})
    wrong(tmp_path, r"t2d has the shape \(258,\)", tensors={"t2d": flags[:258].clone()})
    wrong(tmp_path, r"no d2t of shape \(200,\)", without=("d2t", "t2d"))


def test_a_whole_vocabulary_needs_no_d2t(tmp_path):
    shape, weights, kept = a_head(draft_vocab=259)
    assert kept is None
    assert opened(written(tmp_path / "x", "speculators", shape, weights, None)).head.kept is None
    folder = written(tmp_path / "y", "speculators", shape, weights, torch.arange(259))
    assert opened(folder).head.kept is None


def test_quantised_tensors_are_refused(tmp_path):
    wrong(tmp_path, "stored as U8", tensors={"fc.weight": torch.zeros(64, 192, dtype=torch.uint8)})
    wrong(tmp_path, "stored as torch.int64; weights are floats",
          tensors={"fc.weight": torch.zeros(64, 192, dtype=torch.int64)})


# ---- files -------------------------------------------------------------------------------------


def test_folders_without_what_is_needed(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"no draft .*Give a folder"):
        opened(tmp_path / "nowhere" / "at" / "all")
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "specforge", shape, weights, kept)
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(BadCheckpoint, match=r"no config.json"):
        opened(folder)
    for text, words in (("{", "not valid JSON"), ("[]", "not a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(BadCheckpoint, match=words):
            opened(folder)
    (folder / "other.json").rename(folder / "config.json")
    whole = (folder / "model.safetensors").read_bytes()
    for part in (b"", whole[:20], whole[: len(whole) // 2]):
        (folder / "model.safetensors").write_bytes(part)
        with pytest.raises(BadWeights, match="not a sound safetensors file"):
            opened(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"no .safetensors file and no pytorch_model.bin"):
        opened(folder)


def test_shards_are_read_together(tmp_path):
    from safetensors.torch import load_file, save_file

    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "specforge", shape, weights, kept)
    single = opened(folder).head
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for i in (0, 1):
        save_file({name: tensors[name] for name in names[i::2]},
                  folder / f"model-{i + 1:05d}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({}))
    sharded = opened(folder).head
    state = torch.randn(2, 64, dtype=torch.float64)
    assert torch.equal(single.read(state)[1], sharded.read(state)[1])


class Runs:
    """What a pickle could do to whoever loads it carelessly."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path):
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "original", shape, weights, kept)
    opened(folder)
    torch.save({"fc.weight": weights["fc.weight"], "more": Runs()}, folder / "pytorch_model.bin")
    with pytest.raises(SystemExit):  # so much for the attack: it works on a careless reader
        torch.load(folder / "pytorch_model.bin", weights_only=False)
    with pytest.raises(BadWeights, match=r"cannot run code.*Convert it to safetensors"):
        opened(folder)


@pytest.mark.parametrize("content", [b"", b"no pickle at all", b"\x80\x04."])
def test_a_damaged_pickle_is_refused(tmp_path, content):
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "original", shape, weights, kept)
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(BadWeights, match="damaged, or holds more than tensors"):
        opened(folder)
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(BadWeights, match="no mapping of names to tensors"):
        opened(folder)


@pytest.mark.parametrize("dialect", ["specforge", "original"])
def test_a_blank_head_has_the_shapes_of_its_files_and_no_weight_is_read(
    tmp_path, monkeypatch, dialect
):
    folder = written(tmp_path, dialect, *a_head())
    whole = opened(folder).head
    monkeypatch.setattr(checkpoint, "_read", lambda *given: pytest.fail("a weight was read"))
    blank = opened(folder, blank=True).head
    assert blank.config == whole.config and torch.equal(blank.kept, whole.kept)
    for find in (lambda one: one.fc.weight, lambda one: one.norm, lambda one: one.lm_head.weight,
                 lambda one: one.layers[0].mix.qkv.weight, lambda one: one.layers[0].down.weight,
                 lambda one: one.embedding):
        assert find(blank).shape == find(whole).shape
        assert find(blank).dtype == find(whole).dtype


def test_a_blank_head_that_cannot_be_opened_is_left_to_who_loads_it(tmp_path, caplog):
    """Whoever asks for a blank one is beside the start, which says the same again."""
    maker = _Eagle3(str(tmp_path / "none"), asked=False)
    embedding, _ = target_tables()
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    given = TARGET, weights, 4096, F64, CPU
    with pytest.raises(BadCheckpoint):
        maker.open(*given, blank=True)
    assert not caplog.records
    assert maker.open(*given) is None and len(caplog.records) == 1


def test_what_was_read_does_not_hang_on_the_file(tmp_path):
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "specforge", shape, weights, kept)
    head = opened(folder).head
    state = torch.randn(2, 64, dtype=torch.float64)
    before = head.read(state)[1]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 100_000)
    assert torch.equal(before, head.read(state)[1])

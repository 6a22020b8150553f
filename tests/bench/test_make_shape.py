"""A random checkpoint of a given shape opens, runs and repeats.  Measures nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.bench import parameters
from engine.checkpoint import open_checkpoint
from engine.messages import Sampling, Submit
from tests.bench.make_shape import Shape, tensors_of, write_shape
from tests.driver import answers, make
from tests.tiny import write_llama
from tests.tiny_gguf import VOCAB, write_gguf

ROOT = Path(__file__).resolve().parents[2]
MINI = Shape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, max_len=256)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(write_llama(folder / "model", vocab=VOCAB), folder / "tiny.gguf")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_miniature_opens_with_the_ggufs_tokenizer_and_answers_in_lively_text(
    gguf, tmp_path, shards
):
    read = write_shape(tmp_path / "mini", gguf, MINI, shards=shards)
    opened, origin = open_checkpoint(str(tmp_path / "mini")), open_checkpoint(str(gguf))
    assert opened.tokenizer_json == origin.tokenizer_json
    assert opened.chat_template == origin.chat_template
    assert opened.stop_ids and set(opened.stop_ids) <= set(origin.stop_ids)
    assert len(opened.files) == shards
    norms = sum(shape[0] for _, shape, _, _ in tensors_of(MINI, VOCAB) if len(shape) == 1)
    assert read == 2 * (parameters(opened.config) + norms)
    engine = make(tmp_path / "mini", blocks=32)
    asked = Submit("a", [65, 66, 67, 68], 24, Sampling(temperature=0.0))
    (tokens,) = answers(engine, asked).values()
    engine.close()
    assert len(tokens) == 24 and len(set(tokens)) > 8


def test_the_same_seed_writes_the_same_bytes_and_another_one_does_not(gguf, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_shape(tmp_path / name, gguf, MINI, shards=1, seed=seed)
    first, again, other = (
        (tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in "abc")
    assert first == again != other
    tensors = load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")
    assert not tensors["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])
    for name, _, mean, spread in tensors_of(MINI, VOCAB):
        assert abs(float(tensors[name].float().mean()) - mean) < 4 * spread / 8, name
        assert float(tensors[name].float().std()) == pytest.approx(spread, rel=0.3), name


def test_a_large_tensor_is_drawn_in_pieces(gguf, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.bench.make_shape.ROWS", 1000)  # not a divisor of any tensor's size
    write_shape(tmp_path / "pieces", gguf, MINI, shards=1)
    tensors = load_file(tmp_path / "pieces" / "model-00001-of-00001.safetensors")
    embedding = tensors["model.embed_tokens.weight"].flatten().float()
    assert not embedding[:1000].equal(embedding[1000:2000])
    assert all(part.std() > 0.2 for part in embedding.split(1000))


def test_an_8b_token_reads_14_4_gb():
    tensors = tensors_of(Shape(), 49152)
    sizes = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape, _, _ in tensors}
    read = 2 * (sum(sizes.values()) - sizes["model.embed_tokens.weight"])
    assert round(read / 1e9, 1) == 14.4


def test_the_command_writes_the_shape_that_it_is_given(gguf, tmp_path):
    options = "--layers 1 --hidden 32 --intermediate 48 --heads 2 --kv-heads 1 --head-dim 16 --tied"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.make_shape", str(tmp_path / "m"), "--tokenizer",
         str(gguf), "--shards", "1", *options.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=50,
    )
    assert done.returncode == 0, done.stderr
    config = open_checkpoint(str(tmp_path / "m")).config
    assert (config.layers, config.hidden, config.kv_heads, config.tied) == (1, 32, 1, True)

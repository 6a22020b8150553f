"""Loading tensors: values, order, names, types and damage, for both formats.  Runs no model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.checkpoint import BadCheckpoint, open_checkpoint
from engine.models.llama import Llama
from engine.weights import BadWeights, load
from tests.tiny import write_llama, write_weights
from tests.tiny_gguf import VOCAB, write_gguf


def decodable(kind: Kind) -> bool:
    """Whether the gguf library at hand can widen the type."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(str(path))
    return load(checkpoint, Llama.expected(checkpoint.config), dtype)


def refusal(path: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(BadWeights) as caught:
        loaded(path, dtype)
    return str(caught.value)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The folder with tensors replaced, added or (None) removed; `__` stands for a dot."""
    values = {**load_file(folder / "model.safetensors"),
              **{name.replace("__", "."): value for name, value in tensors.items()}}
    write_weights(folder, {name: value for name, value in values.items() if value is not None})
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine torch's threads wait for each other far longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stored", ["float32", "float64", "bfloat16"])
def test_a_folders_tensors_arrive_as_stored_rounded_once(tmp_path, stored, dtype):
    folder = write_llama(tmp_path, dtype=stored, tied=False, attention_bias=True, mlp_bias=True)
    raw = load_file(folder / "model.safetensors")
    tensors = loaded(folder, dtype)
    assert same(tensors, {name: raw[name].to(dtype) for name in tensors})
    assert len(tensors) == len(raw)
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_loaded_tensors_outlive_their_file(tmp_path):
    folder = write_llama(tmp_path)
    before = loaded(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
    write_llama(folder)
    assert same(before, loaded(folder))


def test_shards_give_the_same_tensors_as_one_file(tmp_path):
    whole = loaded(write_llama(tmp_path / "whole"))
    assert same(whole, loaded(write_llama(tmp_path / "shards", shards=3)))


@pytest.mark.parametrize("shape", [
    {}, {"tied": False, "attention_bias": True, "mlp_bias": True}, {"head_dim": 24, "kv_heads": 1},
    {"kv_heads": 4},
])
def test_a_gguf_gives_the_same_tensors_as_the_folder_it_was_made_from(tmp_path, shape):
    folder = write_llama(tmp_path / "hf", vocab=VOCAB, **shape)
    assert same(loaded(write_gguf(folder, tmp_path / "m.gguf")), loaded(folder))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_1])
def test_a_quantised_gguf_stays_close_to_its_folder(tmp_path, kind):
    folder = write_llama(tmp_path / "hf", vocab=VOCAB)
    near, exact = loaded(write_gguf(folder, tmp_path / "m.gguf", kind=kind)), loaded(folder)
    for name, tensor in exact.items():
        assert (near[name] - tensor).abs().max() < 0.2 * tensor.abs().max(), name


@pytest.mark.parametrize("kind", [kind for kind in Kind if decodable(kind)])
def test_every_block_type_is_widened_as_the_gguf_library_widens_it(tmp_path, kind):
    folder = write_llama(tmp_path / "hf", layers=1, hidden=256, intermediate=512, vocab=VOCAB)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    noise = np.random.default_rng(kind.value)
    blocks = noise.integers(0, 256, (256, 512 // weights * size), dtype=np.uint8)
    raw = {"blk.0.ffn_down.weight": (blocks, kind)}
    if kind in (Kind.F32, Kind.F16):  # the writer takes these as numbers
        numbers = blocks.view(np.float32 if kind == Kind.F32 else np.float16)
        raw = {"blk.0.ffn_down.weight": (numbers, kind)}
    with np.errstate(all="ignore"):
        whole = torch.from_numpy(np.array(gguf.dequantize(blocks, kind)))
    tensors = loaded(write_gguf(folder, tmp_path / "m.gguf", raw=raw))
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert torch.allclose(down, whole.view(256, 512), rtol=0, atol=0, equal_nan=True)


def test_a_tensor_longer_than_a_chunk_is_whole(tmp_path, monkeypatch):
    folder = write_llama(tmp_path / "hf", vocab=VOCAB)
    path = write_gguf(folder, tmp_path / "m.gguf", kind=Kind.Q8_0)
    whole = loaded(path)
    monkeypatch.setattr("engine.weights.CHUNK", 96)  # three blocks: no tensor is a multiple of it
    assert same(whole, loaded(path))


def test_progress_counts_bytes_up_to_the_whole(tmp_path):
    folder = write_llama(tmp_path)
    checkpoint = open_checkpoint(str(folder))
    seen: list[tuple[int, int]] = []
    load(checkpoint, Llama.expected(checkpoint.config), torch.float32,
         lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) == len(load_file(folder / "model.safetensors"))


# ---- what does not fit ---------------------------------------------------------------------------


def test_float16_is_refused_with_the_reason(tmp_path):
    message = refusal(write_llama(tmp_path), torch.float16)
    assert "65,504" in message and "bfloat16" in message


def test_a_missing_tensor_is_named_with_its_shape(tmp_path):
    message = refusal(changed(write_llama(tmp_path), model__norm__weight=None))
    assert "model.norm.weight" in message and "(64,)" in message


@pytest.mark.parametrize("shape", [(63,), (64, 1), ()])
def test_a_tensor_of_another_shape_is_named_with_both(tmp_path, shape):
    message = refusal(changed(write_llama(tmp_path), model__norm__weight=torch.zeros(shape)))
    assert "model.norm.weight" in message and str(shape) in message and "(64,)" in message


def test_a_tensor_that_the_model_does_not_use_is_named(tmp_path):
    message = refusal(changed(write_llama(tmp_path), model__layers__9__gate__weight=torch.zeros(3)))
    assert "model.layers.9.gate.weight" in message and "(3,)" in message


def test_tables_that_follow_from_the_config_are_ignored(tmp_path):
    plain = loaded(write_llama(tmp_path))
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    changed(tmp_path, **{name: torch.zeros(8)}, lm_head__weight=torch.zeros(259, 64))
    assert same(loaded(tmp_path), plain)


def test_an_untied_model_needs_its_head(tmp_path):
    folder = changed(write_llama(tmp_path, tied=False), lm_head__weight=None)
    assert "lm_head.weight" in refusal(folder)


def test_a_tensor_in_two_shards_is_refused_naming_both(tmp_path):
    folder = write_llama(tmp_path, shards=2)
    first, second = sorted(folder.glob("model-*.safetensors"))
    both = load_file(first)
    save_file({**both, **load_file(second)}, second)
    message = refusal(folder)
    assert first.name in message and second.name in message


def test_integer_and_eight_bit_tensors_are_refused_as_quantised(tmp_path):
    assert "I8" in refusal(changed(
        write_llama(tmp_path), model__norm__weight=torch.zeros(64, dtype=torch.int8)))
    assert "F8_E4M3" in refusal(changed(
        write_llama(tmp_path), model__norm__weight=torch.zeros(64).to(torch.float8_e4m3fn)))


def test_gguf_tensors_of_another_model_or_kind_are_refused_by_name(tmp_path):
    folder = write_llama(tmp_path / "hf", vocab=VOCAB)
    path = write_gguf(folder, tmp_path / "a.gguf", tables={"blk.0.ssm_a.weight": np.zeros(4)})
    assert "blk.0.ssm_a.weight" in refusal(path)
    ints = {"output_norm.weight": (np.zeros(64, np.int32), Kind.I32)}
    assert "I32" in refusal(write_gguf(folder, tmp_path / "b.gguf", raw=ints))
    fewer = write_gguf(folder, tmp_path / "c.gguf", keys={"llama.block_count": 3})
    assert "model.layers.2" in refusal(fewer)


def test_a_file_cut_after_it_was_opened_is_our_error(tmp_path):
    for path in (write_llama(tmp_path / "hf", vocab=VOCAB), tmp_path / "m.gguf"):
        if path.suffix:
            write_gguf(write_llama(tmp_path / "source", vocab=VOCAB), path)
        checkpoint = open_checkpoint(str(path))
        file = checkpoint.files[0]
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(BadCheckpoint, match=file.name):
            load(checkpoint, Llama.expected(checkpoint.config), torch.float32)


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_damage_anywhere_is_our_error_or_a_whole_load(tmp_path, kind):
    folder = write_llama(tmp_path / "hf", layers=1, hidden=32, heads=2, kv_heads=1,
                         intermediate=32, vocab=VOCAB)
    target, path = folder, folder / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    if kind == "gguf":
        target = path = write_gguf(folder, tmp_path / "m.gguf", kind=Kind.Q8_0)
    whole, chance, refused = path.read_bytes(), random.Random(3), 0
    names = set(Llama.expected(open_checkpoint(str(target)).config))
    for turn in range(200):
        damaged = bytearray(whole)
        if turn % 4 == 0:
            del damaged[chance.randrange(len(whole)):]
        else:  # every second one in the header, the others anywhere
            limit = header if turn % 2 and kind == "safetensors" else len(whole)
            damaged[chance.randrange(limit)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            assert set(loaded(target, torch.bfloat16)) >= names - {"lm_head.weight"}
        except BadCheckpoint:
            refused += 1
    assert 50 <= refused < 200


def test_code_in_the_folder_is_never_opened(tmp_path, monkeypatch):
    folder = write_llama(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise RuntimeError('run')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    opened: list[str] | None = []

    def note(event: str, args: tuple[object, ...]) -> None:  # hooks cannot be removed: it goes deaf
        if opened is not None and event in ("open", "import", "exec"):
            opened.append(str(args[0]))

    sys.addaudithook(note)
    loaded(folder)
    heard, opened = opened, None
    assert any(path.endswith("config.json") for path in heard)
    assert not [path for path in heard if "evil" in path or path.endswith(".bin")]


# ---- the real model ------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_loads_whole_and_finite():
    checkpoint = open_checkpoint("smollm2")
    tensors = load(checkpoint, Llama.expected(checkpoint.config), torch.bfloat16)
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert len(tensors) == 272
    assert all(tensor.isfinite().all() for tensor in tensors.values())

"""Write a random Llama checkpoint of a real model's shape, for measuring.  Loads and runs nothing.

    python -m tests.bench.make_shape FOLDER --tokenizer SmolLM2-135M-Instruct.gguf

gives Llama-3.1-8B's layers with SmolLM2's tokenizer and 49,152 rows: a token reads 14.4 GB in bf16.
The values are drawn on the GPU where there is one (other values than a CPU draws, the same on every
run) and go to the files straight from there: the host holds one tensor a shard.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.gguf_file import GgufFile, read_gguf
from engine.gguf_tokenizer import tokenizer_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ITEM = 2  # bytes of a bf16 value
ROWS = 1 << 26  # values drawn at once: 256 MB in fp32

Tensors = list[tuple[str, tuple[int, ...], float, float]]  # name, shape, mean, standard deviation


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's dimensions; the defaults are those of Llama-3.1-8B but for the vocabulary."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    max_len: int = 8192
    rope_theta: float = 500_000.0
    tied: bool = False


def write_shape(
    folder: Path, tokenizer: Path, shape: Shape, *, shards: int = 4, seed: int = 0
) -> int:
    """Write the checkpoint into `folder`; return the bytes of its weights that one token reads.

    Its tokenizer, vocabulary, chat template and control tokens are those of the GGUF `tokenizer`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    gguf = read_gguf(tokenizer)
    vocab = len(gguf.values["tokenizer.ggml.tokens"])
    _describe(folder, gguf, shape, vocab)
    tensors = tensors_of(shape, vocab)
    parts = [tensors[len(tensors) * i // shards : len(tensors) * (i + 1) // shards]
             for i in range(shards)]
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    with ThreadPoolExecutor(shards) as pool:
        written = [pool.submit(_write, folder / name, part, seed)
                   for name, part in zip(names, parts, strict=True)]
        total = sum(one.result() for one in written)
    where = {tensor[0]: name for name, part in zip(names, parts, strict=True) for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total if shape.tied else total - vocab * shape.hidden * ITEM


def tensors_of(shape: Shape, vocab: int) -> Tensors:
    """Every tensor in the order of its use.

    Matrices keep the spread of their input, so that logits spread by 2-3 and greedy text is lively;
    the last norm's scale has both signs, or a tied head would repeat the token just read for ever.
    """
    spread = 2.5 / math.sqrt(shape.hidden)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = (
        ("self_attn.q_proj", queries, shape.hidden), ("self_attn.k_proj", keys, shape.hidden),
        ("self_attn.v_proj", keys, shape.hidden), ("self_attn.o_proj", shape.hidden, queries),
        ("mlp.gate_proj", shape.intermediate, shape.hidden),
        ("mlp.up_proj", shape.intermediate, shape.hidden),
        ("mlp.down_proj", shape.hidden, shape.intermediate),
    )
    out: Tensors = [("model.embed_tokens.weight", (vocab, shape.hidden), 0.0, spread)]
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out.append((f"{layer}{norm}.weight", (shape.hidden,), 1.0, 0.1))
        for name, rows, columns in matrices:
            out.append((f"{layer}{name}.weight", (rows, columns), 0.0, 1.5 / math.sqrt(columns)))
    out.append(("model.norm.weight", (shape.hidden,), 0.0, 1.0))
    if not shape.tied:
        out.append(("lm_head.weight", (vocab, shape.hidden), 0.0, spread))
    return out


def _describe(folder: Path, gguf: GgufFile, shape: Shape, vocab: int) -> None:
    values = gguf.values
    ends = {name: values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids = {f"{name}_token_id": id for name, id in ends.items()}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_len, "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": shape.tied,
        "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16",
        "torch_dtype": "bfloat16", **ids,
    }
    words = values["tokenizer.ggml.tokens"]
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_len,
        "chat_template": values.get("tokenizer.chat_template"), "add_bos_token": False,
        **{f"{name}_token": words[id] for name, id in ends.items() if id is not None},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer.json").write_text(tokenizer_json(gguf))


def _write(path: Path, tensors: Tensors, seed: int) -> int:
    """One safetensors file: u64 length, JSON header, the values; return how many bytes of those."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _, _ in tensors:
        start, end = end, end + math.prod(shape) * ITEM
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, mean, spread in tensors:
            for values in _draw(zlib.crc32(f"{seed} {name}".encode()), shape, mean, spread):
                file.write(memoryview(values.cpu().view(torch.uint8).numpy()))
    return end


def _draw(seed: int, shape: Sequence[int], mean: float, spread: float) -> Iterator[torch.Tensor]:
    """A tensor's values in bf16, flat, piece by piece."""
    noise = torch.Generator(DEVICE).manual_seed(seed)
    count = math.prod(shape)
    for start in range(0, count, ROWS):
        piece = torch.empty(min(ROWS, count - start), device=DEVICE)
        yield piece.normal_(mean, spread, generator=noise).to(torch.bfloat16)


def main() -> int:
    """The command: see the head of this file."""
    parser = argparse.ArgumentParser(prog="tests.bench.make_shape", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "max_len"):
        default = Shape.__dataclass_fields__[name].default
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    given = vars(parser.parse_args())
    folder, tokenizer = given.pop("folder"), given.pop("tokenizer")
    shards, seed = given.pop("shards"), given.pop("seed")
    start = time.perf_counter()
    read = write_shape(folder, tokenizer, Shape(**given), shards=shards, seed=seed)
    took = time.perf_counter() - start
    print(f"{folder}: a token reads {read / 1e9:.2f} GB; written in {took:.1f} s on {DEVICE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

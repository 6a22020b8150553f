"""Write a tiny Llama folder again as a GGUF, with the `gguf` library.  Uses none of our reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.scripted import BOS, EOS, byte_tokenizer_json
from tests.tiny import CHATML

MERGES = ["t h", "th e", "Ġ the"]  # their results are the last tokens of a GGUF's vocabulary
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VOCAB = 259 + len(MERGES)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    pre: str = "smollm",
    keys: Mapping[str, object] | None = None,
    tables: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the folder's model (vocab=VOCAB) to `path`: matrices in `kind`, vectors in F32.

    `raw` replaces tensors by given blocks, by GGUF name; `keys` adds or replaces metadata; `tables`
    adds F32 tensors.  Returns `path`.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, config, head_dim, pre, dict(keys or {}))
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours = gguf_name(name)
        if ours in (raw or {}):
            blocks, block_kind = raw[ours]
            writer.add_tensor(ours, blocks, raw_dtype=block_kind)
            continue
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        values = tensor.float().numpy()
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(ours, values)
        else:
            writer.add_tensor(ours, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (tables or {}).items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """ggml's name of a Hugging Face tensor."""
    stem, _, ending = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{ending}"


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """ggml's row order of q and k: row 2i+j of a head is Hugging Face's row j * head_dim/2 + i."""
    dim = rows.shape[0] // heads
    order = [
        head * dim + j * (dim // 2) + i
        for head in range(heads) for i in range(dim // 2) for j in range(2)
    ]
    return rows[order]


def _describe(
    writer: gguf.GGUFWriter, config: dict, head_dim: int, pre: str, keys: dict[str, object]
) -> None:
    letters = json.loads(byte_tokenizer_json())["model"]["vocab"]
    tokens = [*sorted(letters, key=letters.__getitem__), "<|endoftext|>", "<|im_start|>",
              "<|im_end|>", *(merge.replace(" ", "") for merge in MERGES)]
    types = [1] * 256 + [3] * 3 + [1] * len(MERGES)
    values: dict[str, object] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
    }
    for key, value in {**values, **keys}.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)

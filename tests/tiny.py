"""Write tiny random Llama checkpoints as Hugging Face folders.  Loads and runs nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.scripted import BOS, EOS, byte_tokenizer_json

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_llama(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 128,
    vocab: int = 259,
    tied: bool = True,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, object] | None = None,
    max_len: int = 512,
    seed: int = 0,
    shards: int = 1,
    dtype: str = "float32",
    attention_bias: bool = False,
    mlp_bias: bool = False,
) -> Path:
    """Write config, weights and byte tokenizer into `folder`; the same seed gives the same values.

    Logits spread with a standard deviation of 2-3, so greedy text is lively.  Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate, "max_position_embeddings": max_len,
        "rope_theta": rope_theta, "rope_scaling": rope_scaling, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": tied,
        "attention_bias": attention_bias, "mlp_bias": mlp_bias,
        "bos_token_id": BOS, "eos_token_id": EOS, "dtype": dtype,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    tensors = llama_tensors(
        layers=layers, hidden=hidden, q_rows=heads * (head_dim or hidden // heads),
        kv_rows=kv_heads * (head_dim or hidden // heads), intermediate=intermediate,
        vocab=vocab, tied=tied, seed=seed, attention_bias=attention_bias, mlp_bias=mlp_bias,
    )
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[dtype]
    write_weights(folder, {name: value.to(kind) for name, value in tensors.items()}, shards)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML,
        "model_max_length": max_len,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS, "eos_token_id": EOS})
    )
    return folder


def llama_tensors(
    *, layers: int, hidden: int, q_rows: int, kv_rows: int, intermediate: int, vocab: int,
    tied: bool, seed: int, attention_bias: bool = False, mlp_bias: bool = False,
) -> dict[str, torch.Tensor]:
    """Random fp64 tensors under Hugging Face names."""
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64) * std

    tensors: dict[str, torch.Tensor] = {}
    # The last norm's scale has both signs: with a tied head, a scale of one would make the token
    # that was just read the likeliest, and greedy text would repeat it for ever.
    tensors["model.embed_tokens.weight"] = draw(vocab, hidden, std=2.5 / math.sqrt(hidden))
    tensors["model.norm.weight"] = draw(hidden, std=1.0)
    if not tied:
        tensors["lm_head.weight"] = draw(vocab, hidden, std=2.5 / math.sqrt(hidden))
    linears = {
        "self_attn.q_proj": (q_rows, hidden, attention_bias),
        "self_attn.k_proj": (kv_rows, hidden, attention_bias),
        "self_attn.v_proj": (kv_rows, hidden, attention_bias),
        "self_attn.o_proj": (hidden, q_rows, attention_bias),
        "mlp.gate_proj": (intermediate, hidden, mlp_bias),
        "mlp.up_proj": (intermediate, hidden, mlp_bias),
        "mlp.down_proj": (hidden, intermediate, mlp_bias),
    }
    for number in range(layers):
        layer = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = 1.0 + draw(hidden, std=0.1)
        for name, (rows, columns, bias) in linears.items():
            tensors[f"{layer}{name}.weight"] = draw(rows, columns, std=1.5 / math.sqrt(columns))
            if bias:
                tensors[f"{layer}{name}.bias"] = draw(rows, std=0.3)
    return tensors


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write `tensors` as model.safetensors, or as `shards` files and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

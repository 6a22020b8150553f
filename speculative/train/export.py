"""Write a trained head as a folder that vLLM, SGLang and we load.  Trains and measures nothing.

SpecForge's dialect (speculative/dialects.py): `LlamaForCausalLMEagle3`, tensors under `midlayer`,
layer ids that name outputs.  Readers that ignore the nested ids fall back to the same layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from engine.model_config import ModelConfig, RopeScaling
from speculative.head import HeadConfig
from speculative.rotary import Yarn
from speculative.train import shards
from speculative.train.vocabulary import Kept, tables


def export(
    folder: Path, weights: Mapping[str, Tensor], config: HeadConfig, kept: Kept,
    target: ModelConfig, dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Write config.json and model.safetensors; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    d2t, t2d = tables(kept)
    tensors = {
        name.replace("layers.0.", "midlayer."): value.detach().cpu().to(dtype).contiguous()
        for name, value in weights.items()
    }
    raw = to_bytes({**tensors, "d2t": d2t, "t2d": t2d}, {"format": "pt"})
    text = json.dumps(described(config, target, dtype), indent=2).encode() + b"\n"
    shards.replace(folder / "model.safetensors", raw)
    shards.replace(folder / "config.json", text)
    return len(raw) + len(text)


def described(config: HeadConfig, target: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "hidden_size": config.hidden, "target_hidden_size": config.target_hidden,
        "intermediate_size": config.intermediate, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "hidden_act": "silu", "rms_norm_eps": config.eps,
        "max_position_embeddings": target.max_len, "rope_theta": config.rope_theta,
        "rope_scaling": _scaling(config.rope_scaling), "vocab_size": config.vocab,
        "draft_vocab_size": config.draft_vocab, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "fc_norm": config.fc_norm, "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
            "use_aux_hidden_state": True,
        },
    }  # fmt: skip


def _scaling(scaling: RopeScaling | Yarn | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    assert isinstance(scaling, RopeScaling), "a head is trained with its target's own scaling"
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_len,
        }
    return found

"""Write one head down in every published dialect.  And load it for a made-up target.

What `written` returns is a folder; all of them hold the same weights, so that all must load alike.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model_config import ModelConfig
from speculative.checkpoint import open_head
from speculative.eagle3 import Eagle3
from speculative.head import HeadConfig
from tests.heads import F64, config, d2t_of, kept_of, weights_of

RENAMED = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}


def layer_config(shape: HeadConfig) -> dict:
    """The part of a config that describes the decoder layer."""
    return {
        "model_type": "llama", "hidden_size": shape.hidden, "hidden_act": "silu",
        "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "num_hidden_layers": shape.layers, "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta, "max_position_embeddings": 2048,
        "vocab_size": shape.vocab, "tie_word_embeddings": False,
    }  # fmt: skip


def midlayer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}


def vocabulary(kept: Tensor | None, vocab: int) -> dict[str, Tensor]:
    if kept is None:
        return {}
    flags = torch.zeros(vocab, dtype=torch.bool)
    flags[kept] = True
    return {"d2t": d2t_of(kept), "t2d": flags}


def original(shape, weights, kept):
    config = layer_config(shape) | {
        "architectures": ["LlamaForCausalLM"], "draft_vocab_size": shape.draft_vocab,
    }
    return config, midlayer(weights) | vocabulary(kept, shape.vocab)


def specforge(shape, weights, kept):
    config = layer_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target_hidden, "norm_output": shape.norm_output,
        "fc_norm": shape.fc_norm,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in shape.taps],
            "use_aux_hidden_state": True,
        },
    }
    return config, midlayer(weights) | vocabulary(kept, shape.vocab)


def legacy(shape, weights, kept):
    """SpecForge with the names that EAGLE-3.1's norms had at first."""
    config, tensors = specforge(shape, weights, kept)
    config["use_aux_norm"] = config.pop("fc_norm")
    for new, old in RENAMED.items():
        if new + ".weight" in tensors:
            tensors[old + ".weight"] = tensors.pop(new + ".weight")
    return config, tensors


def speculators(shape, weights, kept):
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(shape), "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target_hidden,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc, "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output, "eagle_aux_hidden_state_layer_ids": list(shape.taps),
    }
    return config, dict(weights) | vocabulary(kept, shape.vocab)


def modelopt(shape, weights, kept):
    config = layer_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target_hidden, "norm_output": shape.norm_output,
        "rope_scaling": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in shape.taps],
            "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        },
    }
    tensors = dict(weights) | vocabulary(kept, shape.vocab)
    tensors.pop("t2d", None)
    return config, tensors


def mla(shape, weights, kept):
    """Drafts of Kimi: no d2t, the target's embedding."""
    latent, config = shape.latent, layer_config(shape)
    del config["head_dim"], config["num_key_value_heads"]
    config |= {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
        "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.key_rank,
        "qk_nope_head_dim": latent.plain, "qk_rope_head_dim": latent.turned,
        "v_head_dim": latent.value, "norm_output": shape.norm_output, "fc_norm": shape.fc_norm,
        "draft_vocab_size": shape.draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [b - 1 for b in shape.taps]},
    }
    return config, midlayer(weights) | vocabulary(kept, shape.vocab)


def parallel(shape, weights, kept):
    config, tensors = speculators(shape, weights, kept)
    return config, tensors | {"mask_hidden": torch.zeros(1, shape.fused)}


DIALECTS = {
    "original": original, "specforge": specforge, "legacy": legacy, "speculators": speculators,
    "modelopt": modelopt, "parallel": parallel, "mla": mla,
}


def written(
    folder: Path, dialect: str, shape: HeadConfig, weights: dict[str, Tensor],
    kept: Tensor | None, *, config: dict | None = None, tensors: dict | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write the head; `config` and `tensors` are laid over, None values and `without` left out."""
    fields, values = DIALECTS[dialect](shape, weights, kept)
    fields |= config or {}
    values = {name: value for name, value in (values | (tensors or {})).items()
              if name not in without}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if dialect == "original":
        torch.save(values, folder / "pytorch_model.bin")
    else:
        kind = {name: value.contiguous() for name, value in values.items()}
        save_file(kind, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- a target that is not there --------------------------------------------------------------

CPU = torch.device("cpu")
TARGET = ModelConfig(
    "LlamaForCausalLM", 259, 64, 8, 4, 2, 16, 128, 4096, 10000.0, None, 1e-5, True, False, False
)
TAPS = (2, 4, 5)  # the default of eight layers: what the original dialect, without ids, means
WIDE = {"hidden": 64, "intermediate": 96, "taps": TAPS}


def target_tables() -> tuple[Tensor, ...]:
    noise = torch.Generator().manual_seed(77)
    return tuple(torch.randn(259, 64, generator=noise, dtype=F64) for _ in range(2))


def opened(folder, target=TARGET, **more) -> Eagle3:
    return open_head(str(folder), target, *target_tables(), 4096, F64, CPU, **more)


def a_head(**changes):
    shape = config(**(WIDE | changes))
    weights = weights_of(shape)
    del weights["embed_tokens.weight"]  # a target's, unless a test keeps its own
    return shape, weights, kept_of(shape)

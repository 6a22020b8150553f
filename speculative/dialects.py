"""How published EAGLE-3 heads say what they are: six dialects, one HeadConfig.  Reads no tensors.

    original     the paper's own release      pytorch_model.bin, midlayer.*, no ids of layers
    specforge    SGLang's SpecForge           LlamaForCausalLMEagle3, eagle_config with ids
    speculators  vLLM's speculators           speculators_model_type, the layer's config nested
    modelopt     NVIDIA's Model Optimizer     eagle_config with many switches
    mla          drafts of Kimi and DeepSeek  Eagle3DeepseekV2ForCausalLM, latent attention
    parallel     P-EAGLE                      all tokens in one pass: recognised, not run

Which layers a head reads is written in two ways under one key: ids of layers whose *output* is
read, or of those *before* which it is.  We count boundaries: the residual stream after b layers.
A start-up probe (probe.py) tells when a file meant the other way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from engine.model_config import BadCheckpoint, ModelConfig, from_config_json
from speculative.head import HeadConfig
from speculative.latent import Latent
from speculative.rotary import Yarn

Fields = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the ways to write a head down."""

    ids: Literal["output", "boundary", "first"] = "first"  # "first": the first id tells
    nested: str = ""  # the key of the config that describes the decoder layer
    norm_before_residual: bool = False  # when the config does not say
    refused: str = ""  # why we do not run it, and what to do


DIALECTS: dict[str, Dialect] = {
    "original": Dialect(),
    "specforge": Dialect("output"),
    "speculators": Dialect("boundary", "transformer_layer_config", True),
    "modelopt": Dialect("output"),
    "mla": Dialect("output"),
    "parallel": Dialect(refused=(
        "It guesses all tokens in one pass (P-EAGLE), which is not served. Choose an EAGLE-3 "
        "draft that guesses one after the other, or serve without one.")),
}  # fmt: skip
LEGACY = {
    "midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.", "draft_id_to_target_id": "d2t",
}  # fmt: skip
LEFT_OUT = ("verifier_", "rotary_emb.")  # of the target, or following from the config
SWITCHES = {  # ModelOpt's, as the one arrangement that EAGLE-3 heads have; absent = so
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True,
}  # fmt: skip
MODELOPT = (*SWITCHES, "parallel_draft_step", "parallel_draft_heads_num_layers")
IDS = "eagle_aux_hidden_state_layer_ids"


def ours(name: str) -> str:
    """A tensor's name as speculative/head.py has it; "" for those that are not wanted."""
    name = name.removeprefix("model.")
    if any(part in name for part in LEFT_OUT):
        return ""
    for old, new in LEGACY.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def recognise(config: Fields, names: Collection[str]) -> str:
    """The dialect of a head with these (our) tensor names; raise BadCheckpoint for no EAGLE-3."""
    kind = config.get("speculators_model_type")
    if "mask_hidden" in names or kind in ("peagle", "p-eagle") or _parallel(config):
        return "parallel"
    if kind is not None and kind != "eagle3":
        raise BadCheckpoint(f"The draft is of the kind {kind!r:.40}; only eagle3 is served. "
                            "Choose an EAGLE-3 draft of the model.")
    if _architecture(config) == "Eagle3DeepseekV2ForCausalLM" or any(
        "kv_a_proj_with_mqa" in name for name in names
    ):
        return "mla"
    if "fc.weight" not in names or "layers.0.hidden_norm.weight" not in names:
        raise BadCheckpoint(
            "The draft has no fc.weight and layers.0.hidden_norm.weight, which every EAGLE-3 head "
            "has. It is of another kind (EAGLE-1, MTP, DFlash, Medusa); only EAGLE-3 is served.")
    if kind is not None:
        return "speculators"
    eagle = _object(config, "eagle_config")
    if any(key in eagle or key in config for key in MODELOPT if key != "use_aux_hidden_state"):
        return "modelopt"
    return "specforge" if _architecture(config) == "LlamaForCausalLMEagle3" else "original"


def read(
    config: Fields,
    found: Mapping[str, tuple[int, ...]],
    target: ModelConfig,
    boundaries: tuple[int, ...] | None = None,
) -> HeadConfig:
    """The head that a config and its tensors' (our) names and shapes describe.

    `boundaries` overrides what the file says of the layers it reads.  Raises BadCheckpoint for a
    dialect that is not run, a field of the wrong kind, or a draft of another target.
    """
    name = recognise(config, found)
    dialect = DIALECTS[name]
    if dialect.refused:
        raise BadCheckpoint(f"The draft is of the {name} dialect. {dialect.refused}")
    _check_switches(config)
    layer = _object(config, dialect.nested) if dialect.nested else config
    scaling, latent = _yarn(layer), _latent(layer) if name == "mla" else None
    shape = from_config_json({
        "max_position_embeddings": target.max_len,  # not the draft's: it is what it was trained on
        **{key: value for key, value in layer.items()
           if key != "max_position_embeddings" and not (scaling and key in ROPE_KEYS)},
        "architectures": [target.architecture],
    })
    if shape.mlp_bias:
        raise BadCheckpoint("The draft's mlp_bias is true; no EAGLE-3 head that is known has one. "
                            "Choose another draft.")
    _check_target(shape, config, target)
    return HeadConfig(
        hidden=shape.hidden,
        target_hidden=target.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.heads if latent else shape.kv_heads,
        head_dim=latent.plain + latent.turned if latent else shape.head_dim,
        eps=shape.rms_eps,
        rope_theta=_theta(layer) if scaling else shape.rope_theta,
        rope_scaling=scaling or shape.rope_scaling,
        draft_vocab=_count(config, "draft_vocab_size", shape.vocab),
        vocab=target.vocab,
        layers=shape.layers,
        taps=boundaries or _boundaries(config, dialect, target.layers),
        norm_before_residual=_flag(
            config, "norm_before_residual", dialect.norm_before_residual),
        norm_before_fc="input_norm.weight" in found or _flag(config, "norm_before_fc"),
        fc_norm=any(key.startswith("fc_norm.") for key in found)
        or _flag(config, "fc_norm") or _flag(config, "use_aux_norm"),
        # vLLM's and SGLang's reading.  SpecForge's trainer has a key of this name for a norm
        # before the output head, which every head has here.
        norm_output=_flag(config, "norm_output"),
        fc_bias="fc.bias" in found,
        attention_bias="layers.0.self_attn.q_proj.bias" in found,
        latent=latent,
    )


def _latent(config: Fields) -> Latent:
    """The widths of latent attention, under DeepSeek's names."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    widths = [_count(config, name, 0) for name in names]
    if 0 in widths or widths[3] % 2 or widths[4] > widths[2] + widths[3]:
        raise BadCheckpoint(
            f"The draft's {', '.join(names)} are {widths}; all must be there, the fourth be even, "
            "and the last at most the third and the fourth together. Its config is damaged.")
    return Latent(*widths)


def _boundaries(config: Fields, dialect: Dialect, layers: int) -> tuple[int, ...]:
    """The layers it reads, as boundaries of a target of `layers` layers."""
    ids = config.get(IDS)
    ids = _object(config, "eagle_config").get(IDS) if ids is None else ids
    if ids is None:
        # All trainers' default: three depths, for shallow targets fewer.
        return tuple(sorted({max(b, 0) for b in (min(2, layers), layers // 2, layers - 3)}))
    if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids):
        raise BadCheckpoint(f"The draft's {IDS} is {ids!r:.60}; it must be a list of numbers.")
    # An id that equals the number of layers can only be a boundary: there is no such layer.
    outputs = dialect.ids == "output" or (dialect.ids == "first" and ids[0] == 1)
    step = 1 if outputs and max(ids) < layers else 0
    if min(ids) < 0 or max(ids) > layers:
        raise BadCheckpoint(
            f"The draft's {IDS} is {ids}; its target has {layers} layers. It is a draft of another "
            "model.")
    return tuple(id + step for id in ids)


ROPE_KEYS = ("rope_scaling", "rope_parameters")


def _yarn(layer: Fields) -> Yarn | None:
    """YaRN out of either spelling of the rotary settings; None for any other."""
    for key in ROPE_KEYS:
        settings = layer.get(key)
        if not isinstance(settings, Mapping):
            continue
        if settings.get("rope_type", settings.get("type")) != "yarn":
            continue
        factor = _number(settings, "factor")
        original = _number(settings, "original_max_position_embeddings")
        fast, slow = _number(settings, "beta_fast", 32.0), _number(settings, "beta_slow", 1.0)
        if not (factor >= 1 and original >= 1 and fast >= slow > 0):
            raise BadCheckpoint(
                f"The draft's {key} has factor {factor}, original length {original}, beta_fast "
                f"{fast} and beta_slow {slow}; YaRN needs the first two from 1 on, the last two "
                "positive, and the first of them no smaller. Its config is damaged.")
        return Yarn(factor, int(original), fast, slow, *_attention_factors(settings, factor))
    return None


def _attention_factors(settings: Fields, factor: float) -> tuple[float, float]:
    """What cos and sin are multiplied by, and what scores are where attention is latent.

    As transformers and DeepSeek's code compute them.
    """
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    every = _number(settings, "mscale_all_dim", 0.0)
    sharper = scale(every) ** 2 if every else 1.0
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor"), sharper
    if settings.get("mscale") and every:
        return scale(_number(settings, "mscale")) / scale(every), sharper
    return scale(1.0), sharper


def _theta(layer: Fields) -> float:
    parameters = layer.get("rope_parameters")
    theta = _number(layer, "rope_theta", 10000.0)
    return _number(parameters, "rope_theta", theta) if isinstance(parameters, Mapping) else theta


def _check_switches(config: Fields) -> None:
    """Refuse arrangements of norms and layers that no code here computes."""
    eagle = _object(config, "eagle_config")
    for key, usual in SWITCHES.items():
        value = eagle.get(key, config.get(key))
        if value is not None and value is not usual:
            raise BadCheckpoint(
                f"The draft's {key} is {value!r:.20}; only heads with {usual} are run. Choose an "
                "EAGLE-3 draft that vLLM and SGLang run, too.")


def _check_target(shape: ModelConfig, config: Fields, target: ModelConfig) -> None:
    """Refuse a draft of another model, as far as its config tells."""
    wanted = _count(config, "target_hidden_size", shape.hidden)
    for what, theirs, own in (("hidden size", wanted, target.hidden),
                              ("vocabulary", shape.vocab, target.vocab)):
        if theirs != own:
            raise BadCheckpoint(
                f"The draft is made for a {what} of {theirs:,}; the model's is {own:,}. It is a "
                "draft of another model.")


def _parallel(config: Fields) -> bool:
    eagle = _object(config, "eagle_config")
    steps = eagle.get("parallel_draft_step", config.get("parallel_draft_step"))
    return (isinstance(steps, int) and steps > 1) or config.get("parallel_drafting") is True


def _architecture(config: Fields) -> object:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def _object(config: Fields, key: str) -> Fields:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadCheckpoint(f"The draft's {key} is {value!r:.40}; it must be an object.")
    return value


def _count(config: Fields, key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise BadCheckpoint(f"The draft's {key} is {value!r:.40}; it must be a number from 1 on.")
    return value


def _flag(config: Fields, key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadCheckpoint(f"The draft's {key} is {value!r:.40}; it must be true or false.")
    return value


def _number(fields: Fields, key: str, default: float | None = None) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadCheckpoint(f"The draft's {key} is {value!r:.40}; it must be a number.")
    return float(value)

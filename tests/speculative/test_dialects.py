"""Six ways to write a head down load as one head, or say by name why not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.model_config import BadCheckpoint, RopeScaling
from engine.weights import BadWeights
from speculative import dialects
from speculative.rotary import Yarn
from tests.head_files import DIALECTS, TARGET, a_head, opened, target_tables, written
from tests.heads import F64, Part, features_of, one_thread, weights_of

alone = pytest.fixture(autouse=True, scope="module")(one_thread)

RUN = [name for name in DIALECTS if name not in ("parallel", "mla")]  # one head fits all these


def logits(eagle):
    """What a head says behind eleven rows, and two drafts more."""
    noise = torch.Generator().manual_seed(5)
    head = eagle.head
    aux = torch.randn(11, head.config.fused, generator=noise, dtype=F64)
    tokens = torch.randint(0, 259, (11,), generator=noise)
    eagle.reserve(2, 16, F64, "cpu")
    features = features_of([Part(0, aux, [0, *tokens.tolist()], [0, 1], 3)], 16)
    eagle.extend(features)
    first = eagle._logits
    drawn = [int(eagle.step(features, depth)) for depth in range(3)]
    return first, eagle._logits, drawn


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_output": True}])
def test_one_head_in_every_dialect_gives_the_same_logits(tmp_path, norms):
    shape, weights, kept = a_head(**norms)
    said = {}
    for name in RUN:
        if norms and name == "original":
            continue  # it is older than these norms
        folder = written(tmp_path / name, name, shape, weights, kept)
        eagle = opened(folder)
        assert eagle.head.config == shape, name
        assert eagle.taps == (1, 3, 4)
        said[name] = logits(eagle)
    first = said[RUN[-1]]
    assert len(said) >= 4 and len(set(first[2])) > 1
    for name, other in said.items():
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1]), name
        assert first[2] == other[2], name


def test_what_is_recognised_is_what_was_written(tmp_path):
    shape, weights, kept = a_head()
    kinds = ("original", "specforge", "specforge", "speculators", "modelopt", "parallel")
    for name, kind in zip(DIALECTS, kinds, strict=False):
        fields, tensors = DIALECTS[name](shape, weights, kept)
        assert dialects.recognise(fields, {dialects.ours(one) for one in tensors}) == kind


@pytest.mark.parametrize("name", RUN)
def test_a_head_with_an_embedding_of_its_own_uses_it(tmp_path, name):
    shape, weights, kept = a_head()
    own = torch.full((259, 64), 0.5, dtype=F64)
    folder = written(tmp_path / "own", name, shape, weights | {"embed_tokens.weight": own}, kept)
    assert torch.equal(opened(folder).head.embedding, own)
    shared = opened(written(tmp_path / "shared", name, shape, weights, kept)).head.embedding
    assert torch.equal(shared, target_tables()[0])


def test_a_narrow_head_has_its_own_embedding(tmp_path):
    shape, weights, kept = a_head(hidden=32)
    own = weights_of(shape)["embed_tokens.weight"]
    folder = written(tmp_path / "a", "specforge", shape, weights | {"embed_tokens.weight": own},
                     kept)
    assert opened(folder).head.config.hidden == 32
    folder = written(tmp_path / "b", "specforge", shape, weights, kept)
    with pytest.raises(BadWeights, match=r"no embed_tokens.weight.*\(259, 64\).*\(259, 32\)"):
        opened(folder)


def test_a_head_without_an_output_table_shares_the_targets(tmp_path):
    shape, weights, kept = a_head(draft_vocab=259)
    folder = written(tmp_path / "a", "specforge", shape, weights, kept,
                     without=("lm_head.weight",))
    eagle, (_, lm_head) = opened(folder), target_tables()
    state = torch.randn(3, 64, dtype=F64)
    _, said = eagle.head.read(state)
    normed = torch.nn.functional.rms_norm(state, (64,), weights["norm.weight"], 1e-5)
    torch.testing.assert_close(said, normed @ lm_head.T)
    some, tensors, kept = a_head()
    folder = written(tmp_path / "b", "specforge", some, tensors, kept, without=("lm_head.weight",))
    with pytest.raises(BadWeights, match=r"no lm_head.weight.*draws 200 of 259.*\(200, 64\)"):
        opened(folder)


# ---- which layers ------------------------------------------------------------------------------


def taps(tmp_path, dialect, layers=8, ids=None, **more):
    shape, weights, kept = a_head(taps=(1, 2, 3))
    where = {"eagle_aux_hidden_state_layer_ids": ids}
    fields = where if dialect == "speculators" else {
        "eagle_config": {"use_last_layernorm": True} | where if dialect == "modelopt" else where}
    folder = written(tmp_path / "x", dialect, shape, weights, kept, config=fields)
    return opened(folder, replace(TARGET, layers=layers), **more).head.config.taps


@pytest.mark.parametrize(
    "dialect, layers, ids, wanted",
    [
        ("specforge", 61, [1, 29, 57], (2, 30, 58)),  # Kimi K2: output of
        ("modelopt", 32, [1, 15, 28], (2, 16, 29)),
        ("speculators", 32, [2, 16, 29], (2, 16, 29)),  # before
        ("original", 32, [1, 15, 28], (2, 16, 29)),  # told by the first id
        ("original", 32, [2, 16, 29], (2, 16, 29)),
        ("specforge", 36, [24, 30, 36], (24, 30, 36)),  # gpt-oss: the last can only be a boundary
        ("speculators", 36, [0, 18, 36], (0, 18, 36)),  # embedding and last layer
        ("specforge", 30, None, (2, 15, 27)),  # SmolLM2, by default
        ("original", 32, None, (2, 16, 29)),
        ("speculators", 8, None, (2, 4, 5)),
    ],
)
def test_layer_ids_of_both_conventions_become_boundaries(tmp_path, dialect, layers, ids, wanted):
    assert taps(tmp_path, dialect, layers, ids) == wanted


def test_an_explicit_choice_of_layers_goes_first(tmp_path):
    assert taps(tmp_path, "specforge", 32, [1, 15, 28], boundaries=(1, 15, 28)) == (1, 15, 28)


@pytest.mark.parametrize("ids, words", [
    ([1, 15, 33], "its target has 32 layers"), ([-2, 3, 5], "its target has 32 layers"),
    ("all", "must be a list of numbers"), ([1, 2.5, 3], "must be a list of numbers"),
    ([3, 1, 2], "must rise"), ([], "must be a list"),
])
def test_layer_ids_that_cannot_be_are_refused(tmp_path, ids, words):
    with pytest.raises(BadCheckpoint, match=words):
        taps(tmp_path, "specforge", 32, ids)


def test_a_shallow_target_gives_fewer_layers_by_default(tmp_path):
    shape, weights, kept = a_head(taps=(0, 1, 2))
    folder = written(tmp_path / "x", "original", shape, weights, kept)
    assert opened(folder, replace(TARGET, layers=2)).head.config.taps == (0, 1, 2)
    shape, weights, kept = a_head(taps=(1, 2))
    folder = written(tmp_path / "y", "original", shape, weights, kept)
    assert opened(folder, replace(TARGET, layers=4)).head.config.taps == (1, 2)


# ---- switches ----------------------------------------------------------------------------------


def test_the_residual_switch_is_true_where_speculators_do_not_say(tmp_path):
    shape, weights, kept = a_head()
    for dialect, silent in (("speculators", True), ("specforge", False), ("modelopt", False)):
        for told, wanted in ((None, silent), (True, True), (False, False)):
            folder = written(tmp_path / f"{dialect}{told}", dialect, shape, weights, kept,
                             config={"norm_before_residual": told})
            assert opened(folder).head.config.norm_before_residual is wanted


def test_norms_in_the_files_are_used_whatever_the_config_says(tmp_path):
    """sglang#32334: a norm that was ignored cost most of the acceptance."""
    for switch in ("fc_norm", "norm_before_fc"):
        shape, weights, kept = a_head(**{switch: True})
        folder = written(tmp_path / switch, "speculators", shape, weights, kept,
                         config={switch: False})
        assert getattr(opened(folder).head.config, switch)
        lost = "fc_norm.1.weight" if switch == "fc_norm" else "input_norm.weight"
        folder = written(tmp_path / f"{switch}2", "speculators", shape, weights, kept,
                         without=(lost,), config={switch: True})
        with pytest.raises(BadWeights, match=f"needs {lost} of shape"):
            opened(folder)


def test_biases_in_the_files_are_used(tmp_path):
    shape, weights, kept = a_head(attention_bias=True, fc_bias=True)
    folder = written(tmp_path / "x", "specforge", shape, weights, kept)
    assert opened(folder).head.config == shape
    with pytest.raises(BadWeights, match=r"needs layers.0.self_attn.v_proj.bias of shape \(32,\)"):
        opened(written(tmp_path / "y", "specforge", shape, weights, kept,
                       without=("midlayer.self_attn.v_proj.bias",)))


@pytest.mark.parametrize("switch, value", [
    ("use_aux_hidden_state", False), ("use_input_layernorm_in_first_layer", False),
    ("use_last_layernorm", False), ("use_mtp_layernorm", True), ("next_layer_regular", False),
])
def test_arrangements_that_are_not_computed_are_refused(tmp_path, switch, value):
    shape, weights, kept = a_head()
    fields, _ = DIALECTS["modelopt"](shape, weights, kept)
    folder = written(tmp_path / "x", "modelopt", shape, weights, kept,
                     config={"eagle_config": fields["eagle_config"] | {switch: value}})
    with pytest.raises(BadCheckpoint, match=f"{switch} is {value}"):
        opened(folder)


@pytest.mark.parametrize("config, tensors, words", [
    ({}, {"mask_hidden": torch.zeros(1, 192)}, "parallel dialect.*P-EAGLE"),
    ({"eagle_config": {"parallel_draft_step": 4}}, {}, "parallel dialect"),
    ({"speculators_model_type": "dflash"}, {}, "of the kind 'dflash'; only eagle3"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "q_lora_rank, .* are .0, 0, 0, 0, 0."),
    ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2, 2)}, "q_lora_rank"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantised"),
    ({"hidden_act": "gelu"}, {}, "hidden_act"),
    ({"mlp_bias": True}, {}, "mlp_bias"),
    ({"vocab_size": 300}, {}, "vocabulary of 300; the model's is 259"),
    ({"target_hidden_size": 128}, {}, "hidden size of 128; the model's is 64"),
    ({"num_attention_heads": "4"}, {}, "num_attention_heads"),
    ({"norm_output": 1}, {}, "norm_output is 1; it must be true or false"),
    ({"draft_vocab_size": 0}, {}, "draft_vocab_size is 0"),
    ({"draft_vocab_size": 400}, {}, "draws 400 tokens, its target has 259"),
    ({"eagle_config": []}, {}, "eagle_config is .*must be an object"),
])
def test_what_is_not_run_is_named(tmp_path, config, tensors, words):
    shape, weights, kept = a_head()
    folder = written(tmp_path / "x", "specforge", shape, weights, kept, config=config,
                     tensors=tensors)
    with pytest.raises(BadCheckpoint, match=words):
        opened(folder)


def test_other_families_of_drafts_are_no_eagle3(tmp_path):
    shape, weights, kept = a_head()
    for lost in ("fc.weight", "midlayer.hidden_norm.weight"):
        folder = written(tmp_path / lost, "specforge", shape, weights, kept, without=(lost,))
        with pytest.raises(BadCheckpoint, match="only EAGLE-3 is served"):
            opened(folder)


# ---- rotary ------------------------------------------------------------------------------------


def test_rotary_settings_are_the_drafts_own_and_reach_the_served_length(tmp_path):
    shape, weights, kept = a_head()
    for theta in (500.0, None):  # None: not written, which the trainers took for 10,000
        folder = written(tmp_path / str(theta), "specforge", shape, weights, kept,
                         config={"rope_theta": theta, "max_position_embeddings": 128})
        head = opened(folder, replace(TARGET, rope_theta=1e6)).head
        assert head.config.rope_theta == (theta or 10000.0)
        assert head._cos.shape[0] == 4096


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_scaling_rules_are_read(tmp_path, spelling):
    shape, weights, kept = a_head()
    kinds = {
        "llama3": ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192},
                   RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        "linear": ({"factor": 2.0}, RopeScaling("linear", 2.0)),
        "yarn": ({"factor": 32.0, "original_max_position_embeddings": 2048},
                 Yarn(32.0, 2048, scale=0.1 * math.log(32) + 1)),
    }
    for kind, (settings, wanted) in kinds.items():
        told = {"rope_type": kind, **settings}
        if spelling == "rope_parameters":
            told["rope_theta"] = 5000.0
        folder = written(tmp_path / kind, "modelopt", shape, weights, kept,
                         config={spelling: told, "rope_theta": 700.0})
        head = opened(folder).head.config
        assert head.rope_scaling == wanted
        assert head.rope_theta == (5000.0 if spelling == "rope_parameters" else 700.0)


def test_yarns_attention_factor_is_as_transformers_has_it(tmp_path):
    for told, wanted in (
        ({}, 0.1 * math.log(40) + 1), ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5},
         (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
    ):
        found = dialects._yarn({"rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096} | told})
        assert math.isclose(found.scale, wanted)
        every = told.get("mscale_all_dim")
        sharper = (0.1 * every * math.log(40) + 1) ** 2 if every else 1.0
        assert math.isclose(found.sharper, sharper)


@pytest.mark.parametrize("told", [
    {"factor": 0.5}, {"factor": "big"}, {"factor": 4.0, "original_max_position_embeddings": 0},
    {"factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0},
])
def test_damaged_scaling_is_refused(tmp_path, told):
    settings = {"rope_type": "yarn", "original_max_position_embeddings": 2048} | told
    with pytest.raises(BadCheckpoint, match="draft's"):
        dialects._yarn({"rope_scaling": settings})


# ---- what the target's own library thinks of YaRN ------------------------------------------


def test_yarn_is_transformers_yarn():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for theta, dim, original, factor in ((10000.0, 64, 2048, 32.0), (50000.0, 64, 4096, 64.0)):
        given = {"rope_type": "yarn", "factor": factor, "rope_theta": theta,
                 "original_max_position_embeddings": original}
        theirs = LlamaConfig(
            hidden_size=dim * 2, num_attention_heads=2, head_dim=dim, rope_parameters=given,
            max_position_embeddings=int(original * factor),
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        ours = dialects._yarn({"rope_parameters": given})
        torch.testing.assert_close(
            ours.frequencies(dim, theta).float(), frequencies, rtol=1e-5, atol=1e-9)
        assert math.isclose(ours.scale, scale)

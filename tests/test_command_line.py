"""The `slipstream` command from outside: help, settings and sources, mistakes.  Runs no model."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import slipstream
from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from gateway.config import GatewayConfig
from gateway.options import SHOWN
from gateway.protocol import Message
from gateway.sandbox import BadTemplate
from tests.scripted import Script, ScriptedLink
from tests.tiny import write_llama

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(slipstream.cli, list(arguments), env=environment)


def setting(result: Result, flag: str) -> list[str]:
    """Value and source of one line of --print-config."""
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if line.split()[:1] == [flag]]
    return line.split()[1:]


@pytest.mark.parametrize("name", sorted(slipstream.cli.commands))
def test_every_command_teaches_with_an_example(name):
    said = run(name, "--help")
    assert said.exit_code == 0
    assert re.search(rf"slipstream {name} ?", said.output)


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("port = 1\nhost = '0.0.0.1'\ndtype = 'float32'\n[engine]\nmax_len = 77\n")
    said = run("serve", "m", "--config", str(file), "--port", "3", "--print-config",
               SLIPSTREAM_PORT="2", SLIPSTREAM_DTYPE="float64")
    assert setting(said, "--port") == ["3", "flag"]
    assert setting(said, "--dtype") == ["float64", "environment"]
    assert setting(said, "--host") == ["0.0.0.1", "file"]
    assert setting(said, "--max-model-len") == ["77", "file"]
    assert setting(said, "--max-num-seqs")[1] == "default"


@pytest.mark.parametrize("spelling", ["max-model-len", "max_model_len", "engine.max-len"])
def test_a_file_may_spell_a_setting_as_any_of_its_flags(tmp_path, spelling):
    file = tmp_path / "server.toml"
    key = spelling if "." not in spelling else spelling.replace("-", "_")
    file.write_text(f"{key} = 99\n")
    assert setting(run("serve", "m", "--config", str(file), "--print-config"),
                   "--max-model-len") == ["99", "file"]


def test_every_field_of_the_configs_is_an_option_with_an_environment_twin():
    said = run("serve", "m", "--cache.pin-share", "0.5", "--print-config",
               SLIPSTREAM_GATEWAY_PING_S="3", SLIPSTREAM_MAX_NUM_SEQS="7")
    assert setting(said, "--cache.pin-share") == ["0.5", "flag"]
    assert setting(said, "--gateway.ping-s") == ["3.0", "environment"]
    assert setting(said, "--max-num-seqs") == ["7", "environment"]
    for key, (flag, _) in SHOWN.items():
        section, _, field = key.partition(".")
        assert hasattr(slipstream.SETTINGS.defaults[section], field), f"{flag} sets no field"


def test_what_follows_the_device_is_open_until_the_device_is_known():
    said = run("serve", "m", "--print-config", SLIPSTREAM_GPU_MEMORY_UTILIZATION="0.8")
    assert setting(said, "--gpu-memory-utilization") == ["0.8", "environment"]
    for flag in ("--max-num-seqs", "--max-num-batched-tokens", "--engine.mixed-tokens",
                 "--max-gap", "--kv-cache-memory-bytes"):
        assert setting(said, flag) == ["None", "default"]
    text = re.sub(r"\s+", " ", run("serve", "--help").output)
    assert "[default: 64; GPU: 256]" in text
    assert "[default: 512; GPU: 2048]" in text
    assert "[default: 0.9]" in text


def test_the_tool_call_layout_and_the_chat_template_are_settings_like_the_others(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("x")
    file = tmp_path / "server.toml"
    file.write_text(f"tool_call_parser = 'hermes'\nchat-template = '{template}'\n")
    said = run("serve", "m", "--config", str(file), "--print-config")
    assert setting(said, "--tool-call-parser") == ["hermes", "file"]
    assert setting(said, "--chat-template") == [str(template), "file"]
    said = run("serve", "m", "--print-config", SLIPSTREAM_TOOL_CALL_PARSER="hermes",
               SLIPSTREAM_CHAT_TEMPLATE=str(template))
    assert setting(said, "--tool-call-parser") == ["hermes", "environment"]
    assert setting(said, "--chat-template") == [str(template), "environment"]
    assert "warning" not in said.output


def test_a_chat_template_of_ones_own_replaces_the_models(tmp_path):
    made = slipstream.open_gateway(
        open_checkpoint(str(write_llama(tmp_path / "model"))), GatewayConfig(),
        EngineConfig(model="m", served_name="m"), ScriptedLink(lambda _: Script.say("x")), "",
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tools }}",
    )
    prompt = asyncio.run(made.prompts.chat([Message("user", "hi")]))
    assert made.prompts.text_of(prompt.ids) == "[hi]None"
    assert "own chat template" in made.prompts.note


def test_built_configs_hold_what_was_given():
    command = slipstream.cli.commands["serve"]
    with command.make_context("serve", ["m", "--max-model-len", "64", "--port", "5"]) as context:
        values = {k: v for k, v in context.params.items()
                  if k not in ("model", "tool_call_parser", "chat_template", "in_process",
                               "print_config")}
    made = slipstream.SETTINGS.build(values)
    assert (made["engine"].max_len, made["gateway"].port) == (64, 5)
    assert made["cache"] == slipstream.SETTINGS.defaults["cache"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot = 1", "Did you mean port?"),
        ("[engine]\nmax_lenn = 1", "Did you mean engine.max-len?"),
        ("port = = 1", "no TOML file"),
        ("port = 'many'", "not a valid integer"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_nearest_setting(tmp_path, content, says):
    file = tmp_path / "server.toml"
    file.write_text(content)
    said = run("serve", "m", "--config", str(file), "--print-config")
    assert said.exit_code == 2
    assert says in said.output


def test_an_unknown_flag_or_variable_is_named_with_the_nearest():
    said = run("serve", "m", "--max-model-length", "3")
    assert said.exit_code == 2
    assert "--max-model-len" in said.output
    said = run("serve", "m", "--print-config", SLIPSTREAM_PROT="3")
    assert "SLIPSTREAM_PROT is no setting. Did you mean SLIPSTREAM_PORT?" in said.output


def test_a_chat_template_that_is_no_jinja_is_named_by_its_line(tmp_path):
    with pytest.raises(BadTemplate, match="line 2"):
        slipstream.open_gateway(
            open_checkpoint(str(write_llama(tmp_path / "model"))), GatewayConfig(),
            EngineConfig(model="m", served_name="m"), ScriptedLink(lambda _: Script.say("x")), "",
            "{% if x %}\n{% endfor %}",
        )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "slipstream.py", *arguments], cwd=ROOT, text=True,
                          capture_output=True, timeout=50)


@pytest.mark.timed
def test_a_taken_port_ends_with_98_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        start = time.monotonic()
        done = command("serve", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 98
    assert "taken" in done.stderr
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "smolm2", "--port", "0"], "Did you mean smollm2?"),
        (["serve", "m", "--port", "0", "--dtype", "float16"], "bfloat16"),
        (["serve", "m", "--port", "0", "--gpu-memory-utilization", "90"], "at most 1"),
        (["serve", "m", "--port", "99999"], "port is 99,999"),
        (["serve", "m", "--port", "0", "--chat-template", "no.jinja"], "does not exist"),
        (["tokens", "x", "--model", "nothing"], "There is no model 'nothing'"),
    ],
)
def test_a_callers_mistake_is_one_sentence_and_exit_code_2(arguments, says):
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_tokens_and_blocks_show_ids_and_what_the_cache_would_hold(tmp_path):
    model = str(write_llama(tmp_path / "model"))
    said = run("tokens", "hé", "--model", model)
    assert said.exit_code == 0, said.output
    assert "3 tokens, 2 characters" in said.output
    prompt, before = tmp_path / "prompt.txt", tmp_path / "before.txt"
    prompt.write_text("a" * 64 + "b" * 64 + "c" * 10)
    before.write_text("a" * 64 + "x" * 64)
    said = run("blocks", str(prompt), "--other", str(before), "--model", model)
    assert "138 tokens = 2 full blocks of 64 and 10 left over" in said.output
    assert "64 tokens would come from the cache" in said.output
    assert [line.split()[-1] for line in said.output.splitlines()[1:3]] == ["hit", "miss"]


def test_doctor_reports_a_missing_model_and_fails(tmp_path):
    said = run("doctor", str(tmp_path / "nothing"))
    assert said.exit_code == 1
    assert "There is no model" in re.sub(r"\s+", " ", said.output)
    assert "Python" in said.output


@pytest.mark.parametrize("batches", ["0", "1,x", "", "1,,2"])
def test_bench_takes_batches_as_whole_numbers(batches):
    said = run("bench", "decode", "m", "--batches", batches)
    assert said.exit_code == 2 and "whole numbers above zero" in said.output


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--tool-format"])
def test_the_layout_may_be_named_by_either_flag(flag):
    done = command("serve", "smollm2", flag, "hermes", "--print-config")
    assert done.returncode == 0
    assert re.search(r"--tool-call-parser\s+hermes\s+flag", done.stdout), done.stdout

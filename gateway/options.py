"""Settings as command line options: flag > environment > TOML file > default.  Checks no range.

Every field of a config becomes `--section.field-name`; those in `shown` get a short flag and help.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

Command = TypeVar("Command", bound=Callable[..., Any])
ENV = "SLIPSTREAM_"
SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}

# "section.field" -> its short flag, as vLLM spells it where the meaning is the same, and its help.
SHOWN = {
    "gateway.host": ("host", "Address to listen on."),
    "gateway.port": ("port", "Port to listen on; 0 = any free one."),
    "gateway.workers": ("workers", "Gateway processes, for more load than one core carries."),
    "gateway.api_key_file": ("api-key-file", "File with one API key a line.  [default: open]"),
    "gateway.served_model_name": ("served-model-name", "Name that clients use for the model."),
    "gateway.cache_scope": ("cache-scope", "Who shares equal prefixes: a tenant's sessions."),
    "gateway.drain_timeout_s": ("drain-timeout", "Seconds that streams may run after SIGTERM."),
    "gateway.drain_delay_s": ("drain-delay", "Seconds of 503s before the listener closes."),
    "engine.max_len": ("max-model-len", "Tokens of prompt and output.  [default: the model's]"),
    "engine.dtype": ("dtype", "Weights and KV: auto, bfloat16, float32, float64."),
    "engine.device": ("device", "auto (a GPU when there is one), cpu or cuda."),
    "engine.max_sequences": ("max-num-seqs",
                             "Sequences at the same time.  [default: 64; GPU: 256]"),
    "engine.max_batch_tokens": ("max-num-batched-tokens",
                                "Tokens of one step.  [default: 512; GPU: 2048]"),
    "engine.max_gap_s": ("max-gap", "Seconds that prompts may keep streams waiting.  "
                                    "[default: no limit; GPU: 0.02]"),
    "engine.gpu_memory_utilization": ("gpu-memory-utilization",
                                      "Share of the GPU's memory to use for everything."),
    "engine.prefix_caching": ("enable-prefix-caching", "Share the KV of equal prefixes."),
    "engine.speculative": ("speculative-config",
                           'Who drafts tokens ahead: auto, off, or {"method": "suffix", ...}.'),
    "engine.revision": ("revision", "Branch, tag or commit of a hub id."),
    "engine.threads": ("threads", "CPU threads of the engine.  [default: all cores]"),
    "cache.kv_bytes": ("kv-cache-memory-bytes",
                       "Bytes for K/V pages.  [default: 1 GiB; GPU: what is free]"),
}


@dataclass(frozen=True, slots=True)
class Sections:
    """The configs that a command takes, by section name, with their defaults as instances."""

    defaults: Mapping[str, Any]
    shown: Mapping[str, tuple[str, str]]  # "section.field" -> (flag without dashes, help)
    inner: frozenset[str] = frozenset()  # "section.field" that no user sets
    extra: tuple[str, ...] = ()  # flags without dashes that the command declares by itself

    def options(self, command: Command) -> Command:
        """Decorate a click command with one option a field, `--config` and `--print-config`."""
        for key, kind, default in reversed(list(self._fields())):
            command = _option(key, kind, default, self.shown.get(key))(command)
        return click.option(
            "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), is_eager=True,
            expose_value=False, callback=self._read_file, envvar=ENV + "CONFIG",
            help="TOML file: [section] tables, or the flags' names.",
        )(command)

    def build(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The configs made of a command's arguments (named `section_field`), by section."""
        made: dict[str, Any] = {}
        for section, default in self.defaults.items():
            fields = [key for key, _, _ in self._fields() if key.startswith(section + ".")]
            given = {key.partition(".")[2]: values[_name(key)] for key in fields}
            replace = (
                msgspec.structs.replace
                if isinstance(default, msgspec.Struct)
                else dataclasses.replace
            )
            made[section] = replace(default, **given)
        return made

    def sources(self, context: click.Context) -> Iterator[tuple[str, object, str]]:
        """(flag, value, where it comes from) of every setting."""
        named = [(_flags(key, self.shown.get(key))[0], _name(key)) for key, _, _ in self._fields()]
        for flag, parameter in [*named, *((flag, _parameter(flag)) for flag in self.extra)]:
            source = context.get_parameter_source(parameter)
            where = SOURCES.get(source, "default") if source is not None else "default"
            yield "--" + flag, context.params[parameter], where

    def unknown_environment(self) -> list[str]:
        """A sentence for each SLIPSTREAM_ variable that looks like a setting and is none."""
        known = {ENV + "CONFIG", ENV + "GGUF", *map(_env, self.extra)}
        for key, _, _ in self._fields():
            known.update(_env(flag) for flag in _flags(key, self.shown.get(key)))
        found = (name for name in os.environ if name.startswith(ENV) and name not in known)
        return [f"{name} is no setting.{_nearest(name, known)}" for name in sorted(found)]

    def _fields(self) -> Iterator[tuple[str, object, object]]:
        for section, default in self.defaults.items():
            for field, kind in typing.get_type_hints(type(default)).items():
                key = f"{section}.{field}"
                if key not in self.inner and not field.startswith("__"):
                    yield key, kind, getattr(default, field)

    def _read_file(self, context: click.Context, _: click.Parameter, path: Path | None) -> None:
        """Put the file's values below flags and environment; refuse a key that nobody reads."""
        if path is None:
            return
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise click.BadParameter(f"{path} is no TOML file: {error}") from error
        names = {flag: _name(key) for key, _, _ in self._fields()
                 for flag in _flags(key, self.shown.get(key))}
        names |= {flag: _parameter(flag) for flag in self.extra}
        values: dict[str, Any] = {}
        for key, value in _flat(content):
            if key not in names:
                raise click.BadParameter(f"{path}: {key} is no setting.{_nearest(key, names)}")
            values[names[key]] = value
        context.default_map = {**(context.default_map or {}), **values}


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            for field, inner in value.items():
                yield f"{key}.{field}".replace("_", "-"), inner
        else:
            yield key.replace("_", "-"), value


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]}?" if near else " See --help for the settings."


def _name(key: str) -> str:
    return key.replace(".", "_")


def _parameter(flag: str) -> str:
    return flag.replace("-", "_")


def _flags(key: str, shown: tuple[str, str] | None) -> list[str]:
    dotted = key.replace("_", "-")
    return [shown[0], dotted] if shown else [dotted]


def _env(flag: str) -> str:
    return ENV + flag.upper().replace("-", "_").replace(".", "_")


def _option(
    key: str, kind: object, default: object, shown: tuple[str, str] | None
) -> Callable[[Command], Command]:
    flags = _flags(key, shown)
    names = ["--" + flag for flag in flags]
    if kind is bool:
        names = ["/".join((name, "--no-" + name[2:])) for name in names]
    return click.option(
        _name(key), *names, type=_click_type(kind), default=default, help=shown[1] if shown else "",
        envvar=[_env(flag) for flag in flags], hidden=shown is None, show_default=True,
        show_envvar=False,
    )


def _click_type(kind: object) -> Any:
    """int, float, str, bool, a Literal, or one of them or None."""
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    assert kind in (int, float, str, bool), f"no option can hold a {kind}"
    return kind

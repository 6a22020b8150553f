"""Open an EAGLE-3 head's folder for a target: files, checks, tensors.  Knows no dialect.

    config.json + tensors' names and shapes -> dialects.read -> HeadConfig -> compared -> Eagle3

Tensors come from safetensors.  The paper's own release is a pytorch_model.bin, which is a pickle:
it is read by torch's weights-only unpickler, which knows tensors and containers and nothing that
can run code; a file that asks for more is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine import hub
from engine.model_config import BadCheckpoint, ModelConfig
from engine.weights import STORED, BadWeights
from speculative import dialects
from speculative.eagle3 import Eagle3
from speculative.head import Head, HeadConfig, kept_ids, shapes

JSON_LIMIT = 1 << 24  # bytes
KINDS = {**STORED, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
FLOATS = tuple(STORED.values())


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the files, not yet in memory of its own."""

    name: str  # in the file
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    read: Callable[[], Tensor]


Read = Callable[[Stored, torch.dtype, torch.device], Tensor]


def open_head(
    path: str,
    target: ModelConfig,
    embedding: Tensor,
    lm_head: Tensor,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
    boundaries: tuple[int, ...] | None = None,
    *,
    blank: bool = False,
) -> Eagle3:
    """The head in folder (or hub id) `path`, for a model of this shape, behind DeviceDraft.

    `embedding` and `lm_head`, both [vocab, hidden], are the target's: a head without its own shares
    them.  Positions go up to `max_len`.  `boundaries` overrides which layers the file says it reads
    (dialects.py).  A `blank` head has its shapes and its ids, and no weight is read.  Raises
    BadCheckpoint or BadWeights, naming the tensor and both shapes.
    """
    folder = _folder(path)
    try:
        with ExitStack() as files:
            found = _stored(folder, files)
            config = dialects.read(
                _config(folder), {name: one.shape for name, one in found.items()}, target,
                boundaries,
            )
            read = _blank if blank else _read
            return Eagle3(_head(config, found, embedding, lm_head, max_len, dtype, device, read))
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or path} cannot be read: {error.strerror}. Check its "
                            "permissions, or give another draft.") from error


def _head(
    config: HeadConfig, found: Mapping[str, Stored], embedding: Tensor, lm_head: Tensor,
    max_len: int, dtype: torch.dtype, device: torch.device, read: Read,
) -> Head:  # fmt: skip
    """Compare every shape, then read."""
    expected = shapes(config)
    weights: dict[str, Tensor] = {}
    if "lm_head.weight" not in found:
        shared = _shared("lm_head", lm_head, config, config.draft_vocab)
        weights["lm_head.weight"] = shared.to(device, dtype)
    if "embed_tokens.weight" in found:
        expected["embed_tokens.weight"] = config.vocab, config.hidden
    else:
        weights["embed_tokens.weight"] = _shared("embed_tokens", embedding, config, config.vocab)
    for name, shape in expected.items():
        if name not in weights:
            _compare(name, found.get(name), shape, config)
    extra = [name for name in found if name not in expected and name not in ("d2t", "t2d")]
    if extra:
        one = found[extra[0]]
        raise BadWeights(f"{one.file} has {one.name} of shape {one.shape}, which this draft does "
                         f"not use ({len(extra)} such tensors). Its config is of another draft.")
    kept = _kept(config, found)
    for name in expected:
        if name not in weights:
            weights[name] = read(found[name], dtype, device)
    embedding = weights.pop("embed_tokens.weight")
    return Head(config, weights, embedding, None if kept is None else kept.to(device), max_len)


def _compare(
    name: str, one: Stored | None, shape: tuple[int, ...], config: HeadConfig
) -> None:
    if one is None:
        raise BadWeights(f"The draft needs {name} of shape {shape}; its files have none. Download "
                         "the missing files, or choose another draft.")
    if one.shape == shape and one.dtype in FLOATS:
        return
    if one.shape == shape:
        raise BadWeights(f"{one.name} in {one.file} is stored as {one.dtype}; weights are floats. "
                         "Choose the unquantised draft.")
    hint = ""
    if name == "fc.weight":
        hint = (f" It reads {len(config.taps)} layers of a model of width {config.target_hidden}"
                f" (boundaries {list(config.taps)}).")
    raise BadWeights(f"{one.name} in {one.file} has the shape {one.shape}; the draft's config and "
                     f"this model need {shape}.{hint} One of them is of another model.")


def _shared(what: str, tensor: Tensor, config: HeadConfig, rows: int) -> Tensor:
    """The target's own table, where the head can do with it."""
    if rows != config.vocab:
        raise BadWeights(
            f"The draft has no {what}.weight, and draws {rows:,} of {config.vocab:,} tokens: it "
            f"needs one of shape ({rows}, {config.hidden}). Download the missing files.")
    if tensor.shape != (rows, config.hidden):
        raise BadWeights(
            f"The draft has no {what}.weight, and the model's, of shape {tuple(tensor.shape)}, "
            f"does not fit where ({rows}, {config.hidden}) is needed. Choose another draft.")
    return tensor


def _kept(config: HeadConfig, found: Mapping[str, Stored]) -> Tensor | None:
    """The target's ids of the draft vocabulary, checked; None = all of them."""
    if "d2t" not in found:
        if config.draft_vocab != config.vocab:
            raise BadWeights(
                f"The draft draws {config.draft_vocab:,} of {config.vocab:,} tokens and has no "
                f"d2t of shape ({config.draft_vocab},) to say which. Download the missing files.")
        return None
    if found["d2t"].shape != (config.draft_vocab,):
        raise BadWeights(f"d2t has the shape {found['d2t'].shape}; the rows of lm_head ask for "
                         f"({config.draft_vocab},). One of them is of another draft.")
    kept = kept_ids(found["d2t"].read().to(torch.int64))
    if not (kept.diff() > 0).all() or not 0 <= int(kept[0]) <= int(kept[-1]) < config.vocab:
        raise BadWeights(
            f"d2t gives the ids {int(kept.min())} to {int(kept.max())}; they must rise and lie "
            f"within the model's 0 to {config.vocab - 1:,}. It is of another model, or damaged.")
    if "t2d" in found:
        _compare_kept(found["t2d"], kept, config.vocab)
    return None if config.draft_vocab == config.vocab else kept.clone()


def _compare_kept(one: Stored, kept: Tensor, vocab: int) -> None:
    """t2d says the same as d2t, as one flag a token of the target."""
    if one.shape != (vocab,):
        raise BadWeights(f"t2d has the shape {one.shape}; the model's vocabulary asks for "
                         f"({vocab},). It is of another model.")
    flags = one.read().to(torch.bool)
    if int(flags.sum()) != len(kept) or not flags[kept].all():
        raise BadWeights(f"t2d keeps {int(flags.sum()):,} tokens, d2t {len(kept):,}, and not the "
                         "same ones. One of them is of another draft.")


# ---- files -------------------------------------------------------------------------------------


def _folder(path: str) -> Path:
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder
    if not folder.exists() and hub.HUB_ID.fullmatch(path):
        return hub.fetch(path, None)
    raise BadCheckpoint(f"There is no draft {path!r:.200}. Give a folder with config.json and "
                        "model.safetensors, or a hub id (owner/name).")


def _config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    if not path.is_file():
        raise BadCheckpoint(f"{folder} has no config.json. A draft's folder needs it.")
    if path.stat().st_size > JSON_LIMIT:
        raise BadCheckpoint(f"{path.name} is larger than {JSON_LIMIT:,} bytes.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BadCheckpoint("The draft's config.json is not valid JSON. Download it again."
                            ) from None
    if not isinstance(value, dict):
        raise BadCheckpoint("The draft's config.json is not a JSON object. Download it again.")
    return value


def _stored(folder: Path, files: ExitStack) -> dict[str, Stored]:
    """Every wanted tensor by our name; the files stay open until `files` closes."""
    paths = sorted(folder.glob("*.safetensors"))
    pickled = folder / "pytorch_model.bin"
    listed = [one for path in paths for one in _in_safetensors(path, files)]
    if not paths:
        if not pickled.is_file():
            raise BadCheckpoint(f"{folder} has no .safetensors file and no pytorch_model.bin. "
                                "Download the draft's weights.")
        listed = _in_pickle(pickled)
    found: dict[str, Stored] = {}
    for one in listed:
        name = dialects.ours(one.name)
        if name in found:
            raise BadWeights(f"{one.name} in {one.file} is there again as {found[name].name} in "
                             f"{found[name].file}. Remove one of them.")
        if name:
            found[name] = one
    return found


def _in_safetensors(path: Path, files: ExitStack) -> list[Stored]:
    found: list[Stored] = []
    try:
        shard = files.enter_context(safe_open(path, framework="pt", device="cpu"))
        for name in shard.keys():
            entry = shard.get_slice(name)
            kind = entry.get_dtype()
            if kind not in KINDS:
                raise BadWeights(f"{name} in {path.name} is stored as {kind}; {', '.join(KINDS)} "
                                 "are read. Choose the unquantised draft.")
            read = partial(shard.get_tensor, name)
            found.append(Stored(name, tuple(entry.get_shape()), KINDS[kind], path.name, read))
    except (SafetensorError, ValueError) as error:
        raise BadWeights(f"{path.name} is not a sound safetensors file. Download it again."
                         ) from error
    return found


def _in_pickle(path: Path) -> list[Stored]:
    """The tensors of the paper's release, by torch's unpickler that cannot run code."""
    try:
        given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its unpickler has classes of its own for what it refuses
        raise BadWeights(
            f"{path.name} is damaged, or holds more than tensors; it is read only as far as that "
            "cannot run code. Convert it to safetensors, or download it again.") from error
    if not isinstance(given, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in given.items()
    ):
        raise BadWeights(f"{path.name} is no mapping of names to tensors. Download it again.")
    return [
        Stored(name, tuple(value.shape), value.dtype, path.name, partial(_same, value))
        for name, value in given.items()
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _blank(one: Stored, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(one.shape, dtype=dtype, device=device)


def _read(one: Stored, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy in our own memory: a view of the mapped file would die with the file."""
    try:
        return one.read().to(device, dtype, copy=True).contiguous()
    except (SafetensorError, RuntimeError) as error:
        raise BadWeights(f"{one.name} cannot be read from {one.file}. Download the file again."
                         ) from error

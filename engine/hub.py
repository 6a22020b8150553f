"""Bring a model's data files from the Hugging Face hub into its local cache.  Never asks for code.

Only what open_checkpoint reads comes: JSON, safetensors and chat templates, at the top level.
Python files, pickles and subfolders of a repository are left where they are.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Protocol

from engine.model_config import BadCheckpoint

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
ALLOWED = ("*.json", "*.safetensors", "*.jinja")
LEFT = ("*/*", "*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "consolidated*.safetensors")


class Snapshot(Protocol):
    """huggingface_hub.snapshot_download, as far as we use it."""

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str],
                 ignore_patterns: list[str]) -> str:
        """Download the matching files and return the folder they lie in."""


def snapshot_function() -> Snapshot:
    """The optional library's download; raise BadCheckpoint when it is not installed."""
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        raise BadCheckpoint(
            "Reading a model from the hub needs huggingface-hub. Install it with "
            "`pip install 'slipstream-serve[hub]'`, or give a folder.") from None
    download: Snapshot = library.snapshot_download
    return download


def fetch(name: str, revision: str | None, snapshot: Snapshot | None = None) -> Path:
    """The local folder of hub model `owner/name`; a commit as `revision` pins every file.

    `snapshot` stands in for the library.  Raises BadCheckpoint when the download fails.
    """
    download = snapshot or snapshot_function()
    try:
        folder = download(name, revision=revision, allow_patterns=list(ALLOWED),
                          ignore_patterns=list(LEFT))
    except Exception as error:  # the library's error classes come from three HTTP stacks
        raise BadCheckpoint(
            f"The hub gave no {name}"
            f"{f' at revision {revision}' if revision else ''} ({type(error).__name__}). Check the "
            "name, your token and the network, or give a folder.") from error
    return Path(folder)

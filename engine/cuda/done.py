"""Which starts have compiled all their kernels on this machine, in a file.  Compiles none itself.

A note may be wrong, for Triton's cache can be emptied: a kernel that is then missing is compiled
where it is wanted.  So whatever goes wrong here is no error, and means that nothing is known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import torch
import triton

from engine.cuda.picks import stamp, store_path

log = logging.getLogger("engine.cuda.done")

ROOMS = ("cuda", "kernels", "models", "layers.py")  # of engine/: what decides which kernels exist
KEPT = 100  # starts that are remembered


class Done:
    """The note of one kind of start."""

    def __init__(self, store: Path | None, key: str) -> None:
        """`key` says all that kernels depend on; `store` is None where nothing can be kept."""
        self._store, self._key = store, key

    @classmethod
    def of(cls, device: torch.device, *facts: object) -> Done:
        """For starts on this device of which these facts, by their repr, are true."""
        try:
            picks = store_path()
            if device.type != "cuda" or picks is None:
                return cls(None, "")
            known = (stamp(device), str(triton.knobs.cache.dir), sources(), facts)
            key = hashlib.sha256(repr(known).encode()).hexdigest()
            return cls(picks.with_name("compiled.json"), key)
        except Exception as error:  # of a file, of a library that is not as we know it
            log.warning("nothing is known of earlier starts: %s", error)
            return cls(None, "")

    def noted(self) -> bool:
        """Whether such a start has compiled everything."""
        return self._key in self._read()

    def note(self) -> None:
        """Such a start has."""
        if self._store is None or self.noted():
            return
        keys = [*self._read(), self._key][-KEPT:]
        try:
            self._store.parent.mkdir(parents=True, exist_ok=True)
            part = self._store.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(keys))
            part.replace(self._store)
        except OSError as error:
            log.warning("the next start will load every kernel: %s", error)

    def _read(self) -> list[str]:
        try:
            keys = json.loads(self._store.read_text()) if self._store is not None else []
        except (OSError, ValueError):
            return []
        return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


def sources() -> str:
    """A hash of the code that says which kernels there are and what is in them."""
    engine, found = Path(__file__).parent.parent, hashlib.sha256()
    for room in ROOMS:
        path = engine / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.read_bytes())
    return found.hexdigest()

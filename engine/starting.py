"""How an engine's process is started: its command line and environment.  Starts none.

Apart from server.py, because whoever starts one wants it to run before anything else is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from engine.config import EngineConfig


def command(config: EngineConfig) -> tuple[list[str], dict[str, str]]:
    """The command line (without --socket and --parent) and the environment of an engine process."""
    # -P and a path of our own: an `engine` folder where the user happens to stand is not ours.
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return (
        [sys.executable, "-P", "-m", "engine.server",
         "--config", msgspec.json.encode(config).decode()],
        {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )

"""What the demo does when its server misbehaves.  Runs no model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).resolve().parent.parent / "samples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BOOT_S", 0.5)
    return module


@pytest.mark.timed
@pytest.mark.parametrize("program", ["import time; time.sleep(30)", "raise SystemExit(3)"])
def test_the_demo_gives_up_on_a_server_that_says_nothing(demo: ModuleType, program: str):
    start = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                          text=True) as server:  # fmt: skip
        with pytest.raises(SystemExit, match="did not start"):
            demo._url(server)
        assert time.monotonic() - start < 5
        server.kill()

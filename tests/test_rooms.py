"""The rules of the house: imports, lengths, what documents promise.  Runs no model."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("gateway", "engine", "speculative", "cache")
MAY_IMPORT = {
    "gateway": ("gateway", "engine.messages", "engine.grammar.schema", "cache.prefix"),
    "speculative": ("speculative", "engine", "cache"),
    "engine": ("engine", "cache"),
    "cache": ("cache",),
}
LINES, FUNCTION_LINES = 400, 60
OWN = {*ROOMS, "slipstream"}


def sources() -> list[Path]:
    """Every Python file of the project: committed or about to be."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )
    return [path for name in found.stdout.splitlines() if (path := ROOT / name).exists()]


def room_files() -> list[Path]:
    return [path for path in sources() if path.relative_to(ROOT).parts[0] in ROOMS]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    """Every module of ours that a file imports, anywhere in it; `from a import b` gives "a.b"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{named(path)}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.partition(".")[0] in OWN}


def allowed(room: str, module: str) -> bool:
    return any(module == one or module.startswith(one + ".") for one in MAY_IMPORT[room])


@pytest.mark.parametrize("path", room_files(), ids=named)
def test_imports_go_downward_only(path):
    room = path.relative_to(ROOT).parts[0]
    wrong = sorted(module for module in imports(path) if not allowed(room, module))
    assert not wrong, f"{named(path)} may not import {wrong}"


def test_the_import_rule_notices_what_it_forbids(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from engine import loop\n    import slipstream\n")
    assert not any(allowed("gateway", module) for module in imports(bad))
    assert allowed("gateway", "engine.messages.Submit")
    assert not allowed("gateway", "engine.messages_other.x")


@pytest.mark.parametrize(
    "module",
    ["gateway.app", "gateway.chat", "gateway.completions", "gateway.http", "gateway.socket_link",
     "slipstream", "engine.checkpoint", "engine.server", "engine.grammar.schema"],
)
def test_what_the_gateways_process_imports_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr or f"{module} loads torch"


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", sources(), ids=named)
def test_a_file_keeps_the_style(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{named(path)} does not say what it does and does not do"
    assert text.startswith('"""'), f"{named(path)}: the docstring is the first line"
    assert text.count("\n") <= LINES, f"{named(path)} has more than {LINES} lines"
    for function in functions(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= FUNCTION_LINES, f"{named(path)}: {function.name} has {length} lines"


@pytest.mark.parametrize("room", [r for r in ROOMS if (ROOT / r / "__init__.py").exists()])
def test_a_room_has_a_card_and_its_package_imports_nothing_heavy(room):
    card = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert card is not None
    assert card.split()[0] == room
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {room}; sys.exit('numpy' in sys.modules)"], cwd=ROOT
    )
    assert done.returncode == 0


def test_public_names_are_few_sorted_and_real():
    import slipstream

    assert slipstream.__all__ == sorted(slipstream.__all__)
    assert len(slipstream.__all__) <= 8
    assert all(hasattr(slipstream, name) for name in slipstream.__all__)


def test_test_folders_are_no_packages():
    assert not [named(path) for path in sources() if named(path).startswith("tests/")
                and path.name == "__init__.py"]


def commands_of(document: str) -> set[str]:
    text = (ROOT / document).read_text()
    return set(re.findall(r"(?m)^slipstream ([a-z-]+)(?!\S)", "\n".join(code_of(text))))


def code_of(text: str) -> list[str]:
    """Fenced blocks and inline code of a document."""
    return re.findall(r"```\w*\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_documents_name_only_commands_and_files_that_exist(document):
    import slipstream

    assert commands_of(document) <= set(slipstream.cli.commands)
    text = (ROOT / document).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for code in code_of(text):
        assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= targets
        for path in re.findall(r"\b(?:gateway|engine|cache|tests|samples)/[\w/]*(?:\.\w+)?", code):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_the_readmes_first_screen_fits_25_lines_and_shows_how_to_run_it():
    first = (ROOT / "README.md").read_text().split("\n## ")[0].strip()
    assert first.count("\n") < 25
    assert "make demo" in first
    assert "curl" in first


def test_python_in_the_readme_compiles():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")

"""Launch stubs come from files of their own.  Compiles with the C compiler where there is one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from engine.kernels import launch, stubs

SOURCE = """
#include <Python.h>
static PyObject* which(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"which", which, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "stub", NULL, -1, methods};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&def); }
"""


def load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(folder: Path, number: int) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    include = Path(sysconfig.get_paths()["include"])
    if compiler is None or not (include / "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python")
    source, out = folder / f"{number}.c", folder / f"{number}.so"
    source.write_text(SOURCE % number)
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", "-o", out, source], check=True)
    return out


def test_a_number_that_another_stub_had_does_not_lend_its_code(tmp_path):
    """What the cache of two starts does: the number under which one was loaded is another's now."""
    first, second = built(tmp_path, 1), built(tmp_path, 2)
    way, one, two = stubs.apart(load), tmp_path / "one.so", tmp_path / "two.so"
    shutil.copy(first, one)
    assert way("stub", str(one)).which() == 1
    os.link(one, two)
    two.write_bytes(second.read_bytes())  # the same inode: Python itself would find `one`
    assert two.stat().st_ino == one.stat().st_ino
    assert way("stub", str(two)).which() == 2


def test_a_stub_is_loaded_once_from_a_file_that_nobody_else_has(tmp_path):
    path, seen = tmp_path / "stub.so", []
    path.write_bytes(b"content")

    def remember(name: str, where: str) -> ModuleType:
        seen.append(where)
        assert Path(where).read_bytes() == b"content"
        return ModuleType(name)

    way = stubs.apart(remember)
    assert way("stub", str(path)) is way("stub", str(path))
    assert len(seen) == 1 and seen[0] != str(path) and not Path(seen[0]).exists()


def test_where_no_copy_can_be_run_from_it_is_loaded_where_it_is(tmp_path):
    """As where /tmp is mounted noexec."""
    path = tmp_path / "stub.so"
    path.write_bytes(b"content")

    def there_only(name: str, where: str) -> ModuleType:
        if where != str(path):
            raise ImportError("failed to map segment from shared object")
        return ModuleType(name)

    assert stubs.apart(there_only)("stub", str(path)).__name__ == "stub"
    with pytest.raises(ImportError):
        stubs.apart(lambda name, where: there_only(name, where + "x"))("stub", str(path))


def test_triton_loads_so_once_kernels_are_there():
    assert launch is not None
    load_now = getattr(stubs.build, "_load_module_from_path", None)
    if load_now is None:
        pytest.skip("this Triton has no stubs")
    assert load_now.__module__ == stubs.__name__
    stubs.install()
    assert stubs.build._load_module_from_path is load_now

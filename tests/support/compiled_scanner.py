"""The scanner of traces, compiled for a test if this machine has a compiler."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "analyzer" / "readers" / "kineto" / "event_scanner.c"


def compile_scanner(folder: Path, *options: str) -> Path:
    """Compiles it with all warnings as errors; skips the test without a compiler and headers."""
    compiler, headers = shutil.which("gcc"), Path(sysconfig.get_path("include"))
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("no compiler, or no headers of Python")
    library = folder / "event_scanner.so"
    stable = "-DPy_LIMITED_API=0x030B0000"  # as setup.py does
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", stable, f"-I{headers}", *options]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


def load_scanner(library: Path) -> ModuleType:
    """The compiled module."""
    loader = ExtensionFileLoader("event_scanner", str(library))
    spec = importlib.util.spec_from_loader("event_scanner", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module

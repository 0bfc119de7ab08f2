"""Each place that starts a process, deletes, or makes a temporary or a private file has a reason.

A process of ours imports nothing from the current folder; a deletion hits what we made; a file in a
place that others may write is no one else's. Whoever adds a place says why that holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("analyzer", "collectors", "dashboard")

WATCHED = {
    "asyncio": ("create_subprocess_exec", "create_subprocess_shell"),
    "concurrent.futures": ("ProcessPoolExecutor",),
    "ctypes": ("CDLL",),
    "multiprocessing": ("Manager", "Pipe", "Pool", "Process", "get_context", "set_start_method"),
    "os": ("fork", "forkpty", "link", "makedirs", "mkdir", "mkfifo", "mknod", "open", "popen",
           "remove", "removedirs", "rmdir", "symlink", "system", "unlink"),
    "pty": ("fork", "spawn"),
    "shutil": ("rmtree",),
    "subprocess": ("Popen", "call", "check_call", "check_output", "getoutput", "run"),
    "sys": ("executable",),
    "tempfile": ("NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory",
                 "TemporaryFile", "gettempdir", "mkdtemp", "mkstemp", "mktemp", "tempdir"),
}  # fmt: skip
FAMILIES = ("os.exec", "os.posix_spawn", "os.spawn")
METHODS = ("mkdir", "rmdir", "rmtree", "symlink_to", "unlink")
"""Of a path, or of anything else."""
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that others may write to, in texts."""

REASONS: dict[str, str] = {}
"""file function what: why it harms nobody."""


def test_each_place_has_a_reason() -> None:
    found = {place for file in list_modules() for place in list_places(file)}

    new = "".join(f'\n    "{place}": "...",' for place in sorted(found - set(REASONS)))
    assert not new, f"say in REASONS of {Path(__file__).name} why it harms nobody:{new}"
    gone = sorted(set(REASONS) - found)
    assert not gone, f"remove from REASONS what is no more: {gone}"


def test_a_place_is_found_however_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import os, shutil as files, subprocess\n"
        "from tempfile import mkdtemp\n"
        "FOLDER = '/tmp/ours'\n"
        "class Job:\n"
        "    '''Not /tmp/ours, which is a docstring.'''\n"
        "    process: subprocess.Popen[bytes]\n"
        "    def end(self, path):\n"
        "        stack.callback(files.rmtree, mkdtemp())\n"
        "        os.execv('x', ['x'])\n"
        "        path.unlink()\n"
        "        def inner():\n"
        "            from subprocess import run\n"
        "            run(['x'])\n"
    )

    assert {place.removeprefix(f"{file} ") for place in list_places(file)} == {
        "module '/tmp/ours'",
        "Job.end shutil.rmtree",
        "Job.end tempfile.mkdtemp",
        "Job.end os.execv",
        "Job.end .unlink",
        "Job.end.inner subprocess.run",
    }


def list_modules() -> Iterator[Path]:
    return (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))


def list_places(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    names = _list_imports(tree)
    where = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
    for function, node in _walk(tree, ""):
        if what := _describe(node, names):
            yield f"{where} {function or 'module'} {what}"


def _list_imports(tree: ast.Module) -> dict[str, str]:
    """The dotted name of each name that is imported anywhere in the module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def _walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """All nodes but annotations and docstrings, each with the function that it is in."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_docstring(child):
                continue
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".strip(".")
            yield inner, child
            yield from _walk(child, inner)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _describe(node: ast.AST, names: dict[str, str]) -> str:
    """What the node is, if a place with it needs a reason; else ""."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        is_shared = any(f"{node.value}/".startswith(f"{place}/") for place in SHARED)
        return repr(node.value) if is_shared else ""
    if not isinstance(node, ast.Name | ast.Attribute):
        return ""
    head, _, rest = ast.unparse(node).partition(".")
    dotted = f"{names.get(head, head)}.{rest}".strip(".")
    module, _, last = dotted.rpartition(".")
    if last in WATCHED.get(module, ()) or dotted.startswith(FAMILIES):
        return dotted
    return f".{last}" if isinstance(node, ast.Attribute) and node.attr in METHODS else ""

"""Docstrings name what exists: old names of functions leave no trace, arguments are those of the
signature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from griffe import Docstring, DocstringSectionParameters

ROOT = Path(__file__).parents[1]
ROOMS = ("analyzer", "collectors", "dashboard")
TOPS = (*ROOMS, "docs", "examples", "sample_traces", "tests")
FOLDERS = {*TOPS, *(path.name for top in TOPS for path in (ROOT / top).rglob("*/"))}

OTHERS = {
    "adamw_torch_fused": "an optimizer's name in transformers",
    "basis_kind": "a column of findings_frame",
    "collective_cpu": "an event of the NCCL inspector plugin",
    "generate_trace_with_counters": "a method of HTA",
    "get_frequent_cuda_kernel_sequences": "a method of HTA",
    "kernel_cpu": "an event of the NCCL inspector plugin",
    "kernel_gpu": "an event of the NCCL inspector plugin",
    "my_sum": "a kernel in an example",
    "nvjet_qqtst": "a kernel of cuBLAS",
    "overlay_critical_path_analysis": "a method of HTA",
    "parallel_state": "a module of Megatron-LM",
    "t_reference": "a symbol of a formula",
    "tensor_and_data_parallel_with_cp": "a group of Megatron-LM",
    "test_step": "a test in an example",
    "validate_args": "an option of torch.distributed.pipelining",
    "xpu_driver": "a category of Kineto",
}
"""Names of other packages that no line of code here uses, and what they are."""


@cache
def read_names() -> tuple[frozenset[str], dict[str, list[str]]]:
    """The words of all code without docstrings, and the places of each name in a docstring."""
    code: set[str] = set()
    named: dict[str, list[str]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        lines = path.read_text().split("\n")
        for node in ast.walk(ast.parse("\n".join(lines))):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (is_text and isinstance(node.value.value, str)):
                continue
            for name in find_names(node.value.value):
                named.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        code |= set(re.findall(r"[A-Za-z_]\w*", "\n".join(lines)))
    return frozenset(code), named


def find_names(text: str) -> set[str]:
    """Names in backticks, and words with an underscore. A path or a file's name is no such name."""
    quoted, plain = (
        r"`_*([A-Za-z]\w*)(?:\(\))?`",
        r"(?<![\w./-])([a-z]+(?:_[a-z]+)+)(?![\w/]|[.-]\w)",
    )
    found = re.findall(f"{quoted}|{plain}", text)
    return {one or other for one, other in found}


def test_docstrings_name_what_exists() -> None:
    code, named = read_names()
    words = {word.lstrip("_") for word in code} | code
    absent = {
        name: places
        for name, places in named.items()
        if name not in words and name not in OTHERS and name not in FOLDERS
    }
    assert absent == {}


def test_no_name_of_others_is_listed_in_vain() -> None:
    code, named = read_names()
    assert set(OTHERS) <= set(named) - code


def test_docstrings_have_the_arguments_of_the_signature() -> None:
    wrong = {}
    for place, function in list_functions():
        sections = Docstring(ast.get_docstring(function) or "").parse("google", warnings=False)
        named = [
            each.name.lstrip("*")
            for section in sections
            if isinstance(section, DocstringSectionParameters)
            for each in section.value
        ]
        of_function = function.args
        arguments = [*of_function.posonlyargs, *of_function.args, *of_function.kwonlyargs]
        arguments += [each for each in (of_function.vararg, of_function.kwarg) if each is not None]
        expected = {each.arg for each in arguments} - {"self", "cls"}
        if named and set(named) != expected:
            wrong[place] = sorted(set(named) ^ expected)
    assert wrong == {}


def list_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if "Args:" in text else "")):
            if isinstance(node, ast.FunctionDef) and "Args:" in (ast.get_docstring(node) or ""):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node

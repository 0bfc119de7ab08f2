"""python -m generate.docs_api: docs/api.md from the public docstrings, by griffe2md."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import griffe
import griffe2md

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
PACKAGES = ("stepsplit.analyzer", "stepsplit.collectors")
BRIDGE = ("stepsplit.analyzer.hta", "open_in_hta")

HEAD = """# Python API

The names that `stepsplit.analyzer` and `stepsplit.collectors` export. Times are integer
nanoseconds, sizes bytes, ratios 0..1. `python -m generate.docs_api` (in tests/) generates this
page from the docstrings.
"""

LINK = re.compile(r"\[([^\]]+)\]\(#[^)]*\)")
"""Links to types of other packages, which this page does not describe."""

CONFIG: dict[str, object] = {
    "separate_signature": False,
    "show_signature_annotations": False,
    "show_object_full_path": False,
    "show_root_full_path": False,
    "show_root_members_full_path": False,
    "show_if_no_docstring": False,
    "show_bases": False,
    "summary": False,
    "heading_level": 3,
    "line_length": 100,
    "members_order": "source",
}


def build_page() -> str:
    """The whole page: functions of each package, then its types."""
    parts = [HEAD]
    for name in PACKAGES:
        package = _load(name)
        # griffe does not run lazy_loader, which sets __all__.
        exported = sorted(importlib.import_module(name).__all__, key=str.lower)
        functions = [one for one in exported if _find(package, one).is_function]
        types = [one for one in exported if _find(package, one).is_class]
        parts += [f"## {name}\n", *_render(package, functions)]
        if name == PACKAGES[0]:
            parts += _render(_load(BRIDGE[0]), [BRIDGE[1]])
        parts += [f"## Types of {name}\n", *_render(package, types)]
    return "\n".join(parts).rstrip() + "\n"


def _load(name: str) -> griffe.Module:
    found = griffe.load(
        name, search_paths=[str(ROOT / ".ns")], docstring_parser="google", resolve_aliases=True
    )
    return cast(griffe.Module, found)


def _find(package: griffe.Module, name: str) -> griffe.Object:
    found = package[name]
    return cast(griffe.Object, found.final_target if found.is_alias else found)


def _render(package: griffe.Module, names: list[str]) -> Iterator[str]:
    for name in names:
        found = _find(package, name)
        text = griffe2md.render_object_docs(found, CONFIG)
        _, _, body = LINK.sub(r"\1", text).partition("\n")
        code = "\n".join(_declare(found))
        yield f"### `{package.path}.{name}`\n\n```python\n{code}\n```\n{body}"


def _declare(found: griffe.Object) -> list[str]:
    """The signature of a function or the fields of a class, a line for each parameter or field."""
    if isinstance(found, griffe.Function):
        lines = [f"    {_declare_parameter(one)}," for one in found.parameters]
        return [f"def {found.name}(", *lines, f") -> {found.returns}"]
    fields = [
        f"    {name}: {member.annotation}" + (f" = {member.value}" if member.value else "")
        for name, member in found.members.items()
        if isinstance(member, griffe.Attribute) and _is_field(member)
    ]
    return [f"class {found.name}:", *fields] if fields else [f"class {found.name}"]


def _declare_parameter(parameter: griffe.Parameter) -> str:
    star = "*" if parameter.kind == griffe.ParameterKind.var_positional else ""
    default = f" = {parameter.default}" if parameter.default and not star else ""
    return f"{star}{parameter.name}: {parameter.annotation}{default}"


def _is_field(member: griffe.Attribute) -> bool:
    return (
        not member.name.startswith("_")
        and member.annotation is not None
        and ("property" not in member.labels)
    )


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")

"""Writes the tables of docs/privacy.md that say what `stepsplit redact` copies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from stepsplit.analyzer.redact import fields, forms
from stepsplit.analyzer.redact.fields import ENTRY_FIELDS, EVENT_ARGS, METADATA_ARGS, NAME_FIELDS
from stepsplit.analyzer.redact.forms import AnyKey, Form, Rule, TextOr
from stepsplit.analyzer.trace import Category

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
_BEGIN, _END = "<!-- tests/generate/docs_privacy.py writes this -->\n", "<!-- to here -->\n"

FILES: dict[str, Rule] = {
    "`run.json`": fields.RUN_FIELDS,
    "rank record": fields.RECORD_FIELDS,
    "trace, around the events": fields.TRACE_FIELDS,
    "trace, an event": {
        **ENTRY_FIELDS,
        **{f"name of a {Category(code).name}": form for code, form in NAME_FIELDS.items()},
        "name of metadata": forms.METADATA,
    },
    "trace, `args`": EVENT_ARGS,
    "trace, `args` of metadata": METADATA_ARGS,
    "Flight Recorder dump": fields.FLIGHT_FIELDS,
    "`job.toml`, in any table": {
        key: rule.form if isinstance(rule, TextOr) else rule
        for key, rule in fields.JOB_FIELDS.items()
    },
}


def list_fields(rule: Rule, path: str = "") -> Iterator[tuple[str, Form]]:
    """The path of each field and its form."""
    match rule:
        case Form():
            yield path, rule
        case TextOr():
            yield path, rule.form
            yield from list_fields(rule.fields, path)
        case AnyKey():
            yield f"{path}.*", rule.form
            yield from list_fields(rule.rule, f"{path}.*")
        case list() | tuple():
            for number, inner in enumerate(rule):
                at = "" if isinstance(rule, list) else str(number)
                yield from list_fields(inner, f"{path}[{at}]")
        case _:
            for key, inner in rule.items():
                yield from list_fields(inner, f"{path}.{key}" if path else key)


def format_tables() -> str:
    """Both tables: the forms, and the fields of each file by form."""
    used: dict[str, Form] = {}
    rows = []
    for file, rule in FILES.items():
        by_form = defaultdict(list)
        for path, form in list_fields(rule):
            used[form.name] = form
            by_form[form.name].append(f"`{path}`")
        for name, paths in by_form.items():
            rows.append(f"| {file} | {name} | {', '.join(sorted(set(paths)))} |")
    lines = ["| form | what stays of a text |", "|---|---|"]
    lines += [f"| {name} | {form.says} |" for name, form in sorted(used.items())]
    return "\n".join([*lines, "", "| file | form | fields |", "|---|---|---|", *rows]) + "\n"


def build_page(text: str) -> str:
    """The page with the tables of now."""
    pattern = re.escape(_BEGIN) + r".*" + re.escape(_END)
    return re.sub(pattern, lambda _: _BEGIN + format_tables() + _END, text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(build_page(PAGE.read_text()))

"""The JSON that stepsplit writes, as JSON Schema (draft 2020-12), generated from the types.

Within a version of a format (the number in its "schema") changes are additive: a document of today
is valid under each earlier schema of that version, so that what reads it goes on working.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from stepsplit.analyzer.diagnose.hang.result import SCHEMA as HANG, Hang
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.prediction import SCHEMA as PREDICTION, ComputePart, UnstatedKey
from stepsplit.analyzer.regression.checks import SCHEMA as CHECK, CheckResult
from stepsplit.analyzer.regression.compare import SCHEMA as COMPARISON, ComparisonFile
from stepsplit.analyzer.report.ledger import SCHEMA as LEDGER, Ledger
from stepsplit.analyzer.report.meanings import read_meanings
from stepsplit.analyzer.report.report import (
    SCHEMA as REPORT,
    Finding,
    PredictedMemory,
    PredictionRow,
    Report,
)
from stepsplit.analyzer.report.roles import SCHEMA as ROLES, RoleJob

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class StageMemoryFile(PredictedMemory, frozen=True):
    """Predicted peak bytes on one rank of a stage, by category, and their sum with its band.

    Attributes:
        total_bytes_low: lower end of the band; None if it is unknown.
        total_bytes_high: upper end of the band; None if it is unknown.
        missing_gradients_bytes: gradients that are never held.
        frozen_bytes: weights that are not trained.
    """

    total_bytes_low: int | None = None
    total_bytes_high: int | None = None
    missing_gradients_bytes: int = 0
    frozen_bytes: int = 0


class BoundFile(msgspec.Struct, frozen=True):
    """The least time of a step by physics alone.

    Attributes:
        ns: the time that the busiest resource needs at the peak of its data sheet.
        resource: that resource.
        resources: each resource with its time in ns.
    """

    ns: int
    resource: str
    resources: dict[str, int]


class PredictionFile(PredictionRow, frozen=True, kw_only=True):
    """A prediction as `stepsplit model --json` writes it: that of a report, and what moves it.

    Attributes:
        unstated: keys that the job leaves out and that move the step, the largest first.
        read_as: what of the job's files was read as which key.
        bound: the least time of the step by physics alone; None if it is unknown.
        compute_parts: compute and host waits of the slowest stage by kinds of kernels.
        fit_chance: how sure it is that every stage fits, 0..1; None if unknown.
    """

    memory: tuple[StageMemoryFile, ...]
    unstated: tuple[UnstatedKey, ...] = ()
    read_as: tuple[str, ...] = ()
    bound: BoundFile | None = None
    compute_parts: tuple[ComputePart, ...] = ()
    fit_chance: float | None = None


@dataclass(frozen=True, slots=True)
class SchemaEntry:
    """A JSON document with a schema.

    Attributes:
        content: the type of its content.
        version: the text of its key "schema"; None for a part of a report.
        written_by: the commands that write it.
    """

    content: type
    version: str | None
    written_by: str


SCHEMAS = {
    "report": SchemaEntry(Report, REPORT, "stepsplit analyze --json, --out (report.json)"),
    "prediction": SchemaEntry(PredictionFile, PREDICTION, "stepsplit model --json"),
    "ledger": SchemaEntry(
        Ledger, LEDGER, "stepsplit analyze FOLDER_OF_A_WATCH --json, --out (ledger.json)"
    ),
    "roles": SchemaEntry(
        RoleJob, ROLES, "stepsplit analyze FOLDER_OF_ROLES --json, --out (roles.json)"
    ),
    "hang": SchemaEntry(Hang, HANG, "stepsplit hang --json, analyze --out (hang.json)"),
    "check": SchemaEntry(CheckResult, CHECK, "stepsplit check --json"),
    "comparison": SchemaEntry(ComparisonFile, COMPARISON, "stepsplit compare --json"),
    "finding": SchemaEntry(Finding, None, "an item of report.json's findings"),
}
"""Entries by the name that `stepsplit schema` takes."""


def build_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a document, each property with its meaning and unit.

    Raises UsageError for an unknown name.
    """
    entry = SCHEMAS.get(name)
    if entry is None:
        raise UsageError(f"no schema {name!r}; there are: {', '.join(SCHEMAS)}")
    # Tables of a job.toml have values of any type, which msgspec writes no schema for.
    (root,), parts = msgspec.json.schema_components(
        [entry.content],
        schema_hook=lambda _: {"description": "any value"},
        ref_template="#/$defs/{name}",
    )
    # msgspec 0.18 puts the null of an optional value first: one order with each version.
    parts = json.loads(json.dumps(parts), object_hook=_put_null_last)
    types = {one.__name__: one for one in _list_types(entry.content)}
    parts = {part: _describe(schema, types[part]) for part, schema in sorted(parts.items())}
    top = parts.pop(root["$ref"].rpartition("/")[2])
    if entry.version is not None:
        top["properties"]["schema"] = {"const": entry.version}
        top["required"] = ["schema", *(k for k in top["required"] if k != "schema")]
    head = {"$schema": DIALECT, "title": entry.version or f"a {name} of {REPORT}"}
    return head | {key: value for key, value in top.items() if key != "title"} | {"$defs": parts}


def schema_to_json(name: str) -> str:
    """The JSON Schema of a document as text. Raises UsageError for an unknown name."""
    return json.dumps(build_schema(name), indent=1) + "\n"


def _list_types(content: type) -> list[type]:
    """The structs and dataclasses of which the content consists."""
    found: list[type] = []

    def visit(node: msgspec.inspect.Type) -> None:
        own = getattr(node, "cls", None)
        if own is not None:
            if own in found:
                return
            found.append(own)
        for name in ("fields", "types", "item_types"):
            for child in getattr(node, name, ()):
                visit(getattr(child, "type", child))
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(node, name):
                visit(getattr(node, name))

    visit(msgspec.inspect.type_info(content))
    return found


def _put_null_last(node: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in node:
        node["anyOf"].sort(key=lambda one: one.get("type") == "null")
    return node


def _describe(schema: dict[str, Any], own: type) -> dict[str, Any]:
    """The schema with the docstring's first part as description, and that of each attribute."""
    text = inspect.getdoc(own) or ""
    summary = re.split(r"\n\s*\n(?=\w+:\n)", text, maxsplit=1)[0]
    meanings = read_meanings(own)
    properties = {
        name: one | ({"description": meanings[name]} if name in meanings else {})
        for name, one in schema.get("properties", {}).items()
    }
    return schema | {"description": " ".join(summary.split())} | {"properties": properties}


def list_meanings(name: str) -> tuple[tuple[str, str], ...]:
    """The fields of this name in all documents, each with what it means."""
    rows: dict[str, str] = {}
    for entry in SCHEMAS.values():
        for own in _list_types(entry.content):
            meaning = read_meanings(own).get(name)
            if meaning is not None:
                rows.setdefault(f"{own.__name__}.{name}", meaning)
    return tuple(rows.items())

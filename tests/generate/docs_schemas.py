"""Writes docs/schemas: the JSON Schema of each result. cd tests && python -m generate.docs_schemas

Refuses what is more than an additive change, unless the number of the format was raised.
"""

from __future__ import annotations

import json
from pathlib import Path

from support.schema_changes import find_breaking_changes

from stepsplit.analyzer.schemas import SCHEMAS, build_schema, schema_to_json

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def write_schemas(folder: Path) -> None:
    """Writes a file for each schema. Raises SystemExit for a change that breaks readers."""
    folder.mkdir(exist_ok=True)
    for name in SCHEMAS:
        path = folder / f"{name}.json"
        if path.exists():
            old, new = json.loads(path.read_text()), build_schema(name)
            if old["title"] == new["title"] and (broken := find_breaking_changes(old, new)):
                raise SystemExit(f"{path}: {'; '.join(broken)}: raise the number of the format")
        path.write_text(schema_to_json(name))


if __name__ == "__main__":
    write_schemas(FOLDER)

"""json.load of each file, one after the other; all are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.opens.telling import open_and_tell


def _loaded(paths: list[str]) -> list[Any]:
    found = []
    for path in paths:
        with Path(path).open() as file:
            found.append(json.load(file))
    return found


def _events_in(traces: list[Any]) -> int:
    return sum(event.get("ph") == "X" for trace in traces for event in trace["traceEvents"])


if __name__ == "__main__":
    open_and_tell(lambda: _loaded(sys.argv[1:]), _events_in)

"""Measures the trace readers: python tests/benchmarks/readers.py

Builds large traces from a real one, opens them with stepsplit, json.load and HTA, and prints one
table of times, ratios and peak memory. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.contestants import Contestant, contestants
from benchmarks.inputs import LARGE_BYTES, SAMPLE, SMALL_BYTES, built, default_source
from benchmarks.measuring import runs_of
from benchmarks.rows import Row, rows_of
from benchmarks.table import table_of
from benchmarks.targets import missed

_LIBRARIES = ("stepsplit", "msgspec", "numpy", "pyarrow", "isal", "pandas", "traceinsight")


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every target is met, 1 where one is missed; a quick run is not judged."""
    args = _arguments(argv)
    source = args.source or (SAMPLE if args.quick else default_source())
    least_bytes = SMALL_BYTES if args.quick else LARGE_BYTES
    with nullcontext(args.work) if args.work else tempfile.TemporaryDirectory() as folder:
        _say(f"building {least_bytes // 1_000_000} MB of {source.name}")
        everyone = contestants(built(source, least_bytes, Path(folder).resolve()))
        rows = rows_of(everyone, runs_of(everyone, args.repeat, _say))
    failures = () if args.quick else missed(rows)
    conditions = _conditions(source, everyone, rows)
    sys.stdout.write(f"{conditions}\n\n{table_of(rows, not args.quick)}\n")
    sys.stdout.writelines(f"{line}\n" for line in failures)
    if args.json:
        args.json.write_text(_as_json(conditions, rows, failures))
    return 1 if failures else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the trace readers.")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="the trace to repeat"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where the large traces are built, and stay"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("--quick", action="store_true", help="small traces, nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    return parser.parse_args(argv)


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _conditions(source: Path, everyone: Sequence[Contestant], rows: Sequence[Row]) -> str:
    """What was opened, and by which versions."""
    size = everyone[0].json_bytes / 1e6
    what = f"{source.name}, repeated: {size:.1f} MB of JSON, {rows[0].events:,} complete events"
    libraries = ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)
    return f"{what}\n{os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _as_json(conditions: str, rows: Sequence[Row], failures: Sequence[str]) -> str:
    result = {"conditions": conditions, "rows": list(map(asdict, rows)), "missed": failures}
    return json.dumps(result, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())

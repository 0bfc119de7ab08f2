"""Measures the split: python tests/benchmarks/split.py

Builds recordings of 8 ranks with more and more collectives and messages, and prints one table of
what the analysis takes beside the reading, and how it grows. Ends with 1 where a target is missed.
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
from importlib.metadata import version
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.contestants import Contestant
from benchmarks.measuring import runs_of
from benchmarks.pipelined_files import recording_of
from benchmarks.split_rows import Row, missed, rows_of, table_of

CALLS, QUICK_CALLS = (25_000, 50_000, 100_000), (400, 800)
_LIBRARIES = ("stepsplit", "msgspec", "numpy", "pyarrow")


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every target is met, 1 where one is missed; a quick run is not judged."""
    args = _arguments(argv)
    with nullcontext(args.work) if args.work else tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        rows = measured(QUICK_CALLS if args.quick else CALLS, home, args.repeat)
    failures = () if args.quick else missed(rows)
    sys.stdout.write(f"{_conditions()}\n\n{table_of(rows, not args.quick)}\n")
    sys.stdout.writelines(f"{line}\n" for line in failures)
    if args.json:
        result = {"conditions": _conditions(), "rows": list(map(asdict, rows)), "missed": failures}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if failures else 0


def measured(sizes: Sequence[int], folder: Path, repeat: int) -> tuple[Row, ...]:
    """A row for each number of calls; recordings that the folder holds are not built again."""
    places = {}
    for calls in sizes:
        _say(f"building {calls:,} calls")
        places[calls] = recording_of(calls, folder)
    size = {calls: sum(f.stat().st_size for f in at.iterdir()) for calls, at in places.items()}
    examining, reading = (
        [one(calls, place, size[calls]) for calls, place in places.items()]
        for one in (_examining, _reading)
    )
    runs = runs_of([*examining, *reading], repeat, _say)
    whole = {calls: runs[one.key] for calls, one in zip(sizes, examining, strict=True)}
    read = {calls: runs[one.key][0] for calls, one in zip(sizes, reading, strict=True)}
    return rows_of(size, whole, read)


def _examining(calls: int, place: Path, json_bytes: int) -> Contestant:
    key, title = f"examine{calls}", f"{calls:,} calls"
    return Contestant(key, title, "with_examine", (str(place),), json_bytes)


def _reading(calls: int, place: Path, json_bytes: int) -> Contestant:
    """Only for the memory that reading alone needs."""
    key, title = f"read{calls}", f"{calls:,} calls, reading alone"
    arguments = ("1", "1", str(place))
    return Contestant(key, title, "with_stepsplit", arguments, json_bytes, once=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the split.")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where the recordings are built, and stay"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("--quick", action="store_true", help="small recordings, nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    return parser.parse_args(argv)


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _conditions() -> str:
    """On what and by which versions."""
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"


if __name__ == "__main__":
    sys.exit(main())

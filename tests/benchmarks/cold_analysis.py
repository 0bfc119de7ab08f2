"""Compares whole commands: python tests/benchmarks/cold_analysis.py --trace-processor FILE TRACE...

Analyzes each trace with one worker and without the cache, and loads it with Perfetto's
trace_processor_shell for one query, in turns. Prints the CPU seconds of each (user and system) with
the ratio of each pair, the spread of the ratios, and the most memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown

_QUERY = "select count(*) from slice;\n"

_HEAD: tuple[str, ...] = (
    "trace", "MB", "Perfetto CPU s", "stepsplit CPU s", "ratio", "ratios of the pairs",
    "Perfetto peak MB", "stepsplit peak MB", "peak of file",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process took: CPU seconds, and the most bytes that were resident at once."""

    cpu_seconds: float
    peak_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each trace."""
    parser = argparse.ArgumentParser(description="Compare cold analysis with Perfetto's loading.")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--trace-processor", type=Path, required=True, metavar="FILE")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="pairs of each (5)")
    args = parser.parse_args(argv)
    rows = [_HEAD]
    with tempfile.TemporaryDirectory() as folder:
        query = Path(folder) / "query.sql"
        query.write_text(_QUERY)
        for trace in args.traces:
            load = [str(args.trace_processor), "-q", str(query), str(trace)]
            pairs = [(measure(load), measure_analysis(trace)) for _ in range(args.repeat)]
            rows.append(_describe(trace, pairs))
    sys.stdout.write(f"{in_markdown(rows)}\n")
    return 0


def measure_analysis(trace: Path) -> Cost:
    """What `stepsplit analyze` takes, with its start."""
    command = [sys.executable, "-m", "stepsplit.dashboard", "analyze", "--workers", "1", str(trace)]
    return measure(command, STEPSPLIT_CACHE="off")


def measure(command: Sequence[str], **environment: str) -> Cost:
    """What a command takes that ends by itself, as the kernel counts. Its output is dropped."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def _describe(trace: Path, pairs: Sequence[tuple[Cost, Cost]]) -> tuple[str, ...]:
    ratios = sorted(own.cpu_seconds / other.cpu_seconds for other, own in pairs)
    size = trace.stat().st_size
    peak, own_peak = (max(one.peak_bytes for one in side) for side in zip(*pairs, strict=True))
    return (
        str(trace),
        f"{size / 1e6:.0f}",
        f"{median(other.cpu_seconds for other, _ in pairs):.2f}",
        f"{median(own.cpu_seconds for _, own in pairs):.2f}",
        f"{median(ratios):.2f}",
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        f"{peak / 1e6:.0f}",
        f"{own_peak / 1e6:.0f}",
        f"{own_peak / size:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())

"""Compares whole commands: python tests/benchmarks/cold_analysis.py --trace-processor FILE TRACE...

Analyzes each trace with one worker and without the cache, and loads it with Perfetto's
trace_processor_shell for one query, in turns. Prints the CPU seconds of each (user and system) with
the ratio of each pair, the spread of the ratios, and the most memory; then what others take to open
the trace, once each: json.load, and HTA if it is installed.

With --packed also the trace as .gz and .zst and with two workers, in turns with the plain one, and
with --start TRACE what a small one takes above `import numpy`.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown

_QUERY = "select count(*) from slice;\n"

_HEAD: tuple[str, ...] = (
    "trace", "MB", "Perfetto CPU s", "stepsplit CPU s", "ratio", "ratios of the pairs",
    "Perfetto peak MB", "stepsplit peak MB", "peak of file", "json.load CPU s", "HTA CPU s",
)  # fmt: skip

_PACKED_HEAD = (
    "trace", ".gz of plain, CPU", "of the pairs", ".zst of plain, CPU", "of the pairs",
    "one worker of two, elapsed", "of the pairs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process took: CPU seconds, and the most bytes that were resident at once.

    elapsed_seconds depends on what else the machine does.
    """

    cpu_seconds: float
    peak_bytes: int
    elapsed_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each trace."""
    parser = argparse.ArgumentParser(description="Compare cold analysis with Perfetto's loading.")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--trace-processor", type=Path, required=True, metavar="FILE")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="pairs of each (5)")
    parser.add_argument("--packed", action="store_true", help="also .gz, .zst and two workers")
    parser.add_argument("--start", type=Path, metavar="TRACE", help="also a small one")
    args = parser.parse_args(argv)
    rows, packed = [_HEAD], [_PACKED_HEAD]
    with tempfile.TemporaryDirectory() as folder:
        query = Path(folder) / "query.sql"
        query.write_text(_QUERY)
        for trace in args.traces:
            load = [str(args.trace_processor), "-q", str(query), str(trace)]
            pairs = [(measure(load), measure_analysis(trace)) for _ in range(args.repeat)]
            rows.append((*_describe(trace, pairs), *_measure_others(trace)))
            if args.packed:
                packed.append(_compare_packed(trace, Path(folder), args.repeat))
    sys.stdout.write(f"{in_markdown(rows)}\n")
    if args.packed:
        sys.stdout.write(f"\n{in_markdown(packed)}\n")
    if args.start is not None:
        numpy = [sys.executable, "-c", "import numpy"]
        starts = [
            measure_analysis(args.start).cpu_seconds - measure(numpy).cpu_seconds
            for _ in range(2 * args.repeat)
        ]
        found = f"{median(starts):.2f} CPU s ({min(starts):.2f} to {max(starts):.2f})"
        sys.stdout.write(f"\nanalyze of {args.start} above import numpy: {found}\n")
    return 0


def measure_analysis(trace: Path, workers: int = 1) -> Cost:
    """What `stepsplit analyze` takes, with its start."""
    program = [sys.executable, "-m", "stepsplit.dashboard", "analyze"]
    command = [*program, "--workers", str(workers), str(trace)]
    return measure(command, STEPSPLIT_CACHE="off")


def measure(command: Sequence[str], **environment: str) -> Cost:
    """What a command takes that ends by itself, as the kernel counts. Its output is dropped."""
    begin = time.monotonic()
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
    elapsed = time.monotonic() - begin
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, elapsed)


def _measure_others(trace: Path) -> tuple[str, str]:
    """The CPU seconds of json.load and of HTA, with their starts."""
    tests = str(Path(__file__).parents[1])
    costs = [
        measure([sys.executable, "-m", f"benchmarks.opens.{program}", str(trace)], PYTHONPATH=tests)
        if find_spec(package)
        else None
        for program, package in (("with_json", "json"), ("with_hta", "hta"))
    ]
    json_load, hta_load = (f"{cost.cpu_seconds:.2f}" if cost else "" for cost in costs)
    return json_load, hta_load


def _compare_packed(trace: Path, folder: Path, repeat: int) -> tuple[str, ...]:
    """A row: the trace packed and with two workers, each in turns with the plain one."""
    # Beside each other in a folder of its own, the files would be ranks of one recording.
    gz, zst = folder / "gz" / "trace.json.gz", folder / "zst" / "trace.json.zst"
    for file in (gz, zst):
        file.parent.mkdir(exist_ok=True)
    gz.write_bytes(gzip.compress(trace.read_bytes(), 6))
    subprocess.run(["zstd", "-q", "-f", str(trace), "-o", str(zst)], check=True)
    by_gz, by_zst, by_two = list[float](), list[float](), list[float]()
    for _ in range(repeat):
        plain = measure_analysis(trace)
        by_gz.append(measure_analysis(gz).cpu_seconds / plain.cpu_seconds)
        by_zst.append(measure_analysis(zst).cpu_seconds / plain.cpu_seconds)
        by_two.append(plain.elapsed_seconds / measure_analysis(trace, 2).elapsed_seconds)
    cells = [
        cell
        for ratios in (by_gz, by_zst, by_two)
        for cell in (f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}")
    ]
    return (str(trace), *cells)


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

"""Compares whole commands: python tests/benchmarks/cold_analysis.py --trace-processor FILE TRACE...

Analyzes each trace with one worker and without the cache, and loads it with Perfetto's
trace_processor_shell for one query, in turns. Prints the CPU seconds of each (user and system) with
the ratio of each pair, the spread of the ratios, and the most memory; then what others take to open
the trace, once each, if they can: json.load, and with --hta HTA. Modules have their byte code, as
pip writes it.

With --packed also the trace as .gz and .zst and with two workers, in turns with the plain one, and
with --start TRACE what a small one takes above `import numpy`.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    parser.add_argument("--hta", action="store_true", help="also HTA, which takes a minute each")
    args = parser.parse_args(argv)
    traces = {str(trace): trace for trace in args.traces}
    others = ("json", "hta") if args.hta else ("json",)
    say(compare_loading(traces, args.trace_processor, args.repeat, others))
    if args.packed:
        with tempfile.TemporaryDirectory() as folder:
            say(compare_packed(traces, Path(folder), args.repeat))
    if args.start is not None:
        say(measure_start(args.start, 2 * args.repeat))
    return 0


def say(text: str) -> None:
    """Prints the text and an empty line, at once."""
    sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()


def compare_loading(
    traces: Mapping[str, Path], trace_processor: Path, repeat: int, others: Sequence[str] = ()
) -> str:
    """A table with a row for each trace, by its title; others: what else opens it once."""
    rows = [_HEAD]
    with tempfile.TemporaryDirectory() as folder:
        query = Path(folder) / "query.sql"
        query.write_text(_QUERY)
        for title, trace in traces.items():
            load = [str(trace_processor), "-q", str(query), str(trace)]
            # Not counted: after it, both find the file in memory, and Python its byte code.
            measure_analysis(trace)
            pairs = [(measure(load), measure_analysis(trace)) for _ in range(repeat)]
            rows.append((*_describe(title, trace, pairs), *_measure_others(trace, others)))
    return in_markdown(rows)


def compare_packed(traces: Mapping[str, Path], folder: Path, repeat: int) -> str:
    """A table of the traces packed and with two workers, each in turns with the plain one. What the
    folder holds is not packed again."""
    rows = [_PACKED_HEAD]
    for title, trace in traces.items():
        by_gz, by_zst, by_two = list[float](), list[float](), list[float]()
        gz, zst = pack(trace, folder)
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
        rows.append((title, *cells))
    return in_markdown(rows)


def pack(trace: Path, folder: Path) -> tuple[Path, Path]:
    """The trace as .gz and as .zst, each in a folder of its own: in one, they would be ranks."""
    name = trace.parent.name
    gz = folder / "gz" / name / "rank0_trace.json.gz"
    zst = folder / "zst" / name / "rank0_trace.json.zst"
    for file in (gz, zst):
        file.parent.mkdir(parents=True, exist_ok=True)
    if not gz.is_file():
        with trace.open("rb") as plain, gzip.open(gz, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
    if not zst.is_file():
        subprocess.run(["zstd", "-q", str(trace), "-o", str(zst)], check=True)
    return gz, zst


def measure_start(trace: Path, repeat: int) -> str:
    """What the analysis of a small trace takes above `import numpy`."""
    numpy = [sys.executable, "-c", "import numpy"]
    starts = [
        measure_analysis(trace).cpu_seconds - measure(numpy).cpu_seconds for _ in range(repeat)
    ]
    found = f"{median(starts):.2f} CPU s ({min(starts):.2f} to {max(starts):.2f})"
    return f"analyze of {trace} above import numpy: {found}"


def measure_analysis(trace: Path, workers: int = 1) -> Cost:
    """What `stepsplit analyze` takes, with its start."""
    program = [sys.executable, "-m", "stepsplit.dashboard", "analyze"]
    command = [*program, "--workers", str(workers), str(trace)]
    return measure(command, STEPSPLIT_CACHE="off")


def measure(command: Sequence[str], **environment: str) -> Cost:
    """What a command takes that ends by itself, as the kernel counts. Its output is dropped."""
    begin = time.monotonic()
    # As installed, with byte code: some environments do not let it be written.
    inherited = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command,
        env={**inherited, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    elapsed = time.monotonic() - begin
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, elapsed)


def _measure_others(trace: Path, others: Sequence[str]) -> tuple[str, ...]:
    """The CPU seconds of json.load and of HTA, with their starts; "" for one that is not asked for,
    not installed, or cannot open the trace."""
    tests = str(Path(__file__).parents[1])
    cells = []
    for program in ("json", "hta"):
        cell = ""
        if program in others and find_spec(program):
            opens = [sys.executable, "-m", f"benchmarks.opens.with_{program}", str(trace)]
            with suppress(subprocess.CalledProcessError):
                cell = f"{measure(opens, PYTHONPATH=tests).cpu_seconds:.2f}"
        cells.append(cell)
    return tuple(cells)


def _describe(title: str, trace: Path, pairs: Sequence[tuple[Cost, Cost]]) -> tuple[str, ...]:
    ratios = sorted(own.cpu_seconds / other.cpu_seconds for other, own in pairs)
    size = trace.stat().st_size
    peak, own_peak = (max(one.peak_bytes for one in side) for side in zip(*pairs, strict=True))
    return (
        title,
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

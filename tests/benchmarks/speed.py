"""All speeds in one run: python tests/benchmarks/speed.py --trace-processor FILE --work DIR

Prints whole analyses beside Perfetto's loading, packed and with two workers, what follows reading,
many ranks, the start, and what recording and watching cost a training. The traces and fleets are
built in DIR, once; with --prepare only that is done. --small uses small ones, whose numbers mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import overhead
from benchmarks.cold_analysis import compare_loading, compare_packed, measure_start, pack, say
from benchmarks.inputs import SAMPLE, build_cold_traces
from benchmarks.table import in_markdown

_TESTS = Path(__file__).resolve().parents[1]

_BYTES, _SMALL_BYTES = 360_000_000, 20_000_000
"""Of each trace: the goal for the peak is for files above 350 MB."""

_FLEETS = {64: (4, 2), 256: (8, 4), 1024: (16, 8)}
"""Stages and replicas of each number of ranks, of which eight are tensor parallel."""

_WATCHED_STEP_US = 35_000
"""Of which tier 0 of a watch may take 0.2 %: the step of docs/ledger.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="Measure all speeds in one run.")
    parser.add_argument("--trace-processor", type=Path, required=True, metavar="FILE")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="keeps the inputs")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="pairs of each (3)")
    parser.add_argument("--prepare", action="store_true", help="only build the inputs")
    parser.add_argument("--small", action="store_true", help="a smoke test")
    args = parser.parse_args(argv)
    work = args.work.resolve()
    sizes = list(_FLEETS)[: 1 if args.small else None]
    if args.prepare:
        for trace in _build_traces(work, args.small).values():
            pack(trace, work)
        for ranks in sizes:
            _build_fleet(ranks, work)
        return 0
    # By another process: one that has grown lends its peak to what it starts.
    prepare = [sys.executable, str(Path(__file__).resolve()), *(argv or sys.argv[1:]), "--prepare"]
    subprocess.run(prepare, check=True)
    traces = _build_traces(work, args.small)
    fleets = {ranks: _build_fleet(ranks, work) for ranks in sizes}
    say(compare_loading(traces, args.trace_processor, args.repeat))
    say(compare_packed(traces, work, max(1, args.repeat - 1)))
    say(_compare_stages(traces, fleets))
    say(measure_start(SAMPLE.parent, 2 * args.repeat + 1))
    say(_measure_recording(args.repeat, args.small))
    return 0


def _build_traces(work: Path, is_small: bool) -> dict[str, Path]:
    return build_cold_traces(_SMALL_BYTES if is_small else _BYTES, work)


def _build_fleet(ranks: int, work: Path) -> Path:
    folder, (stages, replicas) = work / f"fleet{ranks}", _FLEETS[ranks]
    if not folder.is_dir():
        draft = folder.with_suffix(".draft")
        layout = ["--pp", str(stages), "--dp", str(replicas)]
        subprocess.run(
            [sys.executable, _TESTS / "benchmarks" / "fleet.py", draft, *layout],
            check=True,
            stdout=sys.stderr,
        )
        draft.rename(folder)
    return folder


def _compare_stages(traces: Mapping[str, Path], fleets: Mapping[int, Path]) -> str:
    """A table of what follows reading, in CPU seconds of one process: of traces, and by rank."""
    rows = [("recording", "reading, CPU s", "after it", "of reading", "ms a rank", "peak MB")]
    places = {**traces, **{f"{ranks:,} ranks": folder for ranks, folder in fleets.items()}}
    n_ranks = {f"{ranks:,} ranks": ranks for ranks in fleets}
    for title, place in places.items():
        found = _run([sys.executable, "-m", "benchmarks.opens.with_examine", str(place)])
        reading, rest = found["cpu_seconds"]
        a_rank = f"{rest * 1e3 / n_ranks[title]:.0f}" if title in n_ranks else ""
        peak = f"{found['own_peak_bytes'] / 1e6:.0f}"
        ratio = f"{rest / reading:.2f}"
        rows.append((title, f"{reading:.2f}", f"{rest:.2f}", ratio, a_rank, peak))
    return in_markdown(rows)


def _measure_recording(repeat: int, is_small: bool) -> str:
    """A table of what recording and watching cost the thread that trains."""
    rows = [("cost", "measured", "of the pairs")]
    for program in ("ops",) if is_small else ("ops", "ranks"):
        blocks = overhead.blocks_of(program, 2 * repeat)
        title = overhead.TRAININGS[program]
        for what, base, field in (
            ("recorded step of an unrecorded one", "off", "step_s"),
            ("recorded step of torch.profiler's", "torch", "step_s"),
            ("end of the window of torch.profiler's", "torch", "stall_s"),
        ):
            spread = overhead.ratios(blocks, "default", base, field)
            cells = (f"{spread.median:.2f}", f"{spread.low:.2f} to {spread.high:.2f}")
            rows.append((f"{title}: {what}", *cells))
    # Steps of 80 us, in which what the watch adds to each is not hidden by noise.
    pairs = [(_step_us(), _step_us(is_watched=True)) for _ in range(repeat)]
    added = [watched - plain for plain, watched in pairs]
    share = [100 * us / _WATCHED_STEP_US for us in added]
    rows.append((f"watch without samples, % of a step of {_WATCHED_STEP_US / 1e3:g} ms",
                 f"{median(share):.3f}", f"{min(share):.3f} to {max(share):.3f}"))  # fmt: skip
    return in_markdown(rows)


def _step_us(is_watched: bool = False) -> float:
    """The median step of a training of nothing, in us."""
    train = [sys.executable, _TESTS / "benchmarks" / "overhead.py", "--program", "nothing"]
    with tempfile.TemporaryDirectory() as folder:
        watch = [sys.executable, "-m", "stepsplit.dashboard", "watch", "--every", "1000000steps",
                 "--out", folder, "--"]  # fmt: skip
        return float(_run([*(watch if is_watched else ()), *train]))


def _run(command: Sequence[str | Path]) -> Any:
    """The last line of JSON that the program prints."""
    environment = {"PYTHONPATH": str(_TESTS), "STEPSPLIT_CACHE": "off", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )
    for line in reversed(done.stdout.splitlines()):
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    raise RuntimeError(f"{command} printed no JSON")


if __name__ == "__main__":
    sys.exit(main())

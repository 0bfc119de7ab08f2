"""Measures packing of large raw traces: python tests/benchmarks/packing.py [--mb 200,1000]

Prints a table of time and peak memory, plain and thin. Ends with 1 where thin packing takes more
than half of the raw size in memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown

PACK = Path(__file__).resolve().parents[2] / "collectors" / "record" / "pack.py"
MOST_OF_RAW = 0.5
"""Peak memory of thin packing, of the raw size."""
MEASURE = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024])
sys.exit(status)
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """One packing: bytes of the raw and the packed file, seconds of a core, and peak memory."""

    thin: bool
    raw_bytes: int
    cpu_s: float
    peak_bytes: int
    packed_bytes: int


def main() -> int:
    """Measures all sizes, prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", default="200,1000", help="raw sizes (default %(default)s)")
    sizes = [int(text) for text in parser.parse_args().mb.split(",")]
    with tempfile.TemporaryDirectory(prefix="packing-") as folder:
        steps = profile_steps(Path(folder) / "steps.json")
        packed = [measure(Path(folder), steps, mb, thin) for mb in sizes for thin in (False, True)]
    rows = [
        (
            f"{each.raw_bytes / 1e6:,.0f} MB",
            "thin" if each.thin else "plain",
            f"{each.cpu_s:.1f} s",
            f"{each.peak_bytes / 1e6:,.0f} MB",
            f"{each.packed_bytes / 1e6:,.1f} MB",
        )
        for each in packed
    ]
    head = ("raw", "packing", "time of a core", "peak memory", "packed")
    sys.stdout.write(f"{in_markdown((head, *rows))}\n")
    return any(each.thin and each.peak_bytes > MOST_OF_RAW * each.raw_bytes for each in packed)


def profile_steps(path: Path) -> bytes:
    """The text of torch.profiler's events of some steps of a small training."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(50)])
    optimizer = torch.optim.Adam(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for step in range(3):
            with record_function(f"ProfilerStep#{step}"):
                model(torch.ones(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    profiler.export_chrome_trace(str(path))
    return path.read_bytes()


def write_raw(path: Path, trace: bytes, size_bytes: int) -> None:
    """A raw trace of about that size: the events of `trace` again and again, each time later."""
    begin = trace.index(b"[", trace.index(b'"traceEvents"')) + 1
    end = trace.rindex(b"]")
    parts = re.split(rb'("ts": )([0-9.]+)', trace[begin:end].strip().rstrip(b","))
    starts_us = [float(text) for text in parts[2::3]]
    span_us = max(starts_us) - min(starts_us) + 1e4
    with path.open("wb") as file:
        file.write(trace[:begin])
        for number in count():
            file.write(b",\n  " if number else b"")
            parts[2::3] = [b"%.3f" % (start + number * span_us) for start in starts_us]
            file.write(b"".join(parts))
            if file.tell() >= size_bytes:
                break
        file.write(trace[end:])


def measure(folder: Path, trace: bytes, mb: int, thin: bool) -> Packed:
    """Packs a raw trace in a process of its own, as a recording does."""
    raw, out = folder / "raw.json", folder / "rank0_trace.json.gz"
    write_raw(raw, trace, mb * 1_000_000)
    raw_bytes = raw.stat().st_size
    command = [sys.executable, "-I", "-S", str(PACK), *["--thin"] * thin, str(raw), str(out)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], check=True, capture_output=True
    )
    cpu_s, peak_bytes = json.loads(done.stdout)
    packed = Packed(thin, raw_bytes, cpu_s, peak_bytes, out.stat().st_size)
    out.unlink()
    return packed


if __name__ == "__main__":
    sys.exit(main())

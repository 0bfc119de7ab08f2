"""python cycles.py OUT CYCLES [no-gc]: records a step again and again, and says how it grew.

Prints the resident KiB after the first 20 cycles and after the last one.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch

from stepsplit.collectors.record.plan import RecordPlan
from stepsplit.collectors.record.trace_window import (
    PreparedProfilers,
    TraceWindow,
    release_profiler,
)

LAYERS, SETTLED = 30, 20


def main(out: Path, cycles: int, collect: bool) -> None:
    if not collect:
        gc.disable()
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, settled = PreparedProfilers(), 0
    for cycle in range(cycles):
        plan = RecordPlan(str(out), "cycles", first=1, steps=2)
        window = TraceWindow(plan, 1, lambda: None, prepared.is_any_waiting)
        for step in range(3):
            window.begin_step(step, step)
            model(torch.ones(8, 16)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            window.end_step(step)
        profiler = window.end()
        profiler.export_chrome_trace(str(out / "trace.json"))
        release_profiler(profiler)
        if cycle + 1 == SETTLED:
            settled = read_resident_kib()
    sys.stdout.write(f"{settled} {read_resident_kib()}\n")


def read_resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] != ["no-gc"])

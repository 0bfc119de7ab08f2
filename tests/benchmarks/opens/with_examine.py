"""What a report of a recording takes: the reading by one process, then all that comes after it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

from benchmarks.opens.telling import own_peak_bytes
from stepsplit.analyzer import analysis
from stepsplit.analyzer.readers.recording import Recording, read_recording


def _examined(places: Sequence[str]) -> tuple[Recording, tuple[float, float], tuple[float, float]]:
    """The recording, the seconds of reading it and of examining what was read, and those of CPU."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    recording = read_recording(places)
    read, read_cpu = time.perf_counter(), time.process_time()
    # examine reads by itself: it is handed what was read, so that all the rest of it is timed.
    with patch.object(analysis, "read_recording", lambda *_: recording):
        analysis.examine(places)
    cpu_seconds = (read_cpu - begin_cpu, time.process_time() - read_cpu)
    return recording, (read - begin, time.perf_counter() - read), cpu_seconds


if __name__ == "__main__":
    found, seconds, cpu_seconds = _examined(sys.argv[1:])
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "events": sum(len(trace.calls) for trace in found.traces),
        "own_peak_bytes": own_peak_bytes(),
    }
    sys.stdout.write(f"\n{json.dumps(result)}\n")

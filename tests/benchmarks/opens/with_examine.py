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


def _examined(places: Sequence[str]) -> tuple[Recording, tuple[float, float]]:
    """The recording, and the seconds of reading it and of examining what was read."""
    begin = time.perf_counter()
    recording = read_recording(places)
    read = time.perf_counter()
    # examine reads by itself: it is handed what was read, so that all the rest of it is timed.
    with patch.object(analysis, "read_recording", lambda *_: recording):
        analysis.examine(places)
    return recording, (read - begin, time.perf_counter() - read)


if __name__ == "__main__":
    found, seconds = _examined(sys.argv[1:])
    calls = sum(len(trace.calls) for trace in found.traces)
    result = {"seconds": seconds, "events": calls, "own_peak_bytes": own_peak_bytes()}
    sys.stdout.write(f"\n{json.dumps(result)}\n")

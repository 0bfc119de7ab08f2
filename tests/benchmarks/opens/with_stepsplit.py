"""read_recording, with that many workers, that many times in one process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.recording import Recording


def _events_in(recording: Recording) -> int:
    return sum(len(trace.events) for trace in recording.traces)


if __name__ == "__main__":
    # Not above: each worker imports this module too, and as with the command line, not all of it.
    from benchmarks.opens.telling import open_and_tell
    from stepsplit.analyzer.readers.recording import read_recording

    workers, times, *places = sys.argv[1:]
    open_and_tell(lambda: read_recording(places, int(workers)), _events_in, int(times))

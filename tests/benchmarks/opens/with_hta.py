"""HolisticTraceAnalysis' Trace.load_traces, which is what its TraceAnalysis does first."""

from __future__ import annotations

import sys
from pathlib import Path

from hta.common.trace import Trace

from benchmarks.opens.telling import open_and_tell


def _loaded(path: str) -> Trace:
    trace = Trace(trace_files={0: path}, trace_dir=str(Path(path).parent))
    trace.load_traces(use_multiprocessing=False)
    return trace


def _events_in(trace: Trace) -> int:
    return sum(map(len, trace.get_all_traces().values()))


if __name__ == "__main__":
    open_and_tell(lambda: _loaded(sys.argv[1]), _events_in)

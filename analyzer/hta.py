"""The bridge to HolisticTraceAnalysis: the same recording, opened there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.readers.recording import read_recording

if TYPE_CHECKING:
    from hta.trace_analysis import TraceAnalysis


def open_in_hta(*paths: str | Path) -> TraceAnalysis:
    """HTA's TraceAnalysis of the recording's ranks, as stepsplit tells them apart.

    HTA shrinks events to whole microseconds by default, which loses short kernels; that is turned
    off for the process. Raises errors.DataError for the files, errors.UsageError without HTA.
    """
    os.environ.setdefault("HTA_DISABLE_NS_ROUNDING", "1")
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        raise UsageError("this needs hta; install it with: pip install 'stepsplit[hta]'") from None
    recording = read_recording([Path(path) for path in paths])
    return TraceAnalysis(trace_files={t.rank: str(t.source.resolve()) for t in recording.traces})

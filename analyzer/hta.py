"""Bridge to HolisticTraceAnalysis (HTA): opens a recording as an HTA TraceAnalysis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.host_steps import STEP
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    Bool,
    Category,
    EventKind,
    Events,
    Int64,
    RankTrace,
    compute_start_offsets_ns,
)

if TYPE_CHECKING:
    from hta.trace_analysis import TraceAnalysis

_HTA_CATEGORY = {
    Category.OP: "cpu_op",
    Category.ANNOTATION: "user_annotation",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "gpu_memcpy",
    Category.MEMSET: "gpu_memset",
    Category.GPU_ANNOTATION: "gpu_user_annotation",
    Category.PYTHON: "python_function",
}
_MAX_DIGITS = 18
_WAITS = ("wait_on_stream", "wait_on_cuda_event_record_corr_id")


def open_in_hta(*places: str | Path, rules: Rules = BUILT_IN) -> TraceAnalysis:
    """Opens a recording as HTA's TraceAnalysis.

    Times in it are microseconds. HTA decides by a kernel's name whether it communicates; kernels
    that the rules classify differently get the prefix "nccl:" or "compute:". As with HTA's own
    loader, the last of several marked steps is dropped. The critical path has no edges from the
    device to the host; get_memory_bw_*, generate_trace_with_counters,
    get_frequent_cuda_kernel_sequences and overlay_critical_path_analysis raise KeyError, because
    event arguments are not kept. HTA does not support CPU runs; its breakdowns raise IndexError.

    Args:
        places: Files, folders, archives or URLs that contain the traces of one run.
        rules: Which kernels communicate and which compute; by default the built-in rules.

    Returns:
        The TraceAnalysis, with the ranks on their wall clocks and no time rounded.

    Raises:
        DataError: A place is missing, a named file cannot be read, or no trace was found.
        UsageError: HTA is not installed.

    Examples:
        >>> analysis = open_in_hta("runs/exp1")  # doctest: +SKIP
        >>> analysis.get_temporal_breakdown(visualize=False)  # doctest: +SKIP
    """
    return convert_to_hta(read_recording(places, rules=rules).traces)


def convert_to_hta(traces: Sequence[RankTrace]) -> TraceAnalysis:
    """Converts ranks that were already read to HTA's TraceAnalysis.

    No file is read again, so formats that HTA does not support work too. RankTrace keeps no
    synchronization events and few event arguments, so CUPTI counters, forward-backward links and
    execution trace ids are missing; load the file with HTA if they are needed. Raises UsageError if
    HTA is not installed.
    """
    try:
        from hta.common.trace import Trace
        from hta.common.trace_parser import infer_gpu_type
        from hta.trace_analysis import TraceAnalysis
    except ImportError:
        raise UsageError("this needs hta; install it with: pip install 'stepsplit[hta]'") from None
    hta_trace = Trace(trace_files={})
    ids, base_ns = hta_trace.symbol_table.get_sym_id_map(), min(t.t0_unix_ns for t in traces)
    for trace, lead_ns in zip(traces, compute_start_offsets_ns(traces).tolist(), strict=True):
        # The names, changed where HTA would misclassify a kernel of that name.
        from hta.utils.utils import is_comm_kernel

        names, kernels = list(trace.events.names), trace.events.is_category(Category.KERNEL)
        communicates = trace.kinds.is_kind(EventKind.COMMUNICATION)
        name_id = trace.events.name_id
        for name in list_distinct(name_id[kernels & ~communicates]).tolist():
            if is_comm_kernel(names[name]):
                names[name] = "compute:" + names[name].replace("ncclKernel", "nccl_Kernel")
        for name in list_distinct(name_id[kernels & communicates]).tolist():
            if not is_comm_kernel(trace.events.names[name]):
                names[name] = f"nccl:{trace.events.names[name]}"
        used = np.unique(trace.events.name_id[_find_known_events(trace.events)]).tolist()
        hta_trace.symbol_table.add_symbols(
            [*_HTA_CATEGORY.values(), *(names[name] for name in used)]
        )
        if not (frame := _build_frame(trace.events, names, lead_ns, ids)).empty:
            hta_trace.traces[trace.rank] = frame
            meta = _build_metadata(trace, base_ns)
            hta_trace.meta_data[trace.rank] = meta | {"device_type": infer_gpu_type(meta, ids)}
    hta_trace.align_and_filter_trace()
    for rank, frame in hta_trace.traces.items():
        # HTA has shifted ts to start at the first event, but not end.
        frame["end"] = frame["ts"] + frame["dur"]
        hta_trace.traces[rank] = frame.set_index("index", drop=False).rename_axis(None)
    hta_trace.is_parsed = True
    # The constructor of TraceAnalysis accepts only files.
    analysis = TraceAnalysis.__new__(TraceAnalysis)
    analysis.t = hta_trace
    return analysis


def _find_known_events(events: Events) -> Int64:
    """The rows of the categories that HTA knows."""
    return np.flatnonzero(events.is_category(*_HTA_CATEGORY))


def _build_metadata(trace: RankTrace, base_unix_ns: int) -> dict[str, Any]:
    """The header fields that HTA reads; ts counts from base_unix_ns."""
    info = {"rank": trace.rank, "world_size": trace.world_size, "backend": trace.backend}
    return {"distributedInfo": info, "baseTimeNanoseconds": base_unix_ns}


def _build_frame(
    events: Events, names: Sequence[str], lead_ns: int, ids: dict[str, int]
) -> pd.DataFrame:
    """The events as HTA's loader represents them, one row each, in microseconds.

    index begins at 1, because HTA treats an index_correlation of 0 as a missing launch.
    """
    rows = _find_known_events(events)
    ts, dur = _convert_to_us(events.start_ns[rows] + lead_ns), _convert_to_us(events.dur_ns[rows])
    on_device = events.is_category(*DEVICE_CATEGORIES)
    pid, tid, stream = _assign_lanes(events, on_device)
    # The row of each launch's last kernel, and of each kernel's launch; -1 for none.
    links = np.full(len(events), -1, dtype=np.int64)
    work = np.flatnonzero(on_device & (events.correlation >= 0))
    links[work] = events.find_launches(work)
    launched = work[links[work] >= 0]
    links[links[launched]] = launched
    category = np.array([ids.get(_HTA_CATEGORY.get(c, ""), -1) for c in Category])
    name = np.array([ids.get(name, -1) for name in names], dtype=np.int64)
    index = np.zeros(len(events) + 1, dtype=np.int64)
    index[rows] = np.arange(1, len(rows) + 1)
    partner = np.where(links >= 0, index[links], np.minimum(events.correlation, 0))
    columns = {
        "index": index[rows],
        "cat": category[events.category[rows]],
        "name": name[events.name_id[rows]],
        "pid": pid[rows],
        "tid": tid[rows],
        "ts": ts,
        "dur": dur,
        "stream": stream[rows],
        "correlation": events.correlation[rows],
        **{wait: np.full(len(rows), -1) for wait in _WAITS},
        "index_correlation": partner[rows],
        "iteration": _assign_steps(events, on_device, links)[rows],
        "end": ts + dur,
    }
    return pd.DataFrame(columns)


def _convert_to_us(ns: Int64) -> Any:
    """Microseconds; as integers, for exact sums in HTA, if the trace has no finer resolution."""
    return ns / 1000 if (ns % 1000).any() else ns // 1000


def _assign_steps(events: Events, on_device: Bool, links: Int64) -> Int64:
    """The ProfilerStep number in which the host ran or launched each event, -1 for none."""
    marks = events.is_category(Category.ANNOTATION, Category.OP) & events.match_prefix(
        "ProfilerStep#"
    )
    steps = [(row, int(m[1])) for row in np.flatnonzero(marks).tolist()
             if (m := STEP.match(events.name_of(row))) is not None]  # fmt: skip
    step = np.full(len(events), -1, dtype=np.int64)
    for row, number in steps:
        start = events.start_ns[row]
        first, after = np.searchsorted(events.start_ns, (start, start + events.dur_ns[row]))
        step[first:after] = number
    return np.where(on_device, np.where(links >= 0, step[links], -1), step)


def _assign_lanes(events: Events, on_device: Bool) -> tuple[Int64, Int64, Int64]:
    """Each event's pid, tid and stream as numbers; for device events, device and stream."""
    pid = _parse_numbers([lane.pid for lane in events.lanes])[events.lane]
    tid = _parse_numbers([lane.tid for lane in events.lanes])[events.lane]
    device = np.array([lane.device for lane in events.lanes], dtype=np.int64)[events.lane]
    stream = np.array([lane.stream for lane in events.lanes], dtype=np.int64)[events.lane]
    stream = np.maximum(stream, 0)
    return (
        np.where(on_device & (device >= 0), device, pid),
        np.where(on_device, stream, tid),
        np.where(on_device, stream, -1),
    )


def _parse_numbers(texts: Sequence[str]) -> Int64:
    """The texts as numbers; each text that is not a number gets a unique larger one."""
    numbers = {text: int(text) for text in texts if text.isdecimal() and len(text) <= _MAX_DIGITS}
    beyond = max(numbers.values(), default=0) + 1
    others = (text for text in dict.fromkeys(texts) if text not in numbers)
    numbers |= {text: beyond + nth for nth, text in enumerate(others)}
    return np.array([numbers[text] for text in texts], dtype=np.int64)

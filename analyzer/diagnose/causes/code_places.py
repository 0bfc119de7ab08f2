"""The place in the user's code at which a rank spends time: from the recorder's looks at the stack,
else from the Python functions in the trace."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from stepsplit.analyzer.arrays import Intervals, is_inside, union
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext
from stepsplit.analyzer.split.host_threads import NestedEvents, build_nested
from stepsplit.analyzer.trace import PYTHON_FUNCTION, Category, Events
from stepsplit.collectors.formats.rank_record import CodeFrame

_MOSTLY, _PARTLY = 0.5, 0.2
"""A place is named if at least this share of the time is spent there."""

_MIN_LOOKS = 4
"""Of fewer looks no place is named, nor of a single one."""

_GRID_NS = 100_000
"""Where the trace has Python functions, they are looked up at this distance."""

_MAX_GRID = 100_000
"""At most so many times of a rank are looked up."""

_LIBRARY_FILE = re.compile(
    r"(?:^|/)(?:torch|stepsplit)/|/(?:site|dist)-packages/|/lib/python\d[^/]*/"
)

_Place = tuple[CodeFrame, ...]

_Function = tuple[str, str]
"""File and name."""


def describe_place(
    context: ReplayContext, times: Mapping[int, Intervals], common: bool = False
) -> str:
    """The place in the user's code at which most of this time is spent; "" if unknown.

    times are spans of each rank, by its index, on its own clock. common: counts what all ranks have
    (the lower median of them) instead of the sum of all.
    """
    looks = []
    for index, spans in times.items():
        covered = union(spans.start_ns, spans.end_ns)
        found, trace = Counter[_Place](), context.split.ranks[index].trace
        for record in context.list_records(index):
            at_ns = np.array(record.host.at_unix_ns, dtype=np.int64) - trace.t0_unix_ns
            place_ids = np.array(record.host.place, dtype=np.int64)[is_inside(covered, at_ns)]
            for one, count in zip(*np.unique(place_ids, return_counts=True), strict=True):
                found[record.host.places[one]] += int(count)
        # Without looks of the recorder, the trace may have Python functions.
        looks.append(found or _count_functions(trace.events, covered))
    functions: dict[_Function, Counter[_Place]] = defaultdict(Counter)
    for places in looks:
        for place, count in places.items():
            functions[place[0].file, place[0].function][place] += count
    counts = {}
    for function in functions:
        by_rank = sorted(
            sum(n for place, n in places.items() if (place[0].file, place[0].function) == function)
            for places in looks
        )
        counts[function] = by_rank[(len(by_rank) - 1) // 2] if common else sum(by_rank)
    total = sum(counts.values())
    most = max(counts, key=lambda one: counts[one], default=None)
    if most is None or total < _MIN_LOOKS or counts[most] < max(2, _PARTLY * total):
        return ""
    (place, _), *_ = functions[most].most_common(1)
    caller = f", called from {_format_frame(place[1])}" if len(place) > 1 else ""
    how = "mostly" if counts[most] >= _MOSTLY * total else "partly"
    return f", {how} at {_format_frame(place[0])}{caller}"


def _format_frame(frame: CodeFrame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"


def _count_functions(events: Events, times: Intervals) -> Counter[_Place]:
    """How often each innermost Python function of the user's code was running at these times."""
    is_python = events.is_category(Category.PYTHON)
    if not is_python.any():
        return Counter()
    frames = [_parse_function(name) for name in events.names]
    is_user = events.name_mask(tuple(frame is not None for frame in frames))
    lookup: NestedEvents = build_nested(events, is_python & is_user)
    found = Counter[_Place]()
    if not len(lookup.row):
        return found
    step_ns = max(_GRID_NS, times.total_ns // _MAX_GRID)
    for start, end in zip(times.start_ns.tolist(), times.end_ns.tolist(), strict=True):
        rows = lookup.find_innermost_at(np.arange(start, end, step_ns))
        names = events.name_id[rows[rows >= 0]]
        for one, count in zip(*np.unique(names, return_counts=True), strict=True):
            frame = frames[one]
            assert frame is not None
            found[(frame,)] += int(count)
    return found


def _parse_function(name: str) -> CodeFrame | None:
    """The function of a Python event, by its definition; None if it is of a library."""
    match = PYTHON_FUNCTION.fullmatch(name)
    if match is None or _LIBRARY_FILE.search(match["file"]):
        return None
    if match["file"].removesuffix(".py").split("/")[0] in sys.stdlib_module_names:
        return None
    return CodeFrame(match["function"], match["file"], int(match["line"]))

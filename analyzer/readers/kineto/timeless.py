"""Kernels and copies that were exported without a usable time: they count as lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from stepsplit.analyzer.readers.kineto.columns import SortedRows
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Category, Lack, Note

_FAR_NS = 3_600_000_000_000
"""Device events an hour before or after all events of the host are not of its recording. Clocks of
host and device differ by milliseconds; a time that was never written is decades away."""


def drop_timeless(rows: SortedRows, base_ns: int) -> tuple[SortedRows, tuple[Note, ...]]:
    """The rows without the device events that have no usable time, and a note with their number.

    Under load Kineto exports kernels with start 0 and duration 0 (its issue 109). They keep their
    row and their correlation, as events of category OTHER at the begin of the trace.
    """
    events = rows.events
    on_device = events.is_category(*DEVICE_CATEGORIES)
    written_ns = events.start_ns + (rows.t0_unix_ns - base_ns)
    timeless = on_device & (written_ns == 0) & (events.dur_ns == 0)
    on_host = ~on_device & (events.category != Category.OTHER)
    if on_host.any():
        first_ns, last_ns = events.start_ns[on_host].min(), events.ends_of(on_host).max()
        timeless &= events.start_ns < first_ns
        timeless |= on_device & (events.end_ns < first_ns - _FAR_NS)
        timeless |= on_device & (events.start_ns > last_ns + _FAR_NS)
    count = int(timeless.sum())
    if not count or timeless.all():
        return rows, ()
    begin_ns = int(events.start_ns[~timeless].min())
    start_ns = np.where(timeless, 0, events.start_ns - begin_ns)
    # Rows are sorted by start: those from the far end move to the front.
    order = np.argsort(start_ns, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    moved = replace(
        events,
        start_ns=start_ns[order],
        dur_ns=np.where(timeless, 0, events.dur_ns)[order],
        category=np.where(timeless, np.uint8(Category.OTHER), events.category)[order],
        name_id=events.name_id[order],
        lane=events.lane[order],
        correlation=events.correlation[order],
    )
    noted = np.argsort(place[rows.noted_row], kind="stable")
    by_event = np.argsort(place[rows.shapes.event], kind="stable")
    shapes = replace(
        rows.shapes,
        event=place[rows.shapes.event][by_event],
        text_id=rows.shapes.text_id[by_event],
    )
    text = (
        f"{count:,} of {int(on_device.sum()):,} kernels and copies have no time (such as start and"
        " duration 0): they count as lost by the profiler"
    )
    kept = structs.replace(
        rows,
        events=moved,
        t0_unix_ns=rows.t0_unix_ns + begin_ns,
        noted_row=place[rows.noted_row][noted],
        noted_args=tuple(rows.noted_args[i] for i in noted.tolist()),
        shapes=shapes,
    )
    return kept, (Note("device_times_missing", text, lack=Lack.KERNELS),)

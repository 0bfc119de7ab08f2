"""Rank tables: the trace of one rank as `stepsplit reduce` writes it, in place of the raw trace."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.events_file import (
    EventsFile,
    PackedCalls,
    pack_calls,
    pack_waits,
    unpack_calls,
    unpack_waits,
    write_events,
)
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier, Rules
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import (
    OPS,
    CallsWithGroups,
    Category,
    Events,
    Lane,
    Note,
    RankTrace,
    Shapes,
)

SCHEMA = "stepsplit.rank_table/1"

# Sums of durations within these fit into 64 bits.
_MOST_EVENTS, _MOST_NS = 1 << 28, 1 << 60

_HINT = "write it again with stepsplit reduce"


class _RankData(Struct):
    """What a table holds of a trace besides the columns of its events and shapes."""

    schema: str
    source: str
    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    t0_unix_ns: int
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    calls: PackedCalls
    notes: tuple[Note, ...]
    shapes: tuple[str, ...]
    waits: tuple[bytes, ...]
    visible_devices: int = 0
    states_size: bool = True


def name_table(rank: int) -> str:
    """The file name of a rank's table."""
    return f"rank{rank}_events.parquet"


def write_table(path: Path, trace: RankTrace) -> None:
    """Writes the table atomically: all that the analysis needs of the trace. Raises OSError."""
    data = _RankData(
        schema=SCHEMA,
        source=trace.source.name,
        rank=trace.rank,
        world_size=trace.world_size,
        host=trace.host,
        device=trace.device,
        backend=trace.backend,
        t0_unix_ns=trace.t0_unix_ns,
        names=trace.events.names,
        lanes=trace.events.lanes,
        calls=pack_calls(CallsWithGroups(trace.calls, trace.groups)),
        notes=trace.notes,
        shapes=trace.shapes.texts,
        waits=pack_waits(trace.waits),
        visible_devices=trace.visible_devices,
        states_size=trace.states_size,
    )
    write_events(path, trace.events, trace.shapes, msgspec.msgpack.encode(data), packed=True)


def read_rank_table(source: Source, rules: Rules = BUILT_IN) -> tuple[RankTrace] | None:
    """Reads the trace of a rank, whose kernels the rules classify; None for a Parquet file of
    something else. Raises DataError."""
    try:
        with source.open_local() as path:
            trace = _read(path, EventClassifier(rules))
            return None if trace is None else (trace,)
    except (OSError, ValueError, KeyError, OverflowError, msgspec.MsgspecError) as error:
        raise DataError(source.where, f"not a rank table ({error})", _HINT) from None


def _read(path: Path, classifier: EventClassifier) -> RankTrace | None:
    file = EventsFile(path)
    if not file.about:
        return None
    if len(file) > _MOST_EVENTS:
        raise ValueError(f"{len(file):,} events; at most {_MOST_EVENTS:,} are read")
    data = msgspec.msgpack.decode(file.about, type=_RankData)
    if data.schema != SCHEMA:
        raise ValueError(f"its schema is {data.schema!r}, not {SCHEMA!r}")
    events, shapes = file.read_events(data.names, data.lanes, data.shapes)
    calls = unpack_calls(data.calls)
    _check(events, shapes, calls)
    return RankTrace(
        source=Path(data.source),
        rank=data.rank,
        world_size=data.world_size,
        host=data.host,
        device=data.device,
        backend=data.backend,
        t0_unix_ns=data.t0_unix_ns,
        events=events,
        calls=calls.calls,
        groups=calls.groups,
        kinds=classifier.classify(events, calls.calls),
        notes=data.notes,
        shapes=shapes,
        waits=unpack_waits(data.waits),
        visible_devices=data.visible_devices,
        states_size=data.states_size,
    )


def _check(events: Events, shapes: Shapes, calls: CallsWithGroups) -> None:
    """Raises ValueError if a column has values outside of what they refer to."""
    if not len(events):
        raise ValueError("it has no events")
    if (np.diff(events.start_ns) < 0).any():
        raise ValueError("its events are not in order")
    columns = calls.calls
    for name, values, low, high in (
        ("dur_ns", events.dur_ns, 0, _MOST_NS),
        ("start_ns", events.start_ns, -_MOST_NS, _MOST_NS),
        ("category", events.category, 0, len(Category)),
        ("name_id", events.name_id, 0, len(events.names)),
        ("lane", events.lane, 0, len(events.lanes)),
        ("shape", shapes.text_id, 0, len(shapes.texts)),
        ("call", columns.event, 0, len(events)),
        ("group", columns.group_id, -1, len(calls.groups)),
        ("op", columns.op, 0, len(OPS)),
        ("dtype", columns.dtype, -1, len(columns.dtypes)),
    ):
        if len(values) and not low <= int(values.min()) <= int(values.max()) < high:
            raise ValueError(f"column {name} is out of range")

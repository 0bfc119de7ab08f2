"""One parsed trace file -> RankTrace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.calls import FoundCalls
from stepsplit.analyzer.readers.columns import Sorted, to_events
from stepsplit.analyzer.readers.files import RECORD_AGAIN
from stepsplit.analyzer.readers.flight import FlightEntry
from stepsplit.analyzer.readers.gloo_calls import calls_of_gloo
from stepsplit.analyzer.readers.kineto import DistributedInfo, KinetoFile
from stepsplit.analyzer.readers.nccl_calls import calls_of_device
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Group, Note, RankTrace


def to_rank_trace(
    source: Path, text: bytes, content: KinetoFile, rank: int, flight: Sequence[FlightEntry]
) -> RankTrace:
    """The nouns of one rank. Raises DataError where nothing in the trace has a duration."""
    assert not isinstance(content.traceEvents, msgspec.UnsetType)
    rows = to_events(content.traceEvents, text, content.baseTimeNanoseconds)
    if not len(rows.events):
        raise DataError(source, "a trace without events", RECORD_AGAIN, rank)
    info = content.distributed
    found, notes = _calls(rows, flight, _groups(info))
    return RankTrace(
        source=source,
        rank=rank,
        world_size=max(info.world_size, rank + 1),
        host=content.host_name,
        device=content.devices[0].name if content.devices else "",
        backend="" if info.backend == "undefined" else info.backend,
        t0_unix_ns=rows.t0_unix_ns,
        events=rows.events,
        calls=found.calls,
        groups=found.groups,
        notes=tuple(Note(note.code, note.message, rank) for note in notes),
    )


def _groups(info: DistributedInfo) -> tuple[Group, ...]:
    return tuple(Group(pg.pg_name, tuple(pg.ranks), pg.pg_desc) for pg in info.pg_config)


def _calls(
    rows: Sorted, flight: Sequence[FlightEntry], groups: Sequence[Group]
) -> tuple[FoundCalls, tuple[Note, ...]]:
    if rows.events.of(*DEVICE_CATEGORIES).any():
        return calls_of_device(rows, groups), ()
    return calls_of_gloo(rows, flight, groups)

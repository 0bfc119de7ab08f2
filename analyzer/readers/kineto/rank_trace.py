"""One trace file as read, and its rank -> RankTrace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.calls import FoundCalls
from stepsplit.analyzer.readers.flight.dump import FlightEntry
from stepsplit.analyzer.readers.kineto.device_calls import calls_of_device
from stepsplit.analyzer.readers.kineto.gloo_calls import calls_of_gloo
from stepsplit.analyzer.readers.kineto.rows import Sorted
from stepsplit.analyzer.readers.kineto.schema import DistributedInfo
from stepsplit.analyzer.readers.kineto.trace import KinetoFile
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Group, Note, RankTrace


def to_rank_trace(
    where: str, file: KinetoFile, rank: int, flight: Sequence[FlightEntry]
) -> RankTrace:
    """The nouns of one rank. Raises DataError where nothing in the trace has a duration."""
    rows, header = file.rows, file.header
    if not len(rows.events):
        raise DataError(where, "a trace without events", RECORD_AGAIN, rank)
    info = header.distributed
    found, notes = _calls(rows, flight, _groups(info))
    return RankTrace(
        source=Path(where),
        rank=rank,
        world_size=max(info.world_size, rank + 1),
        host=header.host_name,
        device=header.devices[0].name if header.devices else "",
        backend="" if info.backend == "undefined" else info.backend,
        t0_unix_ns=rows.t0_unix_ns,
        events=rows.events,
        calls=found.calls,
        groups=found.groups,
        notes=tuple(replace(note, rank=rank) for note in (*file.notes, *notes)),
    )


def _groups(info: DistributedInfo) -> tuple[Group, ...]:
    return tuple(Group(pg.pg_name, tuple(pg.ranks), pg.pg_desc) for pg in info.pg_config)


def _calls(
    rows: Sorted, flight: Sequence[FlightEntry], groups: Sequence[Group]
) -> tuple[FoundCalls, tuple[Note, ...]]:
    if rows.events.of(*DEVICE_CATEGORIES).any():
        return calls_of_device(rows, groups), ()
    return calls_of_gloo(rows, flight, groups)

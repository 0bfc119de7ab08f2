"""One trace file as read, and its rank -> RankTrace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.flight.dump import FlightEntry
from stepsplit.analyzer.readers.kineto.gloo_calls import calls_of_gloo
from stepsplit.analyzer.readers.kineto.trace import KinetoFile
from stepsplit.analyzer.trace import RankTrace


def to_rank_trace(
    where: str, file: KinetoFile, rank: int, flight: Sequence[FlightEntry]
) -> RankTrace:
    """The nouns of one rank. Raises DataError where nothing in the trace has a duration."""
    rows, header = file.rows, file.header
    if not len(rows.events):
        raise DataError(where, "a trace without events", RECORD_AGAIN, rank)
    info = header.distributed
    found, notes = file.calls, file.notes
    if found is None:
        found, more = calls_of_gloo(rows, flight, info.groups)
        notes = (*notes, *more)
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
        notes=tuple(replace(note, rank=rank) for note in notes),
    )

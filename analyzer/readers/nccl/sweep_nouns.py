"""What nccl-tests and rccl-tests measure: the nouns that read_sweeps yields."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.trace import Note


@dataclass(frozen=True, slots=True)
class Timing:
    """One half of a row. wrong is the number of wrong elements, -1 where none were counted.

    algbw and busbw are as printed; before 2020 all_gather and reduce_scatter printed busbw twice.
    """

    time_ns: int
    algbw_bytes_per_s: int
    busbw_bytes_per_s: int
    wrong: int


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One message size. count is elements of a rank; redop is "" and root -1 where none is told."""

    message_bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Timing | None
    in_place: Timing | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """One table: an op ("" where ambiguous), its ranks (-1 unknown), the name of each's device.

    avg_busbw_bytes_per_s is what the table ends with, -1 where it is cut.
    """

    source: str
    op: str
    nranks: int
    devices: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    avg_busbw_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The tables of a file with at least one row, in order."""

    source: str
    sweeps: tuple[Sweep, ...]
    notes: tuple[Note, ...]

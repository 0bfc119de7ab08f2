"""The ledger of a watched job, also the fields of its JSON (schema "stepsplit.ledger/1")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

SCHEMA = "stepsplit.ledger/1"

LEDGER_NAME = "ledger.json"

ROW_KINDS = (
    "train", "redone", "evaluation", "checkpoint", "compile", "launcher", "imports",
    "process_group", "load", "startup", "quorum", "heal", "commit", "stall", "restart_gap",
    "shutdown", "other", "unknown",
)  # fmt: skip
"""In the order in which they are shown; docs/ledger.md defines each."""


class LedgerRow(Struct, frozen=True):
    """What some of the wall clock went to.

    Attributes:
        kind: "train": steps that count; "redone": steps that an earlier start had done already;
            "evaluation", "checkpoint", "compile" (of torch.compile), "launcher" (from the command
            to the process), "imports" (to the import of torch's optimizers), "process_group"
            (init_process_group), "load" (torch.load and DCP before the first step), "startup" (the
            rest, until the first step has ended), "quorum", "heal", "commit" (marked by the
            script), "stall" (long steps beyond the usual ones), "restart_gap" (from the last word
            of a start to the begin of the next one), "shutdown" (from the last step to the end),
            "other" (marked so), "unknown" (no note accounts for it).
        ns: In the mean of the ranks.
        count: Steps, spans, stalls or starts, on the lowest rank.
        gpu_hours: Over all ranks with notes.
    """

    kind: str
    ns: int
    count: int
    gpu_hours: float


class IncarnationLedger(Struct, frozen=True, kw_only=True):
    """One start of the job, from the end of the one before.

    Attributes:
        incarnation: Its number, from 0.
        begin_unix_ns: When its wall clock begins, as text: the end of the start before.
        wall_ns: Its wall clock, with the gap before it.
        ranks: The ranks with notes.
        world_size: All ranks of the job.
        first_step: The number of its first step.
        last_step: The number of its last step that is known to have ended; None without one.
        ending: "ended" by its own word, or "lost": killed, or it still runs.
        rows: They add up to wall_ns.
    """

    incarnation: int
    begin_unix_ns: str
    wall_ns: int
    ranks: tuple[int, ...]
    world_size: int
    first_step: int
    last_step: int | None
    ending: Literal["ended", "lost"]
    rows: tuple[LedgerRow, ...]


class Ledger(Struct, frozen=True, kw_only=True):
    """Where the wall clock of a watched job went.

    Attributes:
        schema: "stepsplit.ledger/1".
        run: The name of the watch's folder.
        wall_ns: From the begin of the first command to the end of the last one, or the last word.
        goodput: The part of it in steps that count, 0..1.
        is_goodput_bound: Whether it is the most that it can be, since something of the job is not
            known (lacks).
        hosts: The hosts with notes.
        rows: The sum of those of the starts; they add up to wall_ns.
        incarnations: The starts, in order.
        lacks: What is not known, one sentence each.
    """

    schema: str = SCHEMA
    run: str
    wall_ns: int
    goodput: float
    is_goodput_bound: bool
    hosts: int
    rows: tuple[LedgerRow, ...]
    incarnations: tuple[IncarnationLedger, ...]
    lacks: tuple[str, ...] = ()

    @property
    def gpu_hours(self) -> float:
        """Those of all rows."""
        return sum(row.gpu_hours for row in self.rows)


def sum_rows(rows: Sequence[LedgerRow]) -> tuple[LedgerRow, ...]:
    """One row for each kind that is there; kinds of a later version come last."""
    later = sorted({row.kind for row in rows} - {*ROW_KINDS})
    of_kind = {kind: [row for row in rows if row.kind == kind] for kind in (*ROW_KINDS, *later)}
    return tuple(
        LedgerRow(
            kind,
            sum(row.ns for row in own),
            sum(row.count for row in own),
            sum(row.gpu_hours for row in own),
        )
        for kind, own in of_kind.items()
        if own
    )


def leave_out_start(ledger: Ledger, incarnation: int) -> Ledger | None:
    """The ledger without a start, its time and the gap before it; None if nothing is left.

    Of a ledger that has its newest start only, the time of an earlier one is not known: it stays,
    and a lack says so.
    """
    number = incarnation + 1
    kept: list[IncarnationLedger] = []
    for start in ledger.incarnations:
        if start.incarnation == incarnation:
            continue
        if not kept and start is not ledger.incarnations[0]:
            # The wall clock begins with it: what was before is forgotten.
            gap_ns = sum(row.ns for row in start.rows if row.kind == "restart_gap")
            start = msgspec.structs.replace(
                start,
                begin_unix_ns=str(int(start.begin_unix_ns) + gap_ns),
                wall_ns=start.wall_ns - gap_ns,
                rows=tuple(row for row in start.rows if row.kind != "restart_gap"),
            )
        kept.append(start)
    is_whole = sum(one.wall_ns for one in ledger.incarnations) == ledger.wall_ns
    if not kept or (not is_whole and len(kept) < len(ledger.incarnations)):
        return None
    lacks = tuple(one for one in ledger.lacks if not one.startswith(f"start {number}: "))
    if not is_whole:
        lack = f"start {number} is forgotten, but its time is in these rows until the next ledger"
        return msgspec.structs.replace(ledger, lacks=(lack, *lacks))
    if len(kept) == len(ledger.incarnations):
        return ledger
    rows = sum_rows([row for one in kept for row in one.rows])
    wall_ns = sum(one.wall_ns for one in kept)
    train_ns = sum(row.ns for row in rows if row.kind == "train")
    lack = f"start {number} is forgotten, with the gap before it; steps that it had done are redone"
    return msgspec.structs.replace(
        ledger,
        wall_ns=wall_ns,
        goodput=train_ns / wall_ns if wall_ns else 0.0,
        rows=rows,
        incarnations=tuple(kept),
        lacks=(lack, *lacks),
    )


def ledger_to_json(ledger: Ledger) -> bytes:
    """The ledger as JSON text."""
    return msgspec.json.format(msgspec.json.encode(ledger), indent=1) + b"\n"

"""The RL steps of all roles by phase, and what the long tail of their generation costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import astuple

from stepsplit.analyzer.arrays import Intervals, overlap_ns, union
from stepsplit.analyzer.buckets import WAITS, Bucket
from stepsplit.analyzer.diagnose.long_tail import DecodedGeneration, find_generations
from stepsplit.analyzer.diagnose.rl_windows import JobRole, map_to_unix_ns, sum_phases
from stepsplit.analyzer.report.headline import divide_parts
from stepsplit.analyzer.report.rl_step import LongTail, PhaseRow, PhaseStepRow, RoleTime, TailRow
from stepsplit.analyzer.split.rl_phases import (
    OTHER_MARKS,
    DecodeSteps,
    find_decode_steps,
    find_generation_marks,
)
from stepsplit.analyzer.trace import Int64
from stepsplit.collectors.formats.rl_marks import PHASES

REST = ""
"""The phase of the time without a mark."""


def build_phases(
    roles: Sequence[JobRole],
    times: Mapping[tuple[str, int], Sequence[RoleTime]],
    edges: Mapping[tuple[str, int], Int64],
    numbers: Sequence[int],
    counted: Sequence[int],
    spans: Mapping[str, Sequence[Mapping[str, Intervals]]],
) -> tuple[tuple[PhaseRow, ...], tuple[PhaseStepRow, ...]]:
    """The phases of each role, and of each rank in each RL step.

    edges are the begin and the end of each step on each rank, in Unix ns, and times what the rank
    did there, which its phases add up to. counted are the places of the RL steps in the means, and
    spans the phases of the ranks of each role, in own ns.
    """
    rows: list[PhaseStepRow] = []
    means: list[PhaseRow] = []
    counted_steps = {numbers[at] for at in counted}
    for role in roles:
        of_role: list[PhaseStepRow] = []
        for rank, own_spans in zip(role.ranks, spans[role.name], strict=True):
            number = rank.trace.rank
            by_phase = sum_phases(role.split, rank, edges[role.name, number], own_spans)
            for at, step in enumerate(numbers):
                left = list(astuple(times[role.name, number][at]))
                for phase, windows in by_phase.items():
                    # Between two steps there is one window, too.
                    time = windows[2 * at]
                    if time.window_ns:
                        of_role.append(PhaseStepRow(role.name, number, step, phase, time))
                        left = [a - b for a, b in zip(left, astuple(time), strict=True)]
                assert min(left) >= 0, f"{role.name}/{number}: phases overlap"
                if left[0]:
                    of_role.append(PhaseStepRow(role.name, number, step, REST, RoleTime(*left)))
        rows += of_role
        sums: dict[str, list[int]] = defaultdict(lambda: [0] * _PARTS)
        for row in of_role:
            if row.step in counted_steps:
                own = sums[row.phase]
                own[:] = [a + b for a, b in zip(own, astuple(row.time)[1:], strict=True)]
        phases = [
            *(phase for phase in PHASES if phase in sums),
            *sorted(
                (one for one in sums if one not in PHASES and one),
                key=lambda p: (p == OTHER_MARKS, -sum(sums[p])),
            ),
            *([REST] if REST in sums else []),
        ]
        # Part by part, so that each adds up to that part of the role's mean.
        by_part = [sums[phase][part] for part in range(_PARTS) for phase in phases]
        mean = divide_parts(by_part, len(role.ranks) * len(counted))
        for at, phase in enumerate(phases):
            parts = mean[at :: len(phases)]
            means.append(PhaseRow(role.name, phase, phase in PHASES, RoleTime(sum(parts), *parts)))
    return tuple(means), tuple(rows)


_PARTS = len(RoleTime.__struct_fields__) - 1


def build_tails(
    roles: Sequence[JobRole],
    phases: Sequence[PhaseRow],
    edges: Int64,
    numbers: Sequence[int],
    counted: Sequence[int],
) -> tuple[tuple[LongTail, ...], tuple[TailRow, ...], list[str]]:
    """The long tail of each role that generates, its generations, and what is not known of it."""
    tails: list[LongTail] = []
    rows: list[TailRow] = []
    lacks: list[str] = []
    generating = {row.role for row in phases if row.phase == "generation"}
    for role in roles:
        own: dict[int, list[list[DecodedGeneration]]] = {}
        for rank in role.ranks:
            of_rank: list[list[DecodedGeneration]] = [[] for _ in numbers]
            for one in list_generations(role, rank.trace.rank, edges):
                at = int(np.searchsorted(edges, one.end_ns, side="left")) - 1
                if 0 <= at < len(numbers):
                    of_rank[at].append(one)
                    rows.append(
                        TailRow(
                            role.name, rank.trace.rank, numbers[at], one.sequences, one.last,
                            one.end_ns - one.start_ns, one.end_ns - one.tail_start_ns, one.batch,
                        )
                    )  # fmt: skip
            own[rank.trace.rank] = of_rank
        known = [one for ranks in own.values() for at in counted for one in ranks[at]]
        if not known:
            if role.name in generating:
                named = f"{role.name} decodes" if role.name else "ranks decode"
                lacks.append(
                    f"how long {named} for the last sequences: no range says how many sequences a"
                    ' decode step has, as those of vLLM and SGLang, or "decode sequences=5"'
                )
            continue
        tail_ns = {
            number: sum(one.end_ns - one.tail_start_ns for at in counted for one in ranks[at])
            for number, ranks in own.items()
        }
        longest = max(tail_ns, key=lambda number: tail_ns[number])
        decode_ns = sum(one.end_ns - one.start_ns for one in known)
        places = sum((one.end_ns - one.start_ns) * one.sequences for one in known)
        saved_ns = [
            _compute_saved_ns(roles, role, [ranks[at] for ranks in own.values()], edges[at:at + 2])
            for at in counted
        ]  # fmt: skip
        most = max(known, key=lambda one: one.sequences)
        tails.append(
            LongTail(
                role=role.name,
                decode_ns=decode_ns // (len(role.ranks) * len(counted)),
                tail_ns=sum(tail_ns.values()) // (len(role.ranks) * len(counted)),
                longest_rank=longest,
                longest_ns=tail_ns[longest] // len(counted),
                sequences=most.sequences,
                last=most.last,
                empty=round(1 - sum(one.filled for one in known) / max(places, 1), 4),
                saved_ns=sum(saved_ns) // len(counted),
            )
        )
    return tuple(tails), tuple(rows), lacks


def list_generations(role: JobRole, number: int, edges: Int64) -> list[DecodedGeneration]:
    """The generations of the role's rank of this number, in Unix ns."""
    rank = next(one for one in role.ranks if one.trace.rank == number)
    steps, marks = find_decode_steps(rank.trace), find_generation_marks(rank.trace)

    def map_ns(own_ns: Int64) -> Int64:
        return map_to_unix_ns(role.split, rank, own_ns)

    on_clock = DecodeSteps(map_ns(steps.start_ns), map_ns(steps.end_ns), steps.sequences)
    spans = Intervals(map_ns(marks.start_ns), map_ns(marks.end_ns))
    return find_generations(on_clock, spans, edges)


def _compute_saved_ns(
    roles: Sequence[JobRole],
    role: JobRole,
    of_ranks: Sequence[Sequence[DecodedGeneration]],
    edges: Int64,
) -> int:
    """By how much the last generation of the role would end earlier without the tails, in the time
    in which no rank of another role works."""
    last = [own[-1] for own in of_ranks if own]
    if not last:
        return 0
    begin = max(max(one.tail_start_ns for one in last), int(edges[0]))
    end = max(one.end_ns for one in last)
    if end <= begin:
        return 0
    starts, ends = [], []
    for other in roles:
        for rank in other.ranks if other is not role else ():
            band = rank.attribution.band
            works = ~np.isin(band.bucket, (*WAITS, Bucket.IDLE))
            starts.append(map_to_unix_ns(other.split, rank, band.start_ns[works]))
            ends.append(map_to_unix_ns(other.split, rank, band.end_ns[works]))
    if not starts:
        return end - begin
    busy = union(np.concatenate(starts), np.concatenate(ends))
    return end - begin - overlap_ns(Intervals(np.array([begin]), np.array([end])), busy)

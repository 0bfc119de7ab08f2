"""One clock for all ranks, from collectives that end together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.match import Matched
from stepsplit.analyzer.trace import OP_CODE, Int64, Note, RankTrace

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter")
SAME_HOST_NS = 1_000_000
"""Ranks of one host whose device collectives end further apart than this do not share a clock."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A rank's clock: t_reference = t - offset_ns, t in unix ns. sigma_ns is None where unknown."""

    rank: int
    host: str
    offset_ns: int
    sigma_ns: int | None
    residual_ns: int | None


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clocks, one a trace; lead_ns[i] + own = ns after t0_unix_ns on the common clock."""

    clocks: tuple[Clock, ...]
    t0_unix_ns: int
    lead_ns: tuple[int, ...]
    notes: tuple[Note, ...]


def align(traces: Sequence[RankTrace], matched: Matched) -> Alignment:
    """The clocks of the ranks against the first rank's.

    Ranks of one host share its clock, unless their collectives say otherwise. Hosts are joined by
    the median difference of the ends of all_reduce, all_gather and reduce_scatter; those that share
    no collective keep their wall clocks, with a note.
    """
    t0 = min(trace.t0_unix_ns for trace in traces)
    wall = [trace.t0_unix_ns - t0 for trace in traces]
    ends = _ends(traces, matched, wall)
    domain = _domains(traces, ends)
    offset, sigma, residual = _offsets(domain, ends)
    clocks = tuple(
        Clock(trace.rank, trace.host, int(offset[d]), sigma[d], residual[d])
        for trace, d in zip(traces, domain, strict=True)
    )
    lead = tuple(w - int(offset[d]) for w, d in zip(wall, domain, strict=True))
    return Alignment(clocks, t0, lead, _notes(traces, domain, sigma))


def _ends(traces: Sequence[RankTrace], matched: Matched, wall: Sequence[int]) -> Int64:
    """Ends of collectives that end together, by wall clock: (collectives, traces), -1 absent."""
    together = np.isin(matched.op, [OP_CODE[op] for op in TOGETHER]) & (matched.key >= 0)
    keys, row = np.unique(matched.key[together], return_inverse=True)
    ends = np.full((len(keys), len(traces)), -1, dtype=np.int64)
    at = matched.end_ns[together] + np.array(wall, dtype=np.int64)[matched.trace[together]]
    np.maximum.at(ends, (row, matched.trace[together]), at)
    return ends


def _domains(traces: Sequence[RankTrace], ends: Int64) -> list[int]:
    """For each trace the first trace whose clock it shares."""
    first: dict[str, int] = {}
    domain = []
    for i, trace in enumerate(traces):
        shared = first.get(trace.host) if trace.host else None
        if shared is None or _apart(traces[i], ends[:, shared], ends[:, i]):
            domain.append(i)
            first.setdefault(trace.host, i)
        else:
            domain.append(shared)
    return domain


def _apart(trace: RankTrace, one: Int64, other: Int64) -> bool:
    """Only kernels end together closely enough to tell; gloo's worker threads do not."""
    both = (one >= 0) & (other >= 0)
    if not trace.on_device or not both.any():
        return False
    return bool(abs(np.median(other[both] - one[both])) > SAME_HOST_NS)


def _offsets(
    domain: Sequence[int], ends: Int64
) -> tuple[dict[int, int], dict[int, int | None], dict[int, int | None]]:
    """Each domain's offset to the first, from domain to domain, and how well it is known."""
    distinct = sorted(set(domain))
    offset: dict[int, int] = {distinct[0]: 0}
    sigma: dict[int, int | None] = dict.fromkeys(distinct)
    residual: dict[int, int | None] = dict.fromkeys(distinct)
    sigma[distinct[0]] = residual[distinct[0]] = 0
    left = set(distinct[1:])
    while left:
        links = [
            (len(_differences(ends, domain, a, b)), a, b) for a in offset for b in sorted(left)
        ]
        count, known, new = max(links, key=lambda link: (link[0], -link[2]))
        if not count:
            offset |= dict.fromkeys(left, 0)
            break
        apart = _differences(ends, domain, known, new)
        middle = int(np.floor(np.median(apart)))
        spread = np.abs(apart - middle)
        offset[new] = offset[known] + middle
        residual[new] = int(np.median(spread))
        sigma[new] = int(1.4826 * np.median(spread) / np.sqrt(count)) + 1
        left.discard(new)
    return offset, sigma, residual


def _differences(ends: Int64, domain: Sequence[int], known: int, new: int) -> Int64:
    """new's end minus known's of each collective that has members in both."""
    of = np.array(domain)
    one = ends[:, of == known].max(axis=1, initial=-1)
    other = ends[:, of == new].max(axis=1, initial=-1)
    both = (one >= 0) & (other >= 0)
    return np.asarray(other[both] - one[both])


def _notes(
    traces: Sequence[RankTrace], domain: Sequence[int], sigma: dict[int, int | None]
) -> tuple[Note, ...]:
    loose = [traces[d].rank for d in sorted(set(domain)) if sigma[d] is None]
    return tuple(
        Note(
            "clock_unaligned",
            f"rank {rank} shares no collective with the others: its wall clock is taken as it is",
            rank,
        )
        for rank in loose
    )

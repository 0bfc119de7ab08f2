"""One clock for all ranks, from collectives that end together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.match import TOGETHER, Matched
from stepsplit.analyzer.trace import OP_CODE, Int64, Note, RankTrace, wall_lead_ns


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


@dataclass(frozen=True, slots=True)
class _Known:
    """How far a clock is ahead of the first, and how well that is known."""

    offset_ns: int
    sigma_ns: int | None = None
    residual_ns: int | None = None
    linked: bool = True


def align(traces: Sequence[RankTrace], matched: Matched) -> Alignment:
    """The clocks of the ranks against the first rank's.

    Kernels of one all_reduce, all_gather or reduce_scatter end together, so the median difference
    of their ends joins two ranks, from rank to rank. gloo's worker threads do not end together:
    there, and without a common collective, the ranks of a host share its wall clock. What nothing
    joins keeps its own, with a note.
    """
    wall = wall_lead_ns(traces)
    clocks = _clocks(_ends(traces, matched, wall), [_domain(trace) for trace in traces])
    notes = [
        Note(
            "clock_unaligned",
            f"rank {trace.rank} shares no collective and no host with rank {traces[0].rank}: its "
            "wall clock is taken as it is",
            trace.rank,
        )
        for trace, clock in zip(traces, clocks, strict=True)
        if not clock.linked
    ]
    return Alignment(
        tuple(
            Clock(trace.rank, trace.host, clock.offset_ns, clock.sigma_ns, clock.residual_ns)
            for trace, clock in zip(traces, clocks, strict=True)
        ),
        min(trace.t0_unix_ns for trace in traces),
        tuple(int(w) - clock.offset_ns for w, clock in zip(wall, clocks, strict=True)),
        tuple(notes),
    )


def _domain(trace: RankTrace) -> str:
    """The host whose wall clock the rank reads; a rank without a host reads its own."""
    return trace.host or f"rank {trace.rank}"


def _ends(traces: Sequence[RankTrace], matched: Matched, wall: Int64) -> Int64:
    """Ends of collectives that end together, by wall clock: (collectives, traces), -1 absent."""
    on_device = np.array([trace.on_device for trace in traces])
    hosts = len({_domain(trace) for trace in traces})
    together = np.isin(matched.op, [OP_CODE[op] for op in TOGETHER]) & (matched.shared >= 0)
    together &= on_device[matched.trace] | (hosts > 1)
    keys, row = np.unique(matched.shared[together], return_inverse=True)
    ends = np.full((len(keys), len(traces)), -1, dtype=np.int64)
    at = matched.end_ns[together] + wall[matched.trace[together]]
    np.maximum.at(ends, (row, matched.trace[together]), at)
    return ends


def _clocks(ends: Int64, domain: Sequence[str]) -> list[_Known]:
    """Each trace's clock, joined to a known one by the most collectives, else by its host."""
    present = (ends >= 0).astype(np.float64)
    common = (present.T @ present).astype(np.int64)
    known: dict[int, _Known] = {}
    count, via = np.zeros(len(domain), dtype=np.int64), np.zeros(len(domain), dtype=np.int64)
    left, hosts = set(range(len(domain))), set[str]()
    while left:
        new = max(left, key=lambda i: (count[i], domain[i] in hosts, -i))
        hosts.add(domain[new])
        known[new] = _joined(ends, domain, known, new, int(via[new]) if count[new] else None)
        left.discard(new)
        better = common[new] > count
        count[better], via[better] = common[new][better], new
    return [known[i] for i in range(len(domain))]


def _joined(
    ends: Int64, domain: Sequence[str], known: dict[int, _Known], new: int, via: int | None
) -> _Known:
    if not known:
        return _Known(0, 0, 0)
    if via is None:
        mates = [known[k] for k in known if domain[k] == domain[new]]
        return _Known(mates[0].offset_ns) if mates else _Known(0, linked=False)
    both = (ends[:, via] >= 0) & (ends[:, new] >= 0)
    apart = ends[both, new] - ends[both, via]
    middle = _median(apart)
    residual = _median(np.abs(apart - middle))
    sigma = int(1.4826 * residual / np.sqrt(len(apart))) + 1
    return _Known(known[via].offset_ns + middle, sigma, residual)


def _median(values: Int64) -> int:
    """The median to the nanosecond, which a float of unix times has not."""
    ordered = np.sort(values)
    return int(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2

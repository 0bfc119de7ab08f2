"""The critical path of each RL step across roles: which rank, and what it did, at each instant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import add

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import astuple

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.buckets import WAITS
from stepsplit.analyzer.diagnose.rl_windows import JobRole, map_to_unix_ns, sum_windows
from stepsplit.analyzer.report.headline import divide_parts
from stepsplit.analyzer.report.rl_step import RoleTime
from stepsplit.analyzer.report.roles import PathLink, PathRow, PhaseSpan
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Int64

SHORTEST = 0.0005
"""Of the RL step: a shorter link of the path is part of the one before it, and a shorter pause
between two spans of a phase is part of it. At a tenth of it the path of a job that calls a
collective in each layer has thousands of links, at ten times it the reward of a rule is none."""

MOST_SPANS = 20_000
"""Spans of phases in roles.json: those of more ranks are left out, the last ones first."""


class _RankOnClock(Struct, frozen=True):
    """A rank on the clock of all roles; times in Unix ns, intervals sorted and without overlap.

    wait_* are its waits in communication for a recorded rank that comes later: from the start to
    when that rank comes, with its place in the list of all ranks. phase_* are its phases and marks.
    """

    role: JobRole
    rank: RankSplit
    wait_start: Int64
    wait_until: Int64
    wait_owner: Int64
    phase_start: Int64
    phase_end: Int64
    phase_name: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.role.name}/{self.rank.trace.rank}"


class _Piece(Struct, frozen=True):
    """Part of the path: the time that one rank spends in one phase."""

    place: int
    step: int
    phase: str
    start_ns: int
    end_ns: int


RolePhases = Mapping[str, Sequence[Mapping[str, Intervals]]]
"""The phases of each rank of each role, in own ns."""


class RolePath(Struct, frozen=True):
    """The critical path of each RL step, its mean, the phases of all ranks, for a picture, and what
    is not known."""

    links: tuple[PathLink, ...]
    rows: tuple[PathRow, ...]
    spans: tuple[PhaseSpan, ...]
    lacks: tuple[str, ...]


def find_path(
    roles: Sequence[JobRole],
    stepping: JobRole,
    phases: RolePhases,
    edges: Int64,
    numbers: Sequence[int],
    counted: Sequence[int],
) -> RolePath:
    """Follows each RL step from its end back to its start: at the rank that ended the step, and
    wherever a rank waits in communication, on at the rank that came last.

    So each instant of the step is that of one rank, and the links add up to it. A rank that runs
    nothing is not left: no call says for whom it waits.
    """
    ranks = _list_ranks(roles, phases)
    links: list[PathLink] = []
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(_PARTS))
    of_rank: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    of_step = []
    for at, number in enumerate(numbers):
        last = _find_last_rank(ranks, stepping, int(edges[at + 1]))
        of_step.append(_walk_back(ranks, last, number, int(edges[at]), int(edges[at + 1])))
    times = iter(_measure(ranks, [piece for own in of_step for piece in own]))
    for at, own in enumerate(of_step):
        measured = [(piece, next(times)) for piece in own]
        links += _join_pieces(ranks, measured, int(edges[0]))
        for piece, time in measured if at in counted else ():
            one = ranks[piece.place]
            key = one.role.name, piece.phase
            sums[key] = list(map(add, sums[key], astuple(time)[1:]))
            of_rank[key][one.rank.trace.rank] += time.window_ns
    ordered = sorted(sums, key=lambda key: -sum(sums[key]))
    means = divide_parts([ns for key in ordered for ns in sums[key]], max(len(counted), 1))
    rows = []
    for at, (name, phase) in enumerate(ordered):
        parts = means[at * len(_PARTS) : (at + 1) * len(_PARTS)]
        most = max(of_rank[name, phase], key=lambda rank: of_rank[name, phase][rank])
        rows.append(PathRow(name, most, phase, RoleTime(sum(parts), *parts)))
    spans = _list_spans(ranks, edges, numbers)
    return RolePath(tuple(links), tuple(rows), spans, tuple(_describe_doubts(roles, rows)))


def _list_spans(
    ranks: Sequence[_RankOnClock], edges: Int64, numbers: Sequence[int]
) -> tuple[PhaseSpan, ...]:
    """The phases of the ranks in the RL steps, without pauses that cannot be seen in a picture."""
    spans: list[PhaseSpan] = []
    least_ns = int(SHORTEST * int(np.diff(edges).mean()))
    for one in ranks:
        role, rank, own = one.role.name, one.rank.trace.rank, list[PhaseSpan]()
        for at, number in enumerate(numbers):
            begin, end = int(edges[at]), int(edges[at + 1])
            first = int(np.searchsorted(one.phase_end, begin, side="right"))
            last = int(np.searchsorted(one.phase_start, end, side="left"))
            for row in range(first, last):
                name = one.phase_name[row]
                start_ns = max(int(one.phase_start[row]), begin) - int(edges[0])
                end_ns = min(int(one.phase_end[row]), end) - int(edges[0])
                before = own[-1] if own and own[-1].step == number else None
                if before and before.phase == name and start_ns - before.end_ns <= least_ns:
                    own[-1] = structs.replace(before, end_ns=end_ns)
                elif end_ns - start_ns > least_ns:
                    own.append(PhaseSpan(role, rank, number, name, start_ns, end_ns))
        if len(spans) + len(own) > MOST_SPANS:
            break
        spans += own
    return tuple(spans)


_PARTS = RoleTime.__struct_fields__[1:]


def _list_ranks(roles: Sequence[JobRole], phases: RolePhases) -> list[_RankOnClock]:
    places = {
        (role.program, rank.trace.rank): place
        for place, (role, rank) in enumerate((r, rank) for r in roles for rank in r.ranks)
    }
    found = []
    for role in roles:
        for rank, spans in zip(role.ranks, phases[role.name], strict=True):
            wait_start, wait_until, wait_owner = _list_waits(role, rank)
            owner = np.array(
                [places.get((role.program, one), -1) for one in wait_owner.tolist()], dtype=np.int64
            )
            known_owner = owner >= 0
            start = np.concatenate([one.start_ns for one in spans.values()] or [_NONE])
            end = np.concatenate([one.end_ns for one in spans.values()] or [_NONE])
            names = np.repeat(np.arange(len(spans)), [len(one) for one in spans.values()])
            order = np.argsort(start, kind="stable")
            known = list(spans)
            found.append(
                _RankOnClock(
                    role,
                    rank,
                    wait_start[known_owner],
                    wait_until[known_owner],
                    owner[known_owner],
                    map_to_unix_ns(role.split, rank, start[order]),
                    map_to_unix_ns(role.split, rank, end[order]),
                    tuple(known[name] for name in names[order].tolist()),
                )
            )
    return found


_NONE = np.zeros(0, dtype=np.int64)


def _list_waits(role: JobRole, rank: RankSplit) -> tuple[Int64, Int64, Int64]:
    """The waits of the rank for one that comes later: from when, until that one comes, and its
    number."""
    split, exposed = role.split, rank.attribution.exposed
    matched = split.matched
    is_wait = np.isin(exposed.bucket, WAITS) & (exposed.owner >= 0) & (exposed.call >= 0)
    rows = np.flatnonzero(is_wait & (exposed.end_ns > exposed.start_ns))
    rows = rows[np.argsort(exposed.start_ns[rows], kind="stable")]
    start = map_to_unix_ns(split, rank, exposed.start_ns[rows])
    end = map_to_unix_ns(split, rank, exposed.end_ns[rows])
    own = matched.slice_trace(split.ranks.index(rank)).start
    shared = matched.shared[own + exposed.call[rows]]
    come = end.copy()
    for number in np.unique(exposed.owner[rows]).tolist():
        at = next((at for at, one in enumerate(split.ranks) if one.trace.rank == number), None)
        if at is None:
            continue
        calls = matched.slice_trace(at)
        of_owner = np.flatnonzero((matched.shared[calls] >= 0) & matched.leads[calls])
        labels = matched.shared[calls][of_owner]
        order = np.argsort(labels, kind="stable")
        place = np.searchsorted(labels[order], shared)
        place = np.minimum(place, max(len(labels) - 1, 0))
        arrival = map_to_unix_ns(split, split.ranks[at], matched.start_ns[calls][of_owner][order])
        if len(labels):
            is_same = (exposed.owner[rows] == number) & (labels[order][place] == shared)
            come = np.where(is_same, np.minimum(come, arrival[place]), come)
    # A rank that had come before is not waited for: what follows its data, such as the host.
    later = come > start
    return start[later], come[later], exposed.owner[rows][later].astype(np.int64)


def _find_last_rank(ranks: Sequence[_RankOnClock], stepping: JobRole, end_ns: int) -> int:
    """The rank of the stepping role that ends its step last: the one whose end is the edge."""
    found = []
    for place, one in enumerate(ranks):
        if one.role is not stepping:
            continue
        ends = [step.start_ns + step.split.step_ns for step in one.rank.steps]
        t0 = stepping.split.alignment.t0_unix_ns
        found.append((min(abs(t0 + end - end_ns) for end in ends or [0]), place))
    return min(found)[1]


def _walk_back(
    ranks: Sequence[_RankOnClock], place: int, step: int, begin_ns: int, end_ns: int
) -> list[_Piece]:
    """The path of one step, from its start on."""
    pieces: list[_Piece] = []
    at_ns = end_ns
    while at_ns > begin_ns:
        # Whom this rank waits for here, and whom that one does. Clocks of two hosts may differ by
        # more than a call takes, and then two ranks wait for each other.
        visited = {place}
        while True:
            one = ranks[place]
            row = int(np.searchsorted(one.wait_start, at_ns, side="left")) - 1
            is_waiting = row >= 0 and int(one.wait_until[row]) >= at_ns
            owner = int(one.wait_owner[row]) if is_waiting else place
            if owner in visited:
                break
            visited.add(owner)
            place = owner
        if is_waiting:
            until_ns = int(one.wait_start[row])
        else:
            until_ns = int(one.wait_until[row]) if row >= 0 else begin_ns
        until_ns = max(until_ns, begin_ns)
        pieces += _cut_by_phase(one, place, step, until_ns, at_ns)
        at_ns = until_ns
    return pieces[::-1]


def _cut_by_phase(
    one: _RankOnClock, place: int, step: int, start_ns: int, end_ns: int
) -> list[_Piece]:
    """The phases of a rank between two instants, the last one first."""
    first = int(np.searchsorted(one.phase_end, start_ns, side="right"))
    last = int(np.searchsorted(one.phase_start, end_ns, side="left"))
    pieces = []
    at_ns = start_ns
    for row in range(first, last):
        begin, end = int(one.phase_start[row]), min(int(one.phase_end[row]), end_ns)
        if begin > at_ns:
            pieces.append(_Piece(place, step, "", at_ns, begin))
            at_ns = begin
        if end > at_ns:
            pieces.append(_Piece(place, step, one.phase_name[row], at_ns, end))
            at_ns = end
    if at_ns < end_ns:
        pieces.append(_Piece(place, step, "", at_ns, end_ns))
    return pieces[::-1]


def _measure(ranks: Sequence[_RankOnClock], pieces: Sequence[_Piece]) -> list[RoleTime]:
    """What the rank of each piece does in it."""
    times: dict[int, RoleTime] = {}
    for place, one in enumerate(ranks):
        own = sorted(
            (row for row, piece in enumerate(pieces) if piece.place == place),
            key=lambda row: pieces[row].start_ns,
        )
        if own:
            pairs = np.array(
                [(pieces[row].start_ns, pieces[row].end_ns) for row in own], dtype=np.int64
            )
            measured = sum_windows(one.role.split, one.rank, pairs.ravel())[::2]
            times |= zip(own, measured, strict=True)
    return [times[row] for row in range(len(pieces))]


@dataclass
class _Group:
    """Successive pieces of the path, and their time by role and phase, and by rank."""

    pieces: list[tuple[_Piece, RoleTime]] = field(default_factory=list)
    of_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    of_rank: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, ranks: Sequence[_RankOnClock], piece: _Piece, time: RoleTime) -> None:
        """Adds a piece."""
        self.pieces.append((piece, time))
        role = ranks[piece.place].role.name
        self.of_phase[role, piece.phase] += time.window_ns
        self.of_rank[role, piece.place] += time.window_ns

    @property
    def key(self) -> tuple[str, str]:
        """The role and phase that most of it is of."""
        return max(self.of_phase, key=lambda key: self.of_phase[key])


def _join_pieces(
    ranks: Sequence[_RankOnClock], pieces: Sequence[tuple[_Piece, RoleTime]], t0_ns: int
) -> list[PathLink]:
    """The links of one step: successive pieces of a role and phase, whichever ranks they are of."""
    least_ns = SHORTEST * sum(time.window_ns for _, time in pieces)
    alike = [
        [*own]
        for _, own in groupby(pieces, lambda one: (ranks[one[0].place].role.name, one[0].phase))
    ]
    groups: list[_Group] = []
    for own in alike:
        length_ns = sum(time.window_ns for _, time in own)
        key = ranks[own[0][0].place].role.name, own[0][0].phase
        is_new = not groups or not (
            length_ns < least_ns or groups[-1].of_phase.total() < least_ns or groups[-1].key == key
        )
        if is_new:
            groups.append(_Group())
        for piece, time in own:
            groups[-1].add(ranks, piece, time)
    links = []
    for group in groups:
        role, phase = group.key
        of_role = {place: ns for (name, place), ns in group.of_rank.items() if name == role}
        one = ranks[max(of_role, key=lambda place: of_role[place])]
        columns = zip(*(astuple(time) for _, time in group.pieces), strict=True)
        time = RoleTime(*map(sum, columns))
        start_ns, end_ns = group.pieces[0][0].start_ns, group.pieces[-1][0].end_ns
        assert end_ns - start_ns == time.window_ns, "the path has a gap"
        meanwhile = ""
        if 2 * time.idle_ns > time.window_ns:
            meanwhile = _find_meanwhile(ranks, one, start_ns, end_ns)
        step, rank = group.pieces[0][0].step, one.rank.trace.rank
        links.append(PathLink(step, role, rank, phase, start_ns - t0_ns, time, meanwhile))
    return links


def _find_meanwhile(
    ranks: Sequence[_RankOnClock], idle: _RankOnClock, start_ns: int, end_ns: int
) -> str:
    """What a rank of another program does for half of the time in which this one runs nothing."""
    longest, name = (end_ns - start_ns) // 2, ""
    for one in ranks:
        if one.role.program == idle.role.program:
            continue
        sums: dict[str, int] = defaultdict(int)
        for piece in _cut_by_phase(one, 0, 0, start_ns, end_ns):
            sums[piece.phase] += piece.end_ns - piece.start_ns
        for phase, ns in sums.items():
            if phase and ns > longest:
                longest, name = ns, f"{one.label}: {phase}"
    return name


def _describe_doubts(roles: Sequence[JobRole], rows: Sequence[PathRow]) -> list[str]:
    """How far the clocks of the hosts on the path may be apart, where calls join their programs."""
    hosts: dict[str, float] = {}
    on_path = {row.role for row in rows}
    for role in roles:
        if role.name in on_path:
            for rank, clock in zip(role.split.ranks, role.split.alignment.clocks, strict=True):
                if clock.sigma_ns is None or clock.island is not None:
                    continue
                if any(rank is own for own in role.ranks):
                    hosts[clock.host] = max(hosts.get(clock.host, 0), clock.sigma_ns)
    if len(hosts) < 2 or not any(hosts.values()):
        return []
    off = units.format_milliseconds(int(2 * max(hosts.values())))
    return [
        f"where exactly the critical path goes from one host to another: their clocks are known to"
        f" {off}"
    ]

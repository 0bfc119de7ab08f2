"""The critical path of each RL step across roles: which rank, and what it did, at each instant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby
from operator import add

import numpy as np
from msgspec import Struct, field
from msgspec.structs import astuple

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.rl_windows import JobRole, sum_windows
from stepsplit.analyzer.diagnose.role_ranks import (
    SHORTEST,
    RankOnClock,
    RolePhases,
    list_ranks,
    list_spans,
)
from stepsplit.analyzer.report.headline import divide_parts
from stepsplit.analyzer.report.rl_step import RoleTime
from stepsplit.analyzer.report.roles import PathLink, PathRow, PhaseSpan
from stepsplit.analyzer.trace import Int64


class _Piece(Struct, frozen=True):
    """Part of the path: the time that one rank spends in one phase."""

    place: int
    step: int
    phase: str
    start_ns: int
    end_ns: int


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
    ranks = list_ranks(roles, phases)
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
    spans = list_spans(ranks, edges, numbers)
    return RolePath(tuple(links), tuple(rows), spans, tuple(_describe_doubts(roles, rows)))


_PARTS = RoleTime.__struct_fields__[1:]


def _find_last_rank(ranks: Sequence[RankOnClock], stepping: JobRole, end_ns: int) -> int:
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
    ranks: Sequence[RankOnClock], place: int, step: int, begin_ns: int, end_ns: int
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
    one: RankOnClock, place: int, step: int, start_ns: int, end_ns: int
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


def _measure(ranks: Sequence[RankOnClock], pieces: Sequence[_Piece]) -> list[RoleTime]:
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


class _Group(Struct):
    """Successive pieces of the path, and their time by role and phase, and by rank."""

    pieces: list[tuple[_Piece, RoleTime]] = field(default_factory=list)
    of_phase: Counter[tuple[str, str]] = field(default_factory=Counter)
    of_rank: Counter[tuple[str, int]] = field(default_factory=Counter)

    def add(self, ranks: Sequence[RankOnClock], piece: _Piece, time: RoleTime) -> None:
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
    ranks: Sequence[RankOnClock], pieces: Sequence[tuple[_Piece, RoleTime]], t0_ns: int
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
    ranks: Sequence[RankOnClock], idle: RankOnClock, start_ns: int, end_ns: int
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

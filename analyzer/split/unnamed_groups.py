"""Process groups of calls that carry no arguments: who communicates with whom, by when they end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, groupby

import numpy as np
from msgspec import Struct
from msgspec.structs import replace, replace as replace_fields

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, sort_distinct
from stepsplit.analyzer.split.clock import Alignment
from stepsplit.analyzer.split.job_size import JobSize
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh_groups import parse_group_name, parse_single_axis
from stepsplit.analyzer.split.protocols import PROTOCOLS, CallRoles, KernelRole, find_call_roles
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.trace import (
    OP_CODE,
    Bool,
    Category,
    Group,
    Int32,
    Int64,
    Note,
    RankTrace,
    find_earlier_calls,
)
from stepsplit.collectors.formats.run_spec import Mesh

# The n-th kernel of a stream in a step is the same call on all ranks that run the same program. Who
# of them belongs to one group is not recorded: it follows from when their kernels end. Members of
# a call that ends with a barrier end together, however far apart they start. Ranks of other groups
# may do so, too, where all are equally fast: a group is only believed if one rank came last, alone
# and late, and all others ended with it nevertheless, in several steps; or if the recording lists
# it and the library says along which axis it communicates.

TOGETHER_NS = 15_000
"""Ends of one call are at most this far apart on aligned clocks: the biases of real hosts are 1 to
7 us. test_unnamed_groups.py passes at 8 and at 30 us."""

_SHARE = 0.98
"""Of the calls of a group so many end together: the profiler may record one of them late."""

_LATER, _LATER_NS = 3.0, 5_000
"""A call proves its group if its last member came later than the one before it by this many times
the distance of the ends, and so many ns more."""

_PROOFS, _STEPS = 3, 2
"""Fewest calls that prove a group, in at least so many steps."""

_SURE_CLOCK_NS = 20_000
"""Clocks less certain than this are found anew from the calls themselves."""


class FoundGroups(Struct, frozen=True):
    """The traces with the calls whose groups were found on them, and notes on what was found and
    why the rest was not."""

    traces: tuple[RankTrace, ...]
    notes: tuple[Note, ...]


def has_unnamed_calls(traces: Sequence[RankTrace]) -> bool:
    """Whether some calls have no group."""
    return any(len(_find_rows(trace)) for trace in traces)


def find_unnamed_groups(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    matched: MatchedCalls,
    alignment: Alignment,
    listed: Sequence[Group],
    mesh: Mesh | None,
    size: JobSize,
) -> FoundGroups:
    """Finds the groups of the calls without one.

    Args:
        traces: The traces of all ranks.
        steps: Their steps; equal numbers are one step.
        matched: Their calls with arguments.
        alignment: Their clocks, as far as those calls show them.
        listed: The process groups that the recording lists.
        mesh: The mesh, if it is stated.
        size: The number of ranks of the job.
    """
    calls = [_RankCalls.build(*one) for one in zip(traces, steps, strict=True)]
    finder = _Assignments(traces)
    reasons = Counter[str]()
    classes: dict[object, list[int]] = defaultdict(list)
    for i, one in enumerate(calls):
        if one.shape:
            classes[one.shape].append(i)
    candidates = _list_candidates(listed, mesh)
    lists_more = mesh is not None or _lists_more(traces, listed, size.ranks)
    linked = _find_linked_clocks(traces, matched, alignment)
    for members in classes.values():
        table = _CallTable.build(
            traces, members, [calls[i] for i in members], alignment, linked[members]
        )
        others = [one for i, one in enumerate(calls) if one.shape and i not in members]
        lacking = size.ranks > len(traces)
        scopes = list(table.list_scopes())
        choices = [
            _choose_groups(
                table, scope, candidates, others, size,
                lacking=lacking, lists_more=lists_more,
            )
            for scope in scopes
        ]  # fmt: skip
        for scope, chosen in zip(scopes, choices, strict=True):
            if chosen in (_SAME_TIME, _NOT_LATE):
                alike = _choose_alike(table, scope, candidates, zip(scopes, choices, strict=True))
                chosen = alike or chosen
            if isinstance(chosen, str):
                reasons[chosen] += len(scope.slots)
            else:
                finder.assign(table, scope, chosen)
    notes = list(finder.list_notes())
    if reasons:
        text = "calls without a process group are not separated into waiting and transfer: "
        notes.append(Note("groups_not_found", text + "; ".join(dict(reasons.most_common(3)))))
    return FoundGroups(finder.apply(), tuple(notes))


# The calls of one rank by step, and those of ranks that run the same program.


class _RankCalls(Struct, frozen=True):
    """The unnamed calls of a rank in its steps, in the order of streams and then of time.

    shape is the stream and the kind of each call of a usual step, equal for ranks that run the same
    program and () for a rank without such calls; usual_steps has the rows of each step of that
    shape by its number: others, as with an evaluation or cut by the recording, are no evidence.
    rows are those of all steps.
    """

    rank: int
    roles: CallRoles
    rows: Int64
    usual_steps: dict[int, Int64]
    shape: tuple[tuple[int, tuple[str, str, str]], ...]

    @property
    def stream(self) -> tuple[int, ...]:
        """The number of the stream of each call of a usual step."""
        return tuple(stream for stream, _ in self.shape)

    @classmethod
    def build(cls, trace: RankTrace, steps: Steps) -> _RankCalls:
        chosen = _find_rows(trace)
        roles = find_call_roles(trace)
        if not len(chosen):
            return cls(trace.rank, roles, chosen, {}, ())
        events, calls = trace.events, trace.calls
        start, lane = events.start_ns[calls.event], events.lane[calls.event]
        # Copies between barriers of symmetric memory are part of a call, others may be anyone's.
        copies = np.array([role.step == "copy" for role in roles.list(chosen)], dtype=np.bool_)
        with_barriers = lane[chosen[roles.mask("is_part")[chosen]]]
        chosen = chosen[~copies | np.isin(lane[chosen], with_barriers)]
        tids = [one.tid for one in events.lanes]
        number = {tid: n for n, tid in enumerate(sorted(set(tids), key=lambda t: (len(t), t)))}
        order = np.array([number[tid] for tid in tids], dtype=np.int64)
        used = sorted({int(order[lane[row]]) for row in chosen.tolist()})
        by_step: dict[int, tuple[Int64, tuple[tuple[int, tuple[str, str, str]], ...]]] = {}
        for window in steps.windows:
            at = chosen[(start[chosen] >= window.start_ns) & (start[chosen] < window.end_ns)]
            at = at[np.lexsort((start[at], order[lane[at]]))]
            streams = [used.index(int(order[lane[row]])) for row in at.tolist()]
            kinds = [(role.protocol, role.step, role.op) for role in roles.list(at)]
            by_step[window.step] = at, tuple(zip(streams, kinds, strict=True))
        shapes = Counter(shape for _, shape in by_step.values() if shape)
        usual = shapes.most_common(1)[0][0] if shapes else ()
        same = {step: at for step, (at, shape) in by_step.items() if shape and shape == usual}
        return cls(trace.rank, roles, chosen, same, usual)


def _find_rows(trace: RankTrace) -> Int64:
    """The collectives without group and peer on a device."""
    calls = trace.calls
    if not trace.on_device or not len(calls):
        return np.zeros(0, dtype=np.int64)
    unnamed = (calls.group_id < 0) & (calls.peer < 0) & ~find_earlier_calls(trace)
    # The collector names the group of a library's call, which has no number nevertheless.
    names = tuple(f"({one.name})" for one in PROTOCOLS)
    named = np.array([*(one.name.endswith(names) for one in trace.groups), False])[calls.group_id]
    unnamed |= named & (calls.seq < 0) & find_call_roles(trace).mask("protocol")
    copies = trace.events.category[calls.event] == int(Category.MEMCPY)
    # A kernel of messages has a peer that nothing tells.
    meets = ~calls.is_message & ((calls.op != OP_CODE["unknown"]) | copies)
    return np.flatnonzero(unnamed & meets)


class _Scope(Struct, frozen=True):
    """Slots that are on the groups of one axis: all calls of a library of experts on one stream, or
    one call of a step.

    library: its name and the axis that it is for, "" if unknown; size: the number of members that
    its kernels state, 0 if none.
    """

    slots: Int64
    library: str
    axis: str
    size: int


class _CallTable(Struct, frozen=True):
    """The calls of ranks that run the same program: slot k of step s on rank r.

    Arrays of shape (ranks, steps, slots). recorded: all ranks with a trace. start_ns is when a
    member came: for the half of a call that receives, when the half that sends began; begin_ns is
    when its kernel did. clock numbers
    the ranks whose times can be compared; together: slots that end on all members at once; sends:
    slots that only send. of_slot is the slot whose call a slot belongs to: a receive to its send, a
    copy to its barrier. doubtful: slots of which it is unknown whether they send, receive, or both.
    """

    ranks: tuple[int, ...]
    recorded: frozenset[int]
    traces: tuple[int, ...]
    row: Int64
    start_ns: Int64
    begin_ns: Int64
    end_ns: Int64
    clock: Int64
    roles: tuple[KernelRole, ...]
    stream: tuple[int, ...]
    together: Bool
    sends: Bool
    of_slot: Int64
    doubtful: Bool
    group_id: tuple[Int32, ...]
    groups: tuple[tuple[Group, ...], ...]

    @classmethod
    def build(
        cls,
        traces: Sequence[RankTrace],
        members: Sequence[int],
        calls: Sequence[_RankCalls],
        alignment: Alignment,
        linked: Int64,
    ) -> _CallTable:
        common = sorted(set.intersection(*(set(one.usual_steps) for one in calls)))
        row = np.array([[one.usual_steps[n] for n in common] for one in calls], dtype=np.int64)
        length = len(calls[0].stream)
        row = row.reshape(len(calls), len(common), length)
        start, end = np.empty_like(row), np.empty_like(row)
        for r, i in enumerate(members):
            event = traces[i].calls.event[row[r]]
            clock, events = alignment.clocks[i], traces[i].events
            start[r] = clock.map_to_common_ns(events.start_ns[event].ravel()).reshape(event.shape)
            end[r] = clock.map_to_common_ns(events.ends_of(event.ravel())).reshape(event.shape)
        first = next(iter(calls[0].usual_steps.values()))
        roles, stream = tuple(calls[0].roles.list(first)), calls[0].stream
        together = np.array([role.together for role in roles], dtype=np.bool_)
        table = cls(
            tuple(traces[i].rank for i in members), frozenset(one.rank for one in traces),
            tuple(members), row, start, start, end,
            group_ids(linked), roles, stream, together, np.zeros(length, dtype=np.bool_),
            np.arange(length), np.zeros(length, dtype=np.bool_),
            tuple(traces[i].calls.group_id for i in members),
            tuple(traces[i].groups for i in members),
        )  # fmt: skip
        return table._join_clocks()._pair_halves()._join_copies()

    def _join_clocks(self) -> _CallTable:
        """The table with the clocks of ranks that end enough calls together shifted onto each
        other's."""
        if not self.clock.max(initial=0) or not self.together.any():
            return self
        # No halves are paired yet: each member came when its kernel began.
        start, end, clock = self.start_ns.copy(), self.end_ns.copy(), self.clock.copy()
        at = self.together

        def select(number: int) -> Iterator[Int64]:
            return (each[clock == number][:, :, at] for each in (start, end))

        def shift_clock(number: int, other: int, shift_ns: int) -> None:
            here = clock == number
            start[here] -= shift_ns
            end[here] -= shift_ns
            clock[here] = other

        # Those that share most calls come first: two ranks that share none may end a few calls at
        # one distance, as long as a member that always comes last is not joined with them.
        agreeing = []
        for i, j in combinations(range(len(clock)), 2):
            if clock[i] == clock[j]:
                continue
            slots = _find_agreeing_slots(end[i] - end[j], at)
            if slots.sum() >= 2:
                agreeing.append((i, j, slots))
        for i, j, slots in sorted(agreeing, key=lambda one: -int(one[2].sum())):
            if clock[i] == clock[j]:
                continue
            last = (start[clock == clock[n]][:, :, slots].max(axis=0) for n in (i, j))
            apart = (end[i] - end[j])[:, slots]
            came = (next(last) - next(last), (start[i] - start[j])[:, slots])
            needed = _LATER * _spread(apart) + _LATER_NS
            agree = 2 * slots.sum() > at.sum() or min(map(_spread, came)) >= needed
            if agree:
                shift_clock(int(clock[i]), int(clock[j]), int(np.median(apart)))
        joined = True
        while joined:
            joined = False
            for new, old in combinations(sorted(set(clock.tolist()), reverse=True), 2):
                shift = _find_followed_shift(*select(new), *select(old))
                if shift is not None:
                    shift_clock(new, old, shift)
                    joined = True
                    break
        return replace_fields(
            self, start_ns=start, begin_ns=start, end_ns=end, clock=group_ids(clock)
        )

    def _pair_halves(self) -> _CallTable:
        """The table with the two kernels of a call that sends and receives by one each as one
        call."""
        halves = [k for k, role in enumerate(self.roles) if role.halves]
        if not halves:
            return self
        sends, of_slot = self.sends.copy(), self.of_slot.copy()
        doubtful, start = self.doubtful.copy(), self.start_ns.copy()
        for stream in sorted({self.stream[k] for k in halves}):
            slots = [k for k in halves if self.stream[k] == stream]
            runs = [[*run] for _, run in groupby(slots, lambda k: self.roles[k].step)]
            if all(len(run) == 1 for run in runs):
                continue
            firsts = [k for run in runs for k in run[::2]]
            # Only a kernel that waits for no other ends before another member has come.
            left = self.end_ns[:, :, firsts].min(axis=0) < (
                self.start_ns[:, :, firsts].max(axis=0) - TOGETHER_NS
            )
            if any(len(run) % 2 for run in runs) or left.sum() < _PROOFS:
                doubtful[slots] = True
                continue
            for run in runs:
                for send, receive in zip(run[::2], run[1::2], strict=True):
                    sends[send], of_slot[receive] = True, send
                    start[:, :, receive] = self.start_ns[:, :, send]
        return replace_fields(self, sends=sends, of_slot=of_slot, doubtful=doubtful, start_ns=start)

    def _join_copies(self) -> _CallTable:
        """The table with the copies behind a barrier as part of its call."""
        of_slot, last = self.of_slot.copy(), dict[int, int]()
        for k, role in enumerate(self.roles):
            if role.is_part:
                last[self.stream[k]] = k
            elif role.step == "copy" and self.stream[k] in last:
                of_slot[k] = last[self.stream[k]]
        return replace_fields(self, of_slot=of_slot)

    def list_scopes(self) -> Iterator[_Scope]:
        """The sets of slots of which each is on groups of one axis."""
        by_scope: dict[object, list[int]] = defaultdict(list)
        for k, (role, stream) in enumerate(zip(self.roles, self.stream, strict=True)):
            whole = int(self.of_slot[k])
            key: object = (role.protocol, stream) if role.axis else whole
            by_scope[key].append(k)
        for slots in by_scope.values():
            roles = [self.roles[k] for k in slots]
            size = max(role.size for role in roles)
            yield _Scope(np.array(slots), roles[0].protocol, roles[0].axis, size)

    def find_stated(self, scope: _Scope) -> _Candidate | None:
        """The groups that the collector's ranges name; None if a call is in none."""
        groups = dict[Group, None]()
        for group_id, own, row in zip(self.group_id, self.groups, self.row, strict=True):
            numbers = set(group_id[row[:, scope.slots]].ravel().tolist())
            if len(numbers) != 1 or -1 in numbers:
                return None
            groups[own[numbers.pop()]] = None
        return _Candidate(tuple(groups), True)

    def describe(self, scope: _Scope) -> tuple[object, ...]:
        """The stream and the kind of the call of a scope."""
        first = int(scope.slots[0])
        role = self.roles[first]
        return self.stream[first], role.protocol, role.step, role.op

    def measure_transfer_ns(self, scope: _Scope) -> int:
        """The median time from the last start of all ranks to the first end of a call."""
        first = int(scope.slots[0])
        took = self.end_ns[:, :, first].min(axis=0) - self.start_ns[:, :, first].max(axis=0)
        return max(int(np.median(took)), 0)


def _find_linked_clocks(
    traces: Sequence[RankTrace], matched: MatchedCalls, alignment: Alignment
) -> Int64:
    """A number for each rank, equal for ranks whose clocks are aligned by calls that end together
    or by messages, or that share a host."""
    rows = np.flatnonzero((matched.together | matched.is_message) & (matched.shared >= 0))
    calls = int(matched.shared.max(initial=-1)) + 1
    hosts = {host: n for n, host in enumerate(dict.fromkeys(t.host for t in traces if t.host))}
    on_host = [(i, calls + hosts[t.host]) for i, t in enumerate(traces) if t.host]
    own, other = np.array(on_host, dtype=np.int64).reshape(-1, 2).T
    # A rank whose clock is uncertain is on its own.
    sure = np.array([(one.sigma_ns or 0) <= _SURE_CLOCK_NS for one in alignment.clocks])
    trace = np.concatenate((matched.trace[rows].astype(np.int64), own))
    link = np.concatenate((matched.shared[rows], other))[sure[trace]]
    trace = trace[sure[trace]]
    # Links between two ranks are few, of however many calls; scipy's connected components take
    # longer to import than a small analysis.
    order = np.argsort(link, kind="stable")
    link, trace = link[order], trace[order]
    pairs = (trace[:-1] * len(traces) + trace[1:])[link[1:] == link[:-1]]
    first = np.arange(len(traces))
    for pair in sort_distinct(pairs).tolist():
        one, next_one = (first[rank] for rank in divmod(pair, len(traces)))
        first[first == max(one, next_one)] = min(one, next_one)
    # A call may link ranks without aligning their clocks.
    islands = [-1 if one.island is None else one.island for one in alignment.clocks]
    return group_ids(first, np.array(islands))


def _find_agreeing_slots(apart_ns: Int64, chosen: Bool) -> Bool:
    """The slots, of those chosen, in which two ranks end at the distance, shape (steps, slots),
    that most of them agree on, in every step."""
    flat = np.sort(apart_ns[:, chosen].ravel())
    if apart_ns.shape[0] < _STEPS or not len(flat):
        return np.zeros_like(chosen)
    last = np.searchsorted(flat, flat + TOGETHER_NS, side="right")
    best = int(np.argmax(last - np.arange(len(flat))))
    agrees: Bool = (apart_ns >= flat[best]) & (apart_ns <= flat[last[best] - 1])
    return chosen & agrees.all(axis=0)


def _find_followed_shift(
    start: Int64, end: Int64, other_start: Int64, other_end: Int64
) -> int | None:
    """The shift by slots that two ranks end at one distance however far apart they came, and the
    last of each clock's ranks; None without one.

    A distance of ends is the same in each step also if all ranks are equally fast, or one is always
    equally late: it shows a call of both only if the distances of starts vary.
    """
    if end.shape[1] < _PROOFS:
        return None
    came = start.max(axis=0) - other_start.max(axis=0)
    shifts = list[float]()
    for one_start, one_end in zip(start, end, strict=True):
        apart = one_end - other_end
        spread = np.ptp(apart, axis=1)
        both = np.minimum(np.ptp(came, axis=0), np.ptp(one_start - other_start, axis=1))
        follows = (spread <= TOGETHER_NS) & (both >= _LATER * spread + _LATER_NS)
        if follows.any():
            # Others of the same group as the one that ends most as this rank does may fit, too.
            at = np.unravel_index(
                np.argmin(np.where(follows, spread, TOGETHER_NS + 1)), spread.shape
            )
            shifts.append(float(np.median(apart[at[0], :, at[1]])))
    return round(np.median(shifts)) if shifts and np.ptp(shifts) <= TOGETHER_NS else None


# Which groups the recording lists.


class _Candidate(Struct, frozen=True):
    """Disjoint groups of one shape that may be those of a call; listed: by the recording.

    names: all groups of the same ranks as each group.
    """

    groups: tuple[Group, ...]
    listed: bool
    names: tuple[tuple[Group, ...], ...] = ()

    @property
    def axes(self) -> set[str | None]:
        """The axes that the descriptions of its groups name."""
        return {parse_single_axis(one.description) for names in self.names for one in names}

    def name_groups(self, axis: str) -> tuple[Group, ...]:
        """The groups by the names that say most: of this axis if it is not "", else of any but
        that of experts."""
        if not self.names:
            return self.groups
        chosen = []
        for names in self.names:
            if axis:
                fit = [one for one in names if parse_single_axis(one.description) == axis]
                fit = fit or [Group("", names[0].ranks, axis)]
            else:
                parsed = {one: parse_group_name(one.description) for one in names}
                fit = [one for one, own in parsed.items() if own.whole and not own.experts]
            chosen.append((fit or names)[0])
        return tuple(chosen)


def _list_candidates(listed: Sequence[Group], mesh: Mesh | None) -> list[_Candidate]:
    """The groups of the recording and of the stated mesh, those of one shape together."""
    stated = []
    if mesh is not None:
        ranks = range(mesh.world_size)
        stated = [Group(axis, mesh.line(rank, axis), axis) for axis in mesh.axes for rank in ranks]
    by_shape: dict[tuple[int, ...], dict[tuple[int, ...], list[Group]]] = defaultdict(dict)
    for group in dict.fromkeys((*listed, *stated)):
        if len(group.ranks) > 1:
            own = tuple(sorted(group.ranks))
            shape = tuple(rank - own[0] for rank in own)
            by_shape[shape].setdefault(own, []).append(group)
    return [
        _Candidate(
            tuple(names[0] for names in groups.values()), True, tuple(map(tuple, groups.values()))
        )
        for groups in by_shape.values()
    ]


def _lists_more(traces: Sequence[RankTrace], listed: Sequence[Group], world_size: int) -> bool:
    """Whether the recording lists groups of a part of the ranks beside those of its calls with
    arguments: then it lists all."""
    used = {
        frozenset(trace.groups[group_id].ranks)
        for trace in traces
        for group_id in np.unique(trace.calls.group_id).tolist()
        if group_id >= 0
    }
    parts = {frozenset(group.ranks) for group in listed if 1 < len(group.ranks) < world_size}
    return not parts <= used


# The choice between them.


class _Evidence(Struct, frozen=True):
    """How well a group fits: whether its calls end together, how many were compared, the distances
    of their ends and from the first member that came to the last one, and the number of calls and
    of steps that prove it."""

    fits: bool
    calls: int
    apart_ns: int
    came_ns: int
    proofs: int
    steps: int

    @property
    def is_proven(self) -> bool:
        return self.proofs >= _PROOFS and self.steps >= _STEPS


class _Chosen(Struct, frozen=True):
    """The groups of a scope's calls, each with the places of its members in the table and its
    evidence."""

    groups: tuple[tuple[Group, tuple[int, ...], _Evidence], ...]
    listed: bool


def _choose_groups(
    table: _CallTable,
    scope: _Scope,
    candidates: Sequence[_Candidate],
    others: Sequence[_RankCalls],
    size: JobSize,
    *,
    lacking: bool,
    lists_more: bool,
) -> _Chosen | str:
    """The groups of the calls in a scope, else why they are unknown."""
    if not table.row.shape[1]:
        return "no step of the same calls is on all ranks"
    if table.doubtful[scope.slots].any():
        return "whether a kernel sends, receives or does both is unknown"
    stated = table.find_stated(scope)
    if stated is not None:
        place = {rank: n for n, rank in enumerate(table.ranks)}
        return _weigh(table, scope, stated, place) or "the groups that calls name contradict them"
    if size.is_known and scope.size == size.ranks:
        if _is_shared(table, scope, others):
            return "the ranks make different calls"
        ranks = tuple(range(size.ranks))
        every = Group(scope.library, ranks, scope.axis)
        return _choose_only(table, scope, every)
    if len(table.recorded) == 1:
        # A single rank has the group that the recording lists, if there is no other of several.
        names = [one for each in candidates for one in each.name_groups("")]
        own = [one for one in names if table.ranks[0] in one.ranks]
        if len(own) == 1:
            return _choose_only(table, scope, own[0])
    if len(table.ranks) < 2:
        return "no other rank that was recorded runs the same calls"
    if table.row.shape[1] < _STEPS:
        return "a single step proves no group"
    if not (table.together[scope.slots].any() or table.sends[scope.slots].any()):
        return "nothing of their kernels ends on all members together"
    place = {rank: n for n, rank in enumerate(table.ranks)}
    tried = [*candidates, *_cluster(table, scope)]
    fitting: dict[frozenset[tuple[int, ...]], tuple[_Candidate, _Chosen]] = {}
    for candidate in tried:
        chosen = _weigh(table, scope, candidate, place)
        if chosen is not None:
            key = frozenset(group.ranks for group, _, _ in chosen.groups)
            if key not in fitting:
                fitting[key] = (candidate, chosen)
    sized = [
        (candidate, chosen)
        for candidate, chosen in fitting.values()
        if not scope.size or all(len(g.ranks) == scope.size for g, _, _ in chosen.groups)
    ]
    if any(table.roles[k].of_node for k in scope.slots.tolist()):
        sized = [one for one in sized if _are_apart(table, scope, one[1])]
    if not sized:
        if table.clock.max():
            return "the clocks of ranks that may be their members are not aligned"
        return "no set of ranks ends them together in each step"
    proven = [one for one in sized if any(e.is_proven for _, _, e in one[1].groups)]
    for candidate, chosen in sorted(proven, key=lambda one: -len(one[1].groups[0][0].ranks)):
        if candidate.listed or scope.size:
            return chosen
        if _is_shared(table, scope, others) or lacking:
            return "ranks that are not recorded, or run other calls, may belong to their groups"
        return chosen
    along = [one for one in sized if scope.axis and scope.axis in one[0].axes]
    likely = along or [one for one in sized if scope.size]
    if not likely and not scope.axis and len(sized) == 1 and len(sized[0][1].groups) > 1:
        # Of all sets of groups that the recording lists, the only one that no call contradicts;
        # groups across clocks that are not aligned are not known to be contradicted.
        if table.clock.max():
            return "the clocks of ranks that may be their members are not aligned"
        likely = [one for one in sized if one[0].listed]
    # Groups of calls with arguments are not all groups: where two of them end together, too, other
    # halves of the two would fit as well.
    if len(likely) == 1 and (along or lists_more or not _fit_joined(table, scope, likely[0][1])):
        return likely[0][1]
    came_ns = max(evidence.came_ns for _, one in sized for _, _, evidence in one.groups)
    return _SAME_TIME if came_ns <= TOGETHER_NS else _NOT_LATE


_SAME_TIME = "their members come at the same time, so that several groups fit"

_NOT_LATE = (
    "in too few of them one member comes last alone, and late for how far apart they end, so that"
    " several groups fit"
)

_ALIKE = 1.5
"""Calls on one stream whose transfers differ by at most this factor may be on the same groups."""


def _choose_alike(
    table: _CallTable,
    scope: _Scope,
    candidates: Sequence[_Candidate],
    chosen: Iterable[tuple[_Scope, _Chosen | str]],
) -> _Chosen | None:
    """The groups of a call that several fit: those of calls like it, where they agree, fit, and no
    other groups of the recording do; None otherwise."""
    place = {rank: n for n, rank in enumerate(table.ranks)}
    kind = table.describe(scope)
    took_ns = table.measure_transfer_ns(scope)
    alike = {}
    for other, found in chosen:
        if isinstance(found, str) or table.describe(other) != kind:
            continue
        ratio = (took_ns + 1) / (table.measure_transfer_ns(other) + 1)
        if 1 / _ALIKE <= ratio <= _ALIKE:
            groups = tuple(group for group, _, _ in found.groups)
            alike[frozenset(group.ranks for group in groups)] = _Candidate(groups, found.listed)
    if len(alike) != 1:
        return None
    ((ranks, candidate),) = alike.items()
    own = {frozenset(one) for one in ranks}
    for other_candidate in candidates:
        sets = [frozenset(group.ranks) for group in other_candidate.groups]
        includes = all(any(one <= each for each in sets) for one in own)
        if not includes and _weigh(table, scope, other_candidate, place) is not None:
            return None
    return _weigh(table, scope, candidate, place)


def _choose_only(table: _CallTable, scope: _Scope, every: Group) -> _Chosen | str:
    """The only possible group, unless what was recorded contradicts it."""
    places = tuple(range(len(table.ranks)))
    if len(places) < 2:
        return _Chosen(((every, places, _Evidence(True, 0, 0, 0, 0, 0)),), listed=True)
    evidence = _measure(table, scope, places)
    if not evidence.fits:
        return "no set of ranks ends them together in each step"
    return _Chosen(((every, places, evidence),), listed=True)


def _weigh(
    table: _CallTable, scope: _Scope, candidate: _Candidate, place: dict[int, int]
) -> _Chosen | None:
    """The groups of a candidate with what supports them; None if some call contradicts one, or if a
    rank is in none."""
    found, covered = [], set[int]()
    for group in candidate.name_groups(scope.axis):
        here = tuple(place[rank] for rank in group.ranks if rank in place)
        if not here:
            continue
        # A member that was recorded and makes other calls contradicts the group, too.
        missing = table.recorded & set(group.ranks) - set(place)
        if covered & set(here) or len(here) < 2 or missing:
            return None
        covered |= set(here)
        evidence = _measure(table, scope, here)
        if not evidence.fits:
            return None
        found.append((group, here, evidence))
    if len(covered) < len(place):
        return None
    return _Chosen(tuple(found), candidate.listed)


def _measure(table: _CallTable, scope: _Scope, members: tuple[int, ...]) -> _Evidence:
    """How the calls of these members end."""
    none = _Evidence(False, 0, 0, 0, 0, 0)
    chosen = np.array(members)
    if len(np.unique(table.clock[chosen])) > 1:
        return none
    slots = scope.slots
    start, end = table.start_ns[chosen][:, :, slots], table.end_ns[chosen][:, :, slots]
    last, first_end = start.max(axis=0), end.min(axis=0)
    apart = end.max(axis=0) - first_end
    together, sends = table.together[slots], table.sends[slots]
    receives = ~sends & np.isin(table.of_slot[slots], np.flatnonzero(table.sends))
    # No member has all data before the last one came; one that only sends need not wait.
    roles = [table.roles[k] for k in slots.tolist()]
    waits = ~sends & np.array([not one.writes and one.step != "copy" for one in roles])
    if waits.any() and (first_end >= last - TOGETHER_NS)[:, waits].mean() < _SHARE:
        return none
    if together.any() and (apart <= TOGETHER_NS)[:, together].mean() < _SHARE:
        return none
    margin = last - np.partition(start, -2, axis=0)[-2]
    counts = (together | receives)[np.newaxis, :]
    proves = counts & (margin >= _LATER * apart + _LATER_NS) & (first_end >= last)
    if receives.any():
        begin = table.begin_ns[chosen][:, :, slots]
        steps = np.array([table.roles[k].step for k in slots.tolist()])
        for step in np.unique(steps):
            at = receives & (steps == step)
            proves[:, at] = _follow_last(
                start[:, :, at], begin[:, :, at], end[:, :, at], proves[:, at]
            )
    typical = int(np.median(apart[:, together])) if together.any() else int(np.median(apart))
    return _Evidence(
        True,
        int(counts.sum()) * len(last),
        typical,
        int(np.median(last - start.min(axis=0))),
        int(proves.sum()),
        int(proves.any(axis=1).sum()),
    )


def _follow_last(start: Int64, begin: Int64, end: Int64, proves: Bool) -> Bool:
    """Which calls, of shape (steps, slots), of halves that receive prove that they waited for the
    last member: those that do by their ends alone, and others.

    The last member itself begins to receive when it has sent, and may end as much later than the
    others: the times that receives take are compared from when they could begin. Ends of other
    groups may coincide by chance, or as the last member is as late as data take. But they do not
    follow it: the later it came, the earlier they end after it.
    """
    last = start.max(axis=0)
    took = end - np.maximum(begin, last)
    others = begin.copy()
    np.put_along_axis(others, start.argmax(axis=0)[np.newaxis], np.iinfo(np.int64).min, axis=0)
    waited = last - others.max(axis=0)
    late = waited >= _LATER_NS
    if not late.any() or _spread(waited[late]) < (
        _LATER * _spread(took.min(axis=0)[late]) + _LATER_NS
    ):
        return np.zeros_like(proves)
    found: Bool = proves | (waited >= _LATER * np.ptp(took, axis=0) + _LATER_NS)
    return found


def _spread(values_ns: Int64) -> float:
    """The distance of the 10th and the 90th percentile."""
    low, high = np.percentile(values_ns, (10, 90))
    return float(high - low)


def _are_apart(table: _CallTable, scope: _Scope, chosen: _Chosen) -> bool:
    """Whether each two groups are shown not to be nodes of one group: a call of one of them ends
    before all ranks of the other have come."""
    spans = []
    for _, members, _ in chosen.groups:
        rows = np.array(members)
        start, end = (at[rows][:, :, scope.slots] for at in (table.start_ns, table.end_ns))
        spans.append((start.max(axis=0), end.min(axis=0) + TOGETHER_NS))
    return all(
        bool((one[1] < other[0]).any() or (other[1] < one[0]).any())
        for one, other in combinations(spans, 2)
    )


def _fit_joined(table: _CallTable, scope: _Scope, chosen: _Chosen) -> bool:
    """Whether two of the groups may as well be one."""
    pairs = combinations([members for _, members, _ in chosen.groups], 2)
    return any(_measure(table, scope, (*one, *other)).fits for one, other in pairs)


def _cluster(table: _CallTable, scope: _Scope) -> Iterator[_Candidate]:
    """Sets of ranks that end the calls of the scope together in every step, and all ranks."""
    ranks = table.ranks
    yield _Candidate((Group("", ranks, ""),), False)
    slots = scope.slots[table.together[scope.slots]]
    if not len(slots):
        return
    label = table.clock.copy()
    ends = table.end_ns[:, :, slots].reshape(len(ranks), -1)
    for column in ends.T:
        order = np.argsort(column, kind="stable")
        block = np.empty(len(ranks), dtype=np.int64)
        block[order] = np.cumsum(np.diff(column[order], prepend=column[order[0]]) > TOGETHER_NS)
        label = group_ids(label, block)
    groups = [
        Group("", tuple(ranks[i] for i in np.flatnonzero(label == one).tolist()), "")
        for one in np.unique(label).tolist()
    ]
    if len(groups) > 1 and len({len(group.ranks) for group in groups}) == 1:
        yield _Candidate(tuple(groups), False)


def _is_shared(table: _CallTable, scope: _Scope, others: Sequence[_RankCalls]) -> bool:
    """Whether ranks that run other calls use the same library or op, so that they may be members,
    too."""
    kinds = {(table.roles[k].protocol, table.roles[k].op) for k in scope.slots.tolist()}
    return any(
        (role.protocol, role.op) in kinds for one in others for role in one.roles.list(one.rows)
    )


# The traces with what was found.


class _Assignments:
    """The group and the number of each call whose group was found."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self._traces = traces
        self._groups: list[list[Group]] = [list(trace.groups) for trace in traces]
        self._group_id = [trace.calls.group_id.copy() for trace in traces]
        self._seq = [trace.calls.seq.copy() for trace in traces]
        self._op = [trace.calls.op.copy() for trace in traces]
        self._bytes = [trace.calls.message_bytes.copy() for trace in traces]
        self._changed = set[int]()
        self._found: dict[str, list[tuple[Group, _Evidence]]] = defaultdict(list)

    def assign(self, table: _CallTable, scope: _Scope, chosen: _Chosen) -> None:
        """Puts the calls of a scope on their groups, numbered by step and slot."""
        steps, slots = table.row.shape[1:]
        seq = np.arange(steps)[:, np.newaxis] * slots + table.of_slot[scope.slots][np.newaxis, :]
        for group, members, evidence in chosen.groups:
            # A name of its own, as calls with arguments on a group of the same ranks have numbers
            # of their own.
            kind = scope.library or "without arguments"
            name = group.name
            if not name.endswith(f"({kind})"):
                name = kind if name in ("", kind) else f"{name} ({kind})"
            own = Group(name, group.ranks, group.description or scope.axis)
            for member in members:
                i = table.traces[member]
                self._changed.add(i)
                if own not in self._groups[i]:
                    self._groups[i].append(own)
                row = table.row[member][:, scope.slots]
                self._group_id[i][row] = self._groups[i].index(own)
                self._seq[i][row] = seq
                self._describe(i, row, table.of_slot[scope.slots], len(group.ranks))
            self._found[scope.library].append((own, evidence))

    def _describe(self, trace: int, row: Int64, of_slot: Int64, members: int) -> None:
        """Gives the kernels of each call the op of the one that moves its data, and a gather by
        copies its size: each copy brings one member's part."""
        for call in np.unique(of_slot).tolist():
            at = row[:, of_slot == call]
            if at.shape[1] < 2:
                continue
            op = self._op[trace][at[0, -1]]
            self._op[trace][at] = op
            copied = self._traces[trace].calls.input_bytes[at[:, 1:]]
            if op == OP_CODE["all_gather"] and copied.shape[1] == members - 1:
                size = copied.max(axis=1) * members
                size[(copied != copied[:, :1]).any(axis=1) | (size < 0)] = -1
                self._bytes[trace][at] = size[:, np.newaxis]

    def apply(self) -> tuple[RankTrace, ...]:
        """The traces with their calls on the groups."""
        applied = []
        for i, (trace, groups) in enumerate(zip(self._traces, self._groups, strict=True)):
            if i in self._changed:
                calls = replace(
                    trace.calls, group_id=self._group_id[i], seq=self._seq[i], op=self._op[i],
                    message_bytes=self._bytes[i],
                )  # fmt: skip
                trace = replace(trace, calls=calls, groups=tuple(groups))
            applied.append(trace)
        return tuple(applied)

    def list_notes(self) -> Iterator[Note]:
        """What was found, by library."""
        for library, found in self._found.items():
            kernels = f"kernels of {library}" if library else "kernels without arguments"
            sizes = units.format_number_list(sorted({len(group.ranks) for group, _ in found}))
            if all(not evidence.calls for _, evidence in found):
                text = f"{kernels} are on the only possible group, of {sizes} ranks"
                yield Note("groups_found", text)
                continue
            count = len({group for group, _ in found})
            proofs = sum(evidence.proofs for _, evidence in found)
            apart = units.format_microseconds(max(e.apart_ns for _, e in found))
            sure = "high" if all(e.is_proven for _, e in found) else "medium"
            text = (
                f"{kernels}: groups of {sizes} ranks ({count:,} of them) found from"
                f" {sum(evidence.calls for _, evidence in found):,} calls that end within {apart}"
                f" of each other, {proofs:,} of them only once one late rank had come"
                f" (confidence: {sure})"
            )
            yield Note("groups_found", text)

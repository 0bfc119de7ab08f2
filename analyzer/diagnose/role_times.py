"""The time of several roles of a job on one clock: RL step by RL step, what each rank did in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations, product

import numpy as np
from msgspec.structs import astuple, replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import Intervals, intersect
from stepsplit.analyzer.buckets import WAITS
from stepsplit.analyzer.diagnose.phase_times import build_phases, build_tails, list_generations
from stepsplit.analyzer.diagnose.rl_windows import (
    JobRole,
    map_to_unix_ns,
    sum_overlaps,
    sum_windows,
)
from stepsplit.analyzer.diagnose.role_path import find_path
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import find_archive
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.report.headline import divide_parts
from stepsplit.analyzer.report.report import INCOMPLETE, Report, WarningRow
from stepsplit.analyzer.report.rl_step import RlStep, RoleTime
from stepsplit.analyzer.report.roles import (
    HeldRow,
    RlStepRow,
    RoleJob,
    RoleRow,
    RoleStepRow,
    RoleWaitRow,
)
from stepsplit.analyzer.split.matching import match
from stepsplit.analyzer.split.rl_phases import NO_MARKS, find_phases, has_rl_phases
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.trace import OP_CODE, Category, Int64, Lack, Note, compute_start_offsets_ns

TRAINERS = ("trainer", "train", "training", "actor", "policy", "learner")
"""Names of the role whose steps are the RL steps, where several roles or none have an optimizer."""

MOST_UNRECORDED = 0.01
"""An RL step of which a rank lacks more is not in the means, unless all lack that."""


def group_programs(recordings: Mapping[str, Recording]) -> tuple[list[list[str]], list[str]]:
    """The roles that are of one process group, and of which roles that is not known.

    They have calls in common. Of jobs of one size, of which they have other ranks, two roles may
    still be two programs of which not all ranks were recorded.
    """
    ranks = {role: {trace.rank for trace in one.traces} for role, one in recordings.items()}
    size = {role: max(trace.world_size for trace in one.traces) for role, one in recordings.items()}
    programs = [[role] for role in recordings]
    doubts: dict[tuple[str, str], str] = {}
    for first, second in combinations(recordings, 2):
        one, other = (next(own for own in programs if role in own) for role in (first, second))
        is_apart = all(not ranks[a] & ranks[b] for a in one for b in other)
        if one is other or size[first] != size[second] or not is_apart:
            continue
        if doubt := _doubt_one_group(recordings[first], recordings[second]):
            doubts[first, second] = doubt
        else:
            one += other
            programs.remove(other)
    lacks = [
        f"whether {first} and {second} are of one process group: {doubt}"
        for (first, second), doubt in doubts.items()
        if not any(first in own and second in own for own in programs)
    ]
    return programs, lacks


_SAME_CLOCK_NS = 1_000_000
"""How far the traces of two processes of one host may be apart."""

_HOST_CLOCKS_NS = 60_000_000_000
"""How far the clocks of two hosts may be apart."""


def _doubt_one_group(first: Recording, second: Recording) -> str:
    """Why the roles may be of two process groups; "" if they have calls in common, which can have
    been at the same time."""
    traces = join_programs([first, second]).traces
    matched = match(traces)
    is_first = np.isin([trace.rank for trace in traces], [trace.rank for trace in first.traces])
    rows = np.flatnonzero(matched.shared >= 0)
    shared, side = matched.shared[rows], is_first[matched.trace[rows]]
    both = np.intersect1d(shared[side], shared[~side])
    if not len(both):
        own = (set(matched.group[is_first[matched.trace] == one].tolist()) for one in (True, False))
        if set.intersection(*own) - {-1}:
            return "their calls in the groups of both do not match"
        return "they have the same world size and other ranks, but no call in common"
    rows = rows[np.isin(shared, both)]
    # All members of a call have come before the first one leaves it, and a message is sent before
    # it is received; that bounds by how much the clocks of two hosts differ.
    offsets = compute_start_offsets_ns(traces)[matched.trace[rows]]
    op, together = matched.op[rows], matched.together[rows]
    sends, receives = op == OP_CODE["send"], op == OP_CODE["recv"]
    hosts = [trace.host or f"rank {trace.rank}" for trace in traces]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    host = np.array([numbers[one] for one in hosts])[matched.trace[rows]]
    side, label = is_first[matched.trace[rows]], np.searchsorted(both, matched.shared[rows])
    none = np.iinfo(np.int64).max // 4
    start = np.where(together | sends, matched.start_ns[rows] + offsets, -none)
    end = np.where(together | receives, matched.end_ns[rows] + offsets, none)
    is_named = {numbers[trace.host] for trace in traces if trace.host}
    for one, other in product(np.unique(host[side]).tolist(), np.unique(host[~side]).tolist()):
        at, to = side & (host == one), ~side & (host == other)
        begins, ends = [], []
        for chosen in (at, to):
            latest = np.full(len(both), -none)
            earliest = np.full(len(both), none)
            np.maximum.at(latest, label[chosen], start[chosen])
            np.minimum.at(earliest, label[chosen], end[chosen])
            begins.append(latest)
            ends.append(earliest)
        least, most = int((begins[0] - ends[1]).max()), int((ends[0] - begins[1]).min())
        allowed = _SAME_CLOCK_NS if one == other and one in is_named else _HOST_CLOCKS_NS
        if least > min(allowed, most + _SAME_CLOCK_NS) or most < -allowed:
            return "their calls look alike, but were not at the same time"
    return ""


def join_programs(recordings: Sequence[Recording]) -> Recording:
    """The recordings of the roles of one process group as one, in which their calls match."""
    specs = [one.spec for one in recordings if one.spec is not None]
    return Recording(
        recordings[0].name,
        max(specs, key=lambda spec: len(spec.ranks), default=None),
        tuple(sorted((t for one in recordings for t in one.traces), key=lambda t: t.rank)),
        (),
        tuple(sorted((r for one in recordings for r in one.records), key=lambda r: r.rank.rank)),
    )


def forget_other_roles(recording: Recording) -> Recording:
    """The recording of a role without the peers of messages to other roles, which would be taken
    for stages of a pipeline."""
    if recording.spec is None or not recording.spec.role:
        return recording
    own = np.array([trace.rank for trace in recording.traces])
    traces = []
    for trace in recording.traces:
        calls = trace.calls
        is_other = (calls.peer >= 0) & ~np.isin(calls.peer, own)
        if is_other.any():
            peer = np.where(is_other, -1, calls.peer).astype(calls.peer.dtype)
            trace = replace(trace, calls=replace(calls, peer=peer))
        traces.append(trace)
    return replace(recording, traces=tuple(traces))


def explain_other_roles(
    split: RunSplit, role: str, others: Mapping[str, Sequence[int]]
) -> RunSplit:
    """The split of one role, in which ranks of other roles are not said to be missing."""
    missing = set(range(split.size.ranks))
    missing -= {rank.trace.rank for rank in split.ranks}
    # Those that are left out have a note of their own.
    missing -= {note.rank for note in split.notes if note.rank is not None}
    absent = next((note for note in split.notes if note.lack is Lack.RANKS), None)
    if not role or absent is None:
        return split
    others = {name: ranks for name, ranks in others.items() if missing & {*ranks}}
    named = "; ".join(
        f"{name} {units.format_number_list(sorted(missing & {*ranks}))}"
        for name, ranks in others.items()
    )
    notes = [note for note in split.notes if note is not absent]
    if missing <= {rank for ranks in others.values() for rank in ranks}:
        text = (
            f"other roles of the job ({named}) are reported by themselves: waits for them are"
            " estimates here"
        )
        return replace(split, notes=(Note("other_roles", text), *notes))
    known = f"; in folders of other roles: {named}" if named else ""
    text = f"{absent.message}: they may be of other roles than {role}{known}"
    return replace(split, notes=(replace(absent, message=text), *notes))


def build_role_job(run: str, roles: Sequence[JobRole], known_lacks: Sequence[str] = ()) -> RoleJob:
    """Puts the roles on one clock, and sums for each the RL steps.

    An RL step ends when the last rank of the role that trains has ended its step. Programs without
    a common process group are compared by the clocks of their hosts. known_lacks are said first.
    """
    stepping, lacks = _choose_step_role(roles)
    lacks = [*known_lacks, *lacks, *_list_losses(roles)]
    edges, numbers = _find_edges(stepping)
    times: dict[tuple[str, int], list[RoleTime]] = {}
    waits: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(numbers))
    role_of = {(one.program, rank.trace.rank): one.name for one in roles for rank in one.ranks}
    for role in roles:
        for rank in role.ranks:
            times[role.name, rank.trace.rank] = sum_windows(role.split, rank, edges)
            for owner, ns in _sum_waits(role.split, rank, edges).items():
                owner_role = role_of.get((role.program, owner))
                if owner_role is not None and owner_role != role.name:
                    own = waits[role.name, owner_role]
                    own[:] = [a + b for a, b in zip(own, ns, strict=True)]
    n_ranks = Counter(name for name, _ in times)
    is_whole = [
        all(own[at].unrecorded_ns <= MOST_UNRECORDED * own[at].window_ns for own in times.values())
        for at in range(len(numbers))
    ]
    if not any(is_whole):
        lacks.append("no RL step is recorded whole on all ranks: what is not recorded is unknown")
    counted = [at for at, whole in enumerate(is_whole) if whole or not any(is_whole)]
    lacks += _describe_clocks(roles)
    programs: dict[int, list[JobRole]] = defaultdict(list)
    for role in roles:
        programs[role.program].append(role)
    lacks += [text for own in programs.values() if (text := _describe_missing_ranks(own))]
    is_marked = any(has_rl_phases(rank.trace) for role in roles for rank in role.ranks)
    marked = roles if is_marked else ()
    pairs = dict.fromkeys(times, np.repeat(edges, 2)[1:-1])
    spans = {role.name: find_phases([rank.trace for rank in role.ranks]) for role in roles}
    phases, phase_rows = build_phases(marked, times, pairs, numbers, counted, spans)
    path = find_path(roles, stepping, spans, edges, numbers, counted)
    lacks += path.lacks
    tails, tail_rows, unknown_tails = build_tails(marked, phases, edges, numbers, counted)
    lacks += unknown_tails
    step_ns = np.diff(edges).tolist()
    return RoleJob(
        run=run,
        t0_unix_ns=str(int(edges[0])),
        step_role=stepping.name,
        steps=tuple(
            RlStepRow(number, int(edges[at] - edges[0]), step_ns[at], at in counted)
            for at, number in enumerate(numbers)
        ),
        roles=tuple(
            RoleRow(
                role.name,
                tuple(rank.trace.rank for rank in role.ranks),
                max(rank.trace.world_size for rank in role.ranks),
                role.program,
                role.place,
                _average([times[role.name, rank.trace.rank][at]
                          for rank in role.ranks for at in counted]),
                tuple(
                    _average([times[role.name, rank.trace.rank][at] for at in counted])
                    for rank in role.ranks
                ),
                role.report.findings[0].message if role.report.findings else "",
                find_archive(role.place),
            )
            for role in roles
        ),
        rows=tuple(
            RoleStepRow(name, rank, number, own[at])
            for (name, rank), own in times.items()
            for at, number in enumerate(numbers)
        ),
        waits=tuple(
            sorted(
                (
                    RoleWaitRow(name, owner, wait_ns)
                    for (name, owner), per_step in waits.items()
                    if (wait_ns := sum(per_step[at] for at in counted)
                                   // (len(counted) * n_ranks[name]))
                ),
                key=lambda row: -row.wait_ns,
            )
        ),
        held=_find_held([*programs.values()], edges, counted),
        lacks=tuple(lacks),
        phases=phases,
        phase_rows=phase_rows,
        tails=tails,
        tail_rows=tail_rows,
        path=path.rows,
        path_links=path.links,
        spans=path.spans,
    )  # fmt: skip


def _list_losses(roles: Sequence[JobRole]) -> list[str]:
    """What the traces of each role lost, a sentence for each kind: it is shown as idle."""
    losses = []
    for role in roles:
        by_code: dict[str, list[WarningRow]] = defaultdict(list)
        for row in role.report.warnings:
            if row.code in INCOMPLETE:
                by_code[row.code].append(row)
        for first, *others in by_code.values():
            who = role.name if first.rank is None else f"{role.name}/{first.rank}"
            more = f" (and {len(others)} more of the role)" if others else ""
            text = f"what {who} did: {first.message}{more}; lost time may be shown as idle"
            losses.append(text)
    return losses


def find_rl_step(split: RunSplit, report: Report) -> RlStep | None:
    """The RL step of a job of one program by phase; None if no rank marks one that only RL has.

    It is the mean of the steps that are full on all ranks, each as long as on its rank.
    """
    role = JobRole("", 0, split, split.ranks, report, "")
    if not any(has_rl_phases(rank.trace) for rank in split.ranks):
        return None
    full = [{one.step: one for one in rank.steps if one.kind == "full"} for rank in split.ranks]
    numbers = sorted(set.intersection(*map(set, full)))
    if not numbers:
        return None
    edges: dict[tuple[str, int], Int64] = {}
    times: dict[tuple[str, int], list[RoleTime]] = {}
    for rank, steps in zip(split.ranks, full, strict=True):
        pairs = [
            (steps[one].start_ns, steps[one].start_ns + steps[one].split.step_ns) for one in numbers
        ]
        key = "", rank.trace.rank
        edges[key] = np.array(pairs, dtype=np.int64).ravel() + split.alignment.t0_unix_ns
        times[key] = sum_windows(split, rank, edges[key])[::2]
    counted = range(len(numbers))
    spans = {"": find_phases([rank.trace for rank in split.ranks])}
    phases, _ = build_phases([role], times, edges, numbers, counted, spans)
    # The longest part of the loop is on one clock, with all that ends in it.
    whole, whole_numbers = _find_edges(role)
    tails, _, lacks = build_tails([role], phases, whole, whole_numbers, range(len(whole_numbers)))
    step_ns = sum(row.time.window_ns for row in phases)
    return RlStep(len(numbers), step_ns, phases, tails, tuple(lacks))


def _choose_step_role(roles: Sequence[JobRole]) -> tuple[JobRole, list[str]]:
    """The role whose steps are the RL steps, and what is doubtful of that."""
    stepping = [role for role in roles if _find_edges(role)[1]]
    if not stepping:
        named = ", ".join(role.name for role in roles)
        raise DataError(roles[0].place, f"no whole step of {named}", "record one of the trainer")
    training = [
        role
        for role in roles
        if any(rank.trace.events.match_prefix("Optimizer.step#").any() for rank in role.ranks)
    ]
    whole = [role for role in training if role in stepping]
    if len(training) == 1 and whole:
        return training[0], []
    candidates = whole or stepping
    order = {name: at for at, name in enumerate(TRAINERS)}
    chosen = min(candidates, key=lambda role: (order.get(role.name.lower(), len(order)), role.name))
    some = "several roles have an optimizer" if training else "no role has an optimizer"
    if training and not whole:
        some = f"no whole step of {', '.join(role.name for role in training)}"
    return chosen, [f"{some}: RL steps are taken to be the steps of {chosen.name}"]


def _find_edges(role: JobRole) -> tuple[Int64, list[int]]:
    """The edges of the RL steps in Unix ns, and their numbers: consecutive steps of the role."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for rank in role.ranks:
        for step in rank.steps:
            if step.kind == "partial":
                continue
            start, end = step.start_ns, step.start_ns + step.split.step_ns
            begins[step.step] = min(begins.get(step.step, start), start)
            ends[step.step] = max(ends.get(step.step, end), end)
    numbers = sorted(ends)
    # A loop that was left, as for an evaluation, begins anew: only the longest part has one clock.
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    numbers = max(parts, key=len, default=[])
    edges = [begins[numbers[0]], *(ends[number] for number in numbers)] if numbers else []
    return np.array(edges, dtype=np.int64) + role.split.alignment.t0_unix_ns, numbers


def _sum_waits(split: RunSplit, rank: RankSplit, edges: Int64) -> Mapping[int, list[int]]:
    """The waits of the rank between each two edges, by the rank that came last."""
    exposed = rank.attribution.exposed
    is_wait = np.isin(exposed.bucket, WAITS) & (exposed.owner >= 0)
    start = map_to_unix_ns(split, rank, exposed.start_ns[is_wait])
    end = map_to_unix_ns(split, rank, exposed.end_ns[is_wait])
    owner = exposed.owner[is_wait]
    return {
        one: sum_overlaps(start[owner == one], end[owner == one], edges).tolist()
        for one in np.unique(owner).tolist()
    }


_LEAST_HELD = 0.005
"""Of the RL step: shorter times are those in which the last rank of a call arrives."""


def _describe_missing_ranks(roles: Sequence[JobRole]) -> str:
    """Which ranks of the program of these roles are not recorded; "" if all are."""
    ranks = [rank.trace for role in roles for rank in role.ranks]
    missing = sorted({*range(max(one.world_size for one in ranks))} - {one.rank for one in ranks})
    if not missing:
        return ""
    named = " and ".join(role.name for role in roles)
    numbers = units.format_number_list(missing)
    doubt = ": which rank holds up all others is unknown" if len(roles) > 1 else ""
    return f"of the ranks of {named}, these are not recorded: {numbers}{doubt}"


def _find_held(
    programs: Sequence[Sequence[JobRole]], edges: Int64, counted: Sequence[int]
) -> tuple[HeldRow, ...]:
    """The ranks for which all others of their process group wait, the longest first.

    A rank that is not recorded is not known to wait, so that then no one holds it up.
    """
    rows: list[HeldRow] = []
    for roles in programs:
        ranks = [(role, rank) for role in roles for rank in role.ranks]
        if len(roles) < 2 or _describe_missing_ranks(roles):
            continue
        # The number of ranks that do not wait, and the sum of their places, between all instants in
        # which a wait begins or ends: where there is one rank, the sum is its place.
        instants, changes, places = (
            [edges[:1]],
            [np.array([len(ranks)])],
            [np.array([sum(range(len(ranks)))])],
        )
        for place, (role, rank) in enumerate(ranks):
            band = rank.attribution.band
            is_wait = np.isin(band.bucket, WAITS)
            for own_ns, change in ((band.start_ns, -1), (band.end_ns, 1)):
                at = np.maximum(map_to_unix_ns(role.split, rank, own_ns[is_wait]), edges[0])
                instants.append(at)
                changes.append(np.full(len(at), change))
                places.append(np.full(len(at), change * place))
        instant = np.concatenate(instants)
        order = np.argsort(instant, kind="stable")
        instant = instant[order]
        free = np.cumsum(np.concatenate(changes)[order])[:-1]
        place_sum = np.cumsum(np.concatenate(places)[order])[:-1]
        start, end = instant[:-1], instant[1:]
        for place, (role, rank) in enumerate(ranks):
            alone = (free == 1) & (place_sum == place) & (end > start)
            held = sum_overlaps(start[alone], end[alone], edges)
            held_ns = int(held[list(counted)].sum()) // len(counted)
            if held_ns > _LEAST_HELD * int(np.diff(edges).mean()):
                mark = _find_mark(role.split, rank, start[alone], end[alone])
                generations = list_generations(role, rank.trace.rank, edges)
                tails = Intervals(
                    np.array([one.tail_start_ns for one in generations], dtype=np.int64),
                    np.array([one.end_ns for one in generations], dtype=np.int64),
                )
                both = intersect(Intervals(start[alone], end[alone]), tails)
                in_tail = sum_overlaps(both.start_ns, both.end_ns, edges)
                tail_ns = int(in_tail[list(counted)].sum()) // len(counted)
                rows.append(HeldRow(role.name, rank.trace.rank, held_ns, mark, tail_ns))
    return tuple(sorted(rows, key=lambda row: -row.held_ns))


def _find_mark(split: RunSplit, rank: RankSplit, start: Int64, end: Int64) -> str:
    """The range that covers most of these intervals, if it covers half of them."""
    events = rank.trace.events
    is_mark = events.is_category(Category.ANNOTATION) & ~events.match_names(NO_MARKS)
    covered: dict[str, int] = {}
    for name_id in np.unique(events.name_id[is_mark]).tolist():
        rows = np.flatnonzero(is_mark & (events.name_id == name_id))
        begins = map_to_unix_ns(split, rank, events.start_ns[rows])
        ends = map_to_unix_ns(split, rank, events.end_ns[rows])
        # Edges of ranges that may lie within each other: their union.
        ends = np.maximum.accumulate(ends)
        begins = np.maximum(begins, np.concatenate([begins[:1], ends[:-1]]))
        inner = np.stack((begins, ends), axis=1).ravel()
        covered[events.names[name_id]] = int(sum_overlaps(start, end, inner)[::2].sum())
    longest = max(covered, key=lambda name: covered[name], default="")
    return longest if longest and 2 * covered[longest] >= int((end - start).sum()) else ""


def _average(times: Sequence[RoleTime]) -> RoleTime:
    """The mean, whose parts add up to it."""
    _, *sums = (sum(column) for column in zip(*map(astuple, times), strict=True))
    parts = divide_parts(sums, len(times))
    return RoleTime(sum(parts), *parts)


def _describe_clocks(roles: Sequence[JobRole]) -> list[str]:
    """By what the programs are compared, if they have no call in common."""
    programs: dict[int, list[JobRole]] = defaultdict(list)
    for role in roles:
        programs[role.program].append(role)
    if len(programs) < 2:
        return []
    named = "; ".join(", ".join(role.name for role in own) for _, own in sorted(programs.items()))
    said = [
        f"what one of these programs waits for in another ({named}): no call joins them, and they"
        " are compared by the clock, not by their calls"
    ]
    hosts = {rank.trace.host for role in roles for rank in role.ranks}
    if len(hosts) > 1:
        said.append(
            f"by how much the clocks of the hosts differ ({', '.join(sorted(hosts))}): they are"
            " compared as they are set"
        )
    return said

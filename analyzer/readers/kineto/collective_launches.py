"""What the ops of collectives launched: kernels that no rule knows, copies, or nothing at all."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.ops import MESSAGES, parse_op
from stepsplit.analyzer.readers.kernel_rules import OTHER, Rules, has_kernel_rule
from stepsplit.analyzer.readers.kineto.captured_graphs import BEGIN_CAPTURE, END_CAPTURE
from stepsplit.analyzer.readers.kineto.schema import Args
from stepsplit.analyzer.trace import Category, Events, Int64, Lack, Note

_MOST_NAMES, _NAME_CHARACTERS = 3, 60
"""Of the kernels that a note lists."""

_CLEAR_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
"""Ops whose names no other kernels have; reduce, gather and scatter are those of torch's own."""

_WORDS = re.compile(r"[a-z]ccl(?!usion)|send_?recv|(?<![a-z])comm(?![a-z])|Comm(?![a-z])")

_LIBRARY_KERNEL = re.compile(r"(?:^|[^a-zA-Z0-9])[a-z]{1,4}ccl[A-Za-z]*[Kk]ernel_?[A-Z]")
"""Kernels of libraries in the style of NCCL: mcclKernel_AllReduce_RING_LL, cnclDevKernel_..."""

_QUIET_FAMILIES = (OTHER, "reduce", "memory")
"""Families of kernels that may be a collective although their name has no word of one."""

DEVICE_COPY = re.compile(r"DtoD|PtoP|Device ?-> ?Device|(?:Device|Peer)To(?:Device|Peer)", re.I)
"""Copies between buffers of devices."""

_COPIED_OPS = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", *MESSAGES)
"""Ops that copy engines can carry out, which cannot add."""

_STAGING = ("allgather", "all_gather", "alltoall", "all_to_all", "gather", "scatter")
"""Names of calls that take lists of tensors: besides their kernel they copy from or to a flat
buffer, so that a copy alone may mean that their kernel is missing."""


class Launched(Struct, frozen=True):
    """The device events that collectives launched though their names are not communication.

    rows (sorted) have the events, ops the op that launched each, -1 for none; notes list what was
    decided.
    """

    rows: Int64
    ops: Int64
    notes: tuple[Note, ...]


def find_launched(
    events: Events,
    rows: Int64,
    ops: Int64,
    args_of_op: Mapping[int, Args],
    carried: Collection[int],
    rules: Rules,
) -> Launched:
    """The kernels and copies among the rows that are communication by what launched them.

    A kernel that no rule knows is a collective's if the op that launched it has no other kernel of
    communication; of several kernels those whose names have words of communication. Copies between
    buffers of devices are, if the op has no such kernel either and nothing is to be added. A kernel
    without an op, as in the replay of a graph, is communication by the name of its library.

    ops are the ops around the launches of the rows, -1 for none; carried are the ops with a kernel
    that is known as communication.
    """
    has_rule = cache(partial(has_kernel_rule, rules))
    find_family = cache(rules.find_family)
    by_op: dict[int, list[int]] = defaultdict(list)
    within = np.flatnonzero(ops >= 0)
    for at, op in zip(within.tolist(), ops[within].tolist(), strict=True):
        if op not in carried and _is_collective(args_of_op.get(op)):
            by_op[op].append(at)
    with_kernels = {_describe(args_of_op[op]) for op in carried if op in args_of_op}
    kernels, copies = list[int](), list[int]()
    copying: dict[int, list[int]] = {}
    for op, places in by_op.items():
        stated = parse_op(args_of_op[op].collective or "")
        names = {at: events.name_of(int(rows[at])) for at in places}
        of_device = [at for at in places if events.category[rows[at]] == Category.KERNEL]
        unknown = [at for at in of_device if not has_rule(names[at])]
        named = [at for at in unknown if _names_communication(names[at], stated, rules)]
        own = named or [at for at in unknown if find_family(names[at]) in _QUIET_FAMILIES]
        kernels += own
        if own:
            with_kernels.add(_describe(args_of_op[op]))
        elif stated in _COPIED_OPS:
            copying[op] = [
                at for at in places if at not in of_device and DEVICE_COPY.search(names[at])
            ]
    for op, places in copying.items():
        described = _describe(args_of_op[op])
        if described not in with_kernels or described[0] not in _STAGING:
            copies += places
    of_library = tuple(
        _LIBRARY_KERNEL.search(name) is not None and not has_rule(name) for name in events.names
    )
    if any(of_library):
        alone = events.is_category(Category.KERNEL)[rows] & events.name_mask(of_library)[rows]
        kernels += np.flatnonzero(alone & (ops < 0)).tolist()
    notes = list[Note]()
    if kernels:
        count = Counter(events.name_of(int(rows[at])) for at in kernels)
        listed = ", ".join(
            f"{name[:_NAME_CHARACTERS]} ({number:,})"
            for name, number in count.most_common(_MOST_NAMES)
        )
        more = f" and {len(count) - _MOST_NAMES} more names" if len(count) > _MOST_NAMES else ""
        text = (
            f"{len(kernels):,} kernels that no rule knows count as communication, as collectives"
            f" launched them or by their name: {listed}{more}; a rule can say otherwise"
            " (docs/rules.md)"
        )
        notes.append(Note("comm_kernels_inferred", text))
    if copies:
        of_op = Counter(parse_op(args_of_op[int(ops[at])].collective or "") for at in copies)
        text = (
            f"{len(copies):,} copies on the device are launched by collectives without a kernel"
            f" ({_list_counts(of_op)}), as by the copy engine: they count as communication"
        )
        notes.append(Note("comm_copies", text))
    chosen = np.array(sorted([*kernels, *copies]), dtype=np.int64)
    return Launched(rows[chosen], ops[chosen], tuple(notes))


def find_surrounding_ops(events: Events, ops: Int64, rows: Int64) -> Int64:
    """For each row, the op on the same lane that contains it; -1 if there is none.

    ops are sorted and not nested; for a row of -1 the result is -1. The op contains the middle of
    the row too, because small errors let an op end after the next event has started.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    known = np.flatnonzero(rows >= 0)
    for lane in np.unique(events.lane[rows[known]]).tolist():
        ops_on_lane = ops[events.lane[ops] == lane]
        if not len(ops_on_lane):
            continue
        rows_on_lane = known[events.lane[rows[known]] == lane]
        starts = events.start_ns[rows[rows_on_lane]]
        ends = events.start_ns[ops_on_lane] + events.dur_ns[ops_on_lane]
        index = np.searchsorted(events.start_ns[ops_on_lane], starts, side="right") - 1
        middle = starts + events.dur_ns[rows[rows_on_lane]] // 2
        inside = (index >= 0) & (middle <= ends[index])
        found[rows_on_lane[inside]] = ops_on_lane[index[inside]]
    return found


def _is_collective(args: Args | None) -> bool:
    """Whether the op is a call that moves data between ranks."""
    return (
        args is not None
        and parse_op(args.collective or "") != "unknown"
        and args.group_size != 1
        and args.collective != "wait"
    )


def _describe(args: Args) -> tuple[str, str]:
    return args.collective or "", args.group_name


def _names_communication(name: str, stated: str, rules: Rules) -> bool:
    op = rules.find_op(name)
    return op in _CLEAR_OPS or (_WORDS.search(name) is not None and op in ("unknown", stated))


def _list_counts(count: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in count.items())


# Collectives whose kernels were not recorded.

_LEAST_SHARE = 0.02
"""Fewer collectives without a device event are not reported: the last ones of a recording may run
after it."""


class MadeCall(Struct, frozen=True):
    """A call that was found: its op and group, and the op rows that it carries out, if known."""

    op: str
    group_id: int
    carries: tuple[int, ...]


def note_missing(
    events: Events,
    ops: Sequence[tuple[int, Args, int]],
    calls: Sequence[MadeCall],
) -> tuple[Note, ...]:
    """A note with the number of collectives without any device event.

    ops are (row, arguments, group number) of the ops of collectives. Those of a group whose calls
    are launched elsewhere (coalesced into one kernel) are counted only if there is no such call.
    """
    carried = {row for call in calls for row in call.carries}
    # A captured call runs in the launches of its graph.
    runtime = events.is_category(Category.RUNTIME)
    begins, ends = (
        events.start_ns[runtime & events.match_names(edge)] for edge in (BEGIN_CAPTURE, END_CAPTURE)
    )
    elsewhere = Counter((call.group_id, call.op) for call in calls if not call.carries)
    total, missing = 0, Counter[str]()
    by_kind: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row, args, group in ops:
        op, at = parse_op(args.collective or ""), events.start_ns[row]
        is_captured = np.searchsorted(begins, at) > np.searchsorted(ends, at)
        if is_captured or op == "barrier" or not _is_collective(args):
            continue
        if 0 in (args.in_nelems, args.out_nelems):
            continue
        total += 1
        by_kind[group, op].append(row)
    coalesced = {group for group, _ in elsewhere if group >= 0}
    ungrouped = Counter({op: n for (group, op), n in elsewhere.items() if group < 0})
    for (group, op), rows in by_kind.items():
        count = len([row for row in rows if row not in carried])
        with_calls = len(rows) > count or elsewhere[group, op]
        if not (with_calls and group in coalesced):
            missing[op] += max(0, count - ungrouped[op] - ungrouped["unknown"])
    lost = sum(missing.values())
    if not lost or lost < _LEAST_SHARE * total:
        return ()
    text = (
        f"{lost:,} of {total:,} collectives and messages ({units.format_percent(lost / total)})"
        f" have no device event ({_list_counts(+missing)}): their kernels were not recorded, and"
        " their time counts as idle"
    )
    return (Note("collectives_not_recorded", text, lack=Lack.KERNELS),)

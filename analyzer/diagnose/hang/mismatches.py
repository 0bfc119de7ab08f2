"""What the members of a call disagree on: its operation, its size or its type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from stepsplit.analyzer.diagnose.hang.job_groups import JobGroup, describe_group
from stepsplit.analyzer.diagnose.hang.progress import Called, Progress
from stepsplit.analyzer.diagnose.hang.result import Mismatch, MismatchSide
from stepsplit.analyzer.diagnose.hang.stuck_messages import Ends, identify_link


def find_mismatches(ranks: Sequence[Progress]) -> tuple[Mismatch, ...]:
    """The first mismatched call of each group; later mismatches follow from it."""
    same: dict[tuple[JobGroup, int], list[Called]] = defaultdict(list)
    for call in (call for rank in ranks for call in rank.collectives):
        same[call.group, call.seq].append(call)
    first: dict[JobGroup, Mismatch] = {}
    for (group, _), calls in same.items():
        differs = _find_mismatch(calls) if len(calls) > 1 else None
        if differs is not None and (group not in first or differs.seq < first[group].seq):
            first[group] = differs
    found = []
    for group, mismatch in first.items():
        # Of its values, the one that earlier calls of the group had, if only one, is the usual.
        read = _PROPERTIES[mismatch.what]
        calls = [call for rank in ranks for call in rank.collectives if call.group is group]
        ops = {call.op for call in calls if call.seq == mismatch.seq}
        earlier = {read(call) for call in calls if call.seq < mismatch.seq and call.op in ops}
        known = [side.value for side in mismatch.sides if side.value in earlier]
        usual = known[0] if len(known) == 1 else None
        found.append(msgspec.structs.replace(mismatch, usual=usual))
    # Then the open messages of which both ends differ in dtype or size, where both number them
    # alike. Coalesced messages share a number; which of them belong together is not known.
    ends: dict[tuple[Ends, int], list[Called]] = defaultdict(list)
    for call in (call for rank in ranks for call in rank.open):
        if call.is_message and len(call.group.ranks) == 2:
            ends[identify_link(call), call.seq].append(call)
    for calls in ends.values():
        if sorted(call.op for call in calls) == ["recv", "send"]:
            differs = _find_mismatch(calls)
            if differs is not None:
                found.append(msgspec.structs.replace(differs, is_message=True))
    return tuple(found)


def _read_agreed_size(call: Called) -> str:
    size = call.message_bytes if call.is_message else call.agreed_bytes
    return str(size) if size >= 0 else ""


_PROPERTIES: Mapping[str, Callable[[Called], str]] = {
    "op": lambda call: "" if call.is_message else call.op,
    "dtype": lambda call: call.dtype,
    "size": _read_agreed_size,
}


def _find_mismatch(calls: Sequence[Called]) -> Mismatch | None:
    """The first difference between members: op, then dtype, then size (where it must agree)."""
    for what, read in _PROPERTIES.items():
        sides: dict[str, list[int]] = defaultdict(list)
        for call in calls:
            if value := read(call):
                sides[value].append(call.rank)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), min(side[1])))
            value_sides = tuple(MismatchSide(value, tuple(sorted(at))) for value, at in ordered)
            return Mismatch(describe_group(calls[0].group), calls[0].seq, what, value_sides)
    return None

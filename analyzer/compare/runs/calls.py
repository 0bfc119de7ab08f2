"""The collectives and messages of two runs, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer.compare.runs.comparison import Calls, CallsChange, most_changed
from stepsplit.analyzer.report.report import CollectiveRow, GroupRow, Report

UNKNOWN = "unknown"
_MESSAGES = ("send", "recv")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What makes calls of two runs the same."""

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None


def calls_changes(baseline: Report, candidate: Report) -> tuple[CallsChange, ...]:
    """A row for each kind of call that either run made."""
    one, other = _calls(baseline), _calls(candidate)
    rows = [
        CallsChange(kind.axis, kind.op, kind.dtype, kind.message_bytes,
                    one.get(kind), other.get(kind))
        for kind in dict.fromkeys((*one, *other))
    ]  # fmt: skip
    return tuple(sorted(rows, key=most_changed))


def _calls(report: Report) -> Mapping[_Kind, Calls]:
    """The calls by kind: groups of one axis together, by the medians of their medians."""
    groups = {group.id: group for group in report.groups}
    same: dict[_Kind, list[CollectiveRow]] = defaultdict(list)
    for row in report.collectives:
        axis = axis_in_words(groups.get(row.group))
        same[_Kind(axis, row.op, row.dtype, row.message_bytes)].append(row)
    return {kind: _together(rows, report, groups) for kind, rows in same.items()}


def axis_in_words(group: GroupRow | None) -> str:
    """The group's axis, else how it is described."""
    return (group and (group.axis or group.description)) or UNKNOWN


def _together(
    rows: Sequence[CollectiveRow], report: Report, groups: Mapping[int, GroupRow]
) -> Calls:
    rates = [row.busbw_bytes_per_s for row in rows if row.busbw_bytes_per_s is not None]
    steps = len(report.run.ranks) * len({row.step for row in report.steps})
    made = sum(row.count * _callers(row, report, groups.get(row.group)) for row in rows)
    return Calls(
        count=made / steps,
        transfer_ns=int(median(row.transfer_ns_median for row in rows)),
        wait_ns=int(median(row.wait_ns_median for row in rows)),
        busbw_bytes_per_s=median(rates) if rates else None,
    )


def _callers(row: CollectiveRow, report: Report, group: GroupRow | None) -> int:
    """How many of the recorded ranks made each of these calls: all members of a collective.

    A message counts at its own end; so does each call of an axis on which nothing was matched.
    """
    apart = {one.axis for one in report.coverage if one.holds == "estimated"}
    if group is None or row.op in _MESSAGES or group.axis in apart:
        return 1
    return len(set(group.ranks) & set(report.run.ranks)) or 1

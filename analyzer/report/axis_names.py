"""What communication is called, the same in every table, chart and sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from stepsplit.analyzer.report.report import Report
from stepsplit.collectors.formats.run_spec import is_described

UNKNOWN_AXIS = "other"


class AxisGroup(Protocol):
    """A process group with its axis."""

    @property
    def axis(self) -> str | None:
        """The axis of the mesh; None if it is not a single one."""

    @property
    def description(self) -> str:
        """The description of the group in the trace."""

    @property
    def name(self) -> str:
        """What its communication is called; "" in older reports and baselines."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks."""


def name_axis(axis: str | None) -> str:
    """The axis of a row in words; "other" if its group is unknown, or the report is older and the
    group spans several axes."""
    return axis or UNKNOWN_AXIS


def name_group(group: AxisGroup | None) -> str:
    """The name of a group's communication, which its rows have as axis; "other" if the calls state
    no group, or one without description in an unknown mesh. An older report has no names."""
    if group is None:
        return UNKNOWN_AXIS
    described = group.description if is_described(group.description) else None
    return name_axis(group.name or group.axis or described)


def name_groups(report: Report) -> Mapping[int, str]:
    """The name of each group by its id, of which calls without a group have another."""
    return defaultdict(
        lambda: UNKNOWN_AXIS, {group.id: name_group(group) for group in report.groups}
    )

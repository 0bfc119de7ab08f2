"""The kinds of calls of a report: what differs by its group alone is one."""

from __future__ import annotations

from msgspec import Struct

from stepsplit.analyzer.report.axis_names import name_groups
from stepsplit.analyzer.report.report import Report, count_calls_per_step
from stepsplit.analyzer.split.bandwidth import CollectiveRow


class SameCalls(Struct, frozen=True):
    """The calls of one op, dtype and size on the groups of an axis: one row for each group.

    per_step: the calls of each row per full step.
    """

    axis: str
    rows: tuple[CollectiveRow, ...]
    per_step: tuple[float, ...]

    @property
    def busbw_bytes_per_s(self) -> tuple[float, ...]:
        """The bus bandwidths of the rows that have one."""
        rates = (row.busbw_bytes_per_s for row in self.rows)
        return tuple(rate for rate in rates if rate is not None)

    def split_groups(self) -> tuple[SameCalls, ...]:
        """The calls of each group by themselves."""
        pairs = zip(self.rows, self.per_step, strict=True)
        return tuple(SameCalls(self.axis, (row,), (calls,)) for row, calls in pairs)


def merge_groups(report: Report) -> tuple[SameCalls, ...]:
    """Rows that differ by their group alone, in the order of report.collectives.

    Groups along several axes are one kind if these axes are the same.
    """
    names = name_groups(report)
    per_step = count_calls_per_step(report)
    same: dict[tuple[str, str, str | None, int | None], list[CollectiveRow]] = {}
    for row in report.collectives:
        kind = names[row.group], row.op, row.dtype, row.message_bytes
        same.setdefault(kind, []).append(row)
    return tuple(
        SameCalls(kind[0], tuple(rows), tuple(per_step[row] for row in rows))
        for kind, rows in same.items()
    )

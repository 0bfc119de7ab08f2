"""The critical path of the mean step, by bucket and axis."""

from __future__ import annotations

from collections import Counter, defaultdict

from msgspec import Struct

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.units import format_percent

MAX_NAMED_RANKS = 3


class PathShare(Struct, frozen=True):
    """A bucket (of one axis, for communication) on the critical path of the average step.

    share: fraction of the path, 0..1. ranks: the ranks with most of it, each with its fraction of
    this part; others: the number of further ranks.
    """

    bucket: str
    axis: str | None
    ns: float
    share: float
    ranks: tuple[tuple[int, float], ...]
    others: int

    @property
    def label(self) -> str:
        return self.bucket if self.axis is None else f"{self.bucket} on {self.axis}"

    @property
    def ranks_text(self) -> str:
        """The ranks with most of it, as text."""
        named = ", ".join(f"rank {rank} {format_percent(part)}" for rank, part in self.ranks)
        return f"{named}, {self.others:,} more" if self.others else named


def compute_path_shares(report: Report) -> tuple[PathShare, ...]:
    """The critical path by bucket (in the order of BUCKETS) and axis (largest first)."""
    sums: dict[tuple[str, str | None], Counter[int]] = defaultdict(Counter)
    for part in report.critical_path:
        sums[part.bucket, part.axis][part.rank] += part.ns
    steps = len({part.step for part in report.critical_path})
    total = sum(ranks.total() for ranks in sums.values())
    shares = []
    for (bucket, axis), ranks in sums.items():
        if own := ranks.total():
            most = tuple((rank, ns / own) for rank, ns in ranks.most_common(MAX_NAMED_RANKS))
            others = len(ranks) - len(most)
            shares.append(PathShare(bucket, axis, own / steps, own / total, most, others))
    # A report from elsewhere may name other buckets, which come last.
    order = {bucket: place for place, bucket in enumerate(BUCKETS)}
    return tuple(sorted(shares, key=lambda one: (order.get(one.bucket, len(order)), -one.ns)))

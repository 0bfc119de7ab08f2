"""What the end of the average step hangs on: its critical path as one bar."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import plotly.graph_objects as go

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.units import milliseconds, percent
from stepsplit.dashboard.figures.palette import LOOKS, PAPER, Look
from stepsplit.dashboard.figures.theme import blank, in_ms, marker, plain

HEIGHT = 172
RANKS = 3
_ROOM = 0.06
"""A part below this share has no room for a text."""
_PLAIN = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}


@dataclass(frozen=True, slots=True)
class PathShare:
    """A bucket, and axis where it has one, on the path of the average step.

    share is of the path, 0..1. ranks are those with most of it, each with its part of the bucket's
    time on the path; others is how many more there are.
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
    def whose(self) -> str:
        """The ranks that have most of it, in words."""
        named = ", ".join(f"rank {rank} {percent(part)}" for rank, part in self.ranks)
        return f"{named}, {self.others:,} more" if self.others else named


def path_shares(report: Report) -> tuple[PathShare, ...]:
    """The critical path by bucket and axis, in the order of BUCKETS, the largest axis first."""
    sums: dict[tuple[str, str | None], Counter[int]] = defaultdict(Counter)
    for part in report.critical_path:
        sums[part.bucket, part.axis][part.rank] += part.ns
    steps = len({part.step for part in report.critical_path})
    total = sum(ranks.total() for ranks in sums.values())
    found = [_share(*kind, ranks, steps, total) for kind, ranks in sums.items() if ranks.total()]
    return tuple(sorted(found, key=lambda one: (BUCKETS.index(one.bucket), -one.ns)))


def _share(bucket: str, axis: str | None, ranks: Counter[int], steps: int, total: int) -> PathShare:
    own = ranks.total()
    most = tuple((rank, ns / own) for rank, ns in ranks.most_common(RANKS))
    return PathShare(bucket, axis, own / steps, own / total, most, len(ranks) - len(most))


def critical_path(report: Report) -> go.Figure:
    """One horizontal bar in ms: the parts of the average step's path, by bucket and axis."""
    figure = blank(
        HEIGHT, "ms of the path, from the step's first start to its last end over all ranks", ""
    )
    shares = path_shares(report)
    for look in LOOKS:
        own = [one for one in shares if one.bucket == look.bucket]
        if own:
            figure.add_trace(_bar(look, own))
    figure.update_layout(barmode="stack", bargap=0.1, margin_l=12)
    figure.update_yaxes(visible=False)
    return figure


def _bar(look: Look, shares: list[PathShare]) -> go.Bar:
    """The bucket's parts, one after the other; a line between them parts the axes."""
    bar = go.Bar(
        name=look.bucket,
        orientation="h",
        y=[""] * len(shares),
        x=in_ms([one.ns for one in shares]),
        marker=marker(look),
        text=[_text(one) for one in shares],
        customdata=[_told(one) for one in shares],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=True,
        **_PLAIN,
    )
    bar.marker.line = {"color": PAPER, "width": 1}
    return bar


def _text(one: PathShare) -> str:
    if one.share < _ROOM:
        return ""
    return percent(one.share) if one.axis is None else f"{plain(one.axis)} {percent(one.share)}"


def _told(one: PathShare) -> str:
    head = f"<b>{plain(one.label)}</b> {milliseconds(one.ns)} ({percent(one.share)} of the path)"
    return f"{head}<br>{one.whose}"

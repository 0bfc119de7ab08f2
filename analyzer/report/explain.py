"""What the buckets of a step consist of, as text: the largest part of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.report.axis_names import name_axis, name_groups
from stepsplit.analyzer.report.headline import BucketMean, round_shares, summarize
from stepsplit.analyzer.report.report import IdleRow, Report
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.analyzer.split.idle import IdleCause

# The buckets that no finding is about.

LARGE_SHARE = 0.05
"""A bucket above this share of the step is worth a line, whether or not a fix is known."""


class LargeBucket(Struct, frozen=True):
    """A large bucket: its share of the full steps, in whole permille that add up over the buckets,
    and its largest part as text; "" if unknown."""

    bucket: str
    share: float
    part: str


def list_unexplained_buckets(report: Report) -> tuple[LargeBucket, ...]:
    """The buckets above 5 % of the step that no finding is about, largest first."""
    explained = {finding.bucket for finding in report.findings}
    means = _list_means(report)
    # The shares that the table of the buckets shows, which add up as rounded.
    shares = round_shares([row.mean_ns for row in means])
    large = [
        (row, LargeBucket(row.bucket, share, describe_largest_part(report, row.bucket)))
        for row, share in zip(means, shares, strict=True)
        if row.share > LARGE_SHARE and row.bucket not in explained
    ]
    return tuple(one for _, one in sorted(large, key=lambda pair: -pair[0].share))


def _list_means(report: Report) -> tuple[BucketMean, ...]:
    summary = summarize(report.steps, ())
    return () if summary is None else summary.buckets


def describe_largest_part(report: Report, bucket: str) -> str:
    """The largest part of a bucket with its share, such as "98 % of it on tp in forward"; "" if
    its parts are unknown."""
    match bucket:
        case "compute":
            families: Counter[str] = Counter()
            for row in report.kernels:
                families[row.family] += row.total_ns
            if not families.total():
                return ""
            (family, spent), *_ = families.most_common(1)
            return f"{units.format_percent(spent / families.total())} of kernel time is {family}"
        case "idle":
            return explain_idle(report.idle)
        case "bubble":
            stage = ""
            if report.pipeline is not None:
                most = max(report.pipeline.stages, key=lambda row: row.bubble_ns)
                stage = f"stage {most.stage} has most"
            return _join(stage, _describe_culprit(report, "caused_bubble_ns"))
        case "skew":
            axis = _describe_axis(report, bucket)
            return _join(axis, _describe_culprit(report, "caused_skew_ns"))
        case "collective" | "p2p":
            return _describe_axis(report, bucket)
    mean = next(row for row in _list_means(report) if row.bucket == bucket)
    return f"rank {mean.worst_rank} has most: {units.format_milliseconds(mean.worst_ns)}"


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _describe_axis(report: Report, bucket: str) -> str:
    """The axis and phase with most of an exposed bucket; of transfers also the axis's main op."""
    full = {(row.rank, row.step) for row in select_full_steps(report.steps)}
    spent: Counter[tuple[str | None, str]] = Counter()
    for row in report.exposed:
        if (row.rank, row.step) in full:
            spent[row.axis, row.phase] += getattr(row, f"{bucket}_ns")
    if not spent.total():
        return ""
    ((axis, phase), most), *_ = spent.most_common(1)
    where = axis or "no known axis"
    op = _find_main_op(report, axis) if bucket in ("collective", "p2p") else ""
    share = units.format_percent(most / spent.total())
    return f"{share} of it on {where} in {phase}{f', mostly {op}' if op else ''}"


def _find_main_op(report: Report, axis: str | None) -> str:
    """The op with more than half of the transfers on an axis; "" if there is none."""
    groups = {group for group, name in name_groups(report).items() if name == name_axis(axis)}
    took: Counter[str] = Counter()
    for row in report.collectives:
        if row.group in groups:
            took[row.op] += row.count * row.transfer_ns_median
    return next((op for op, ns in took.most_common(1) if 2 * ns > took.total()), "")


def _describe_culprit(report: Report, column: str) -> str:
    """The rank that caused most of the waits, or what else did."""
    caused: Counter[int | str] = Counter()
    for row in report.blame:
        caused[row.cause if row.rank is None else row.rank] += getattr(row, column)
    if not caused.total():
        return ""
    (culprit, most), *_ = caused.most_common(1)
    share = units.format_percent(most / caused.total())
    return f"{share} of it {_OF_NO_RANK.get(culprit, f'caused by rank {culprit}')}"


_OF_NO_RANK: Mapping[int | str, str] = {
    "schedule": "caused by the schedule",
    "variation": "is variation between steps",
    "unexplained": "is unexplained",
    "unknown": "has an unknown cause",
}
"""The causes of waits for which no rank is to blame."""


# The causes of idle time as text.

IDLE_MEANING = {
    "data_loading": "waiting for the data loader",
    "compilation": "compilation by torch.compile",
    "allocation": "memory allocation",
    "synchronize": "late launches after a synchronization",
    "launch_bound": "launch-bound host work",
    "python": "Python code between ops",
    "launch_latency": "kernel launch latency",
    "dependency": "waiting for another stream",
    "late_start": "late start of work launched in time",
    "other": "host work",
    "unknown": "idle time of unknown cause",
}

_MAX_CHARS = 60

_WORTH_NAMING, _NEARLY_ALL = 0.1, 0.95
"""Shares of an op in the idle time of its cause."""


def explain_idle(causes: Iterable[IdleCause | IdleRow]) -> str:
    """The largest cause of idle time with its share, and its largest op; "" without idle time."""
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    for one in causes:
        spent[one.cause][one.op or ""] += one.idle_ns
    total = sum(ops.total() for ops in spent.values())
    if not total:
        return ""
    cause = max(spent, key=lambda name: spent[name].total())
    idle_ns = spent[cause].total()
    text = f"{units.format_percent(idle_ns / total)} of it is {IDLE_MEANING.get(cause, cause)}"
    op, of_op = max(spent[cause].items(), key=lambda item: (bool(item[0]), item[1]))
    if of_op < _WORTH_NAMING * idle_ns or not op:
        return text
    if of_op > _NEARLY_ALL * idle_ns:
        return f"{text} in {_shorten(op)}"
    return f"{text}; largest op {_shorten(op)}, {units.format_percent(of_op / idle_ns)} of that"


def _shorten(op: str) -> str:
    op = op.removeprefix("autograd::engine::evaluate_function: ")
    return op if len(op) <= _MAX_CHARS else op[: _MAX_CHARS - 3] + "..."

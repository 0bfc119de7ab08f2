"""What held the run up, in words, with what each cause is worth."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from stepsplit.analyzer import units
from stepsplit.analyzer.report.medians import bucket_medians, full_steps, step_median_ns
from stepsplit.analyzer.report.report import BlameRow, Finding, IdleRow, Pipeline, StepRow
from stepsplit.analyzer.split.compute.slow_ranks import SlowKernel, slow_ranks

WORTH = 0.01
"""Causes below this share of the step are not worth a line."""
MOST = 5
_DID = {
    "compute": "computes while others wait{on}",
    "imbalance": "has more to compute than the others, who wait{on}",
    "host": "runs nothing while others wait{on}: its host is late",
    "copy": "copies memory while others wait{on}",
    "transfer": "is in slow transfers while others wait{on}",
    "missing": "is not in the recording, and others wait{on}",
    "unknown": "",
}

IDLE_MEANING = {
    "data_loading": "waiting for the next batch",
    "allocation": "allocating memory",
    "synchronize": "launching late after waiting for the device",
    "launch_bound": "launching too slowly",
    "python": "Python between ops",
    "launch_latency": "the device's own latency",
    "dependency": "waiting for another stream",
    "late_start": "work that was launched in time and started late",
    "other": "what the host does between computing",
    "unknown": "what the trace does not tell",
}
_MOST_LETTERS = 60


def findings_of(
    steps: Sequence[StepRow],
    blamed: Sequence[BlameRow],
    pipeline: Pipeline | None,
    idle: Sequence[IdleRow],
    slow: Sequence[SlowKernel],
) -> tuple[Finding, ...]:
    """The causes known so far, largest gain first. A gain is ns of the average rank's step."""
    count = len(steps)
    if not count:
        return ()
    step_ns = step_median_ns(steps)
    found = [_of_blame(rows, count, slow) for rows in _by_cause(blamed)]
    found += _of_schedule(blamed, pipeline, count)
    found += _of_idle(steps, idle)
    worth = [finding for finding in found if finding.gain_ns >= WORTH * step_ns]
    return tuple(sorted(worth, key=lambda finding: -finding.gain_ns)[:MOST])


def _by_cause(blamed: Sequence[BlameRow]) -> list[list[BlameRow]]:
    """The rows of each rank and cause, of whatever axis, the largest first."""
    same: dict[tuple[int, str], list[BlameRow]] = defaultdict(list)
    for row in blamed:
        if row.rank is not None:
            same[row.rank, row.cause].append(row)
    return list(same.values())


def _of_blame(rows: Sequence[BlameRow], count: int, slow: Sequence[SlowKernel]) -> Finding:
    first = rows[0]
    caused_ns = sum(row.caused_ns for row in rows)
    skew_ns = sum(row.caused_skew_ns for row in rows)
    why = _slowness(first.rank, slow) if first.cause == "compute" else ""
    return Finding(
        code=f"late_{first.cause}",
        bucket="skew" if 2 * skew_ns >= caused_ns else "bubble",
        gain_ns=caused_ns // count,
        measured_ns=caused_ns,
        predicted_ns=None,
        ranks=() if first.rank is None else (first.rank,),
        steps=tuple(sorted({step for row in rows for step in row.steps})),
        events=(),
        message=f"rank {first.rank} {_DID[first.cause].format(on=_on_axes(rows))}{why}",
    )


def _on_axes(rows: Sequence[BlameRow]) -> str:
    """On which axes, those that lost most first; little ones are left out."""
    most = rows[0].caused_ns
    axes = [row.axis for row in rows if row.axis and 10 * row.caused_ns >= most]
    if not axes:
        return ""
    *others, last = axes
    return f" on {', '.join(others)} and {last}" if others else f" on {last}"


def _slowness(rank: int | None, slow: Sequence[SlowKernel]) -> str:
    """Which of the rank's kernels are slower than its peers', the family that costs most."""
    worst = max(
        (one for one in slow_ranks(slow) if one.rank == rank),
        key=lambda one: one.lost_ns,
        default=None,
    )
    if worst is None:
        return ""
    return f": its {worst.family} kernels take {worst.ratio:.2f} times as long as its peers'"


def _of_schedule(
    blamed: Sequence[BlameRow], pipeline: Pipeline | None, count: int
) -> list[Finding]:
    """Twice the microbatches halve the schedule's own bubble."""
    ideal_ns = sum(row.caused_bubble_ns for row in blamed if row.cause == "schedule")
    if pipeline is None or not ideal_ns:
        return []
    ideal = units.percent(pipeline.ideal_bubble_fraction or 0.0)
    message = (
        f"the {pipeline.schedule} schedule itself idles {ideal} of the pipeline's time with "
        f"{pipeline.microbatches} microbatches; twice as many halve it"
    )
    gain = ideal_ns // count // 2
    steps = tuple(sorted({step for row in blamed if row.cause == "schedule" for step in row.steps}))
    return [Finding("few_microbatches", "bubble", gain, ideal_ns, None, (), steps, (), message)]


def _of_idle(steps: Sequence[StepRow], idle: Sequence[IdleRow]) -> list[Finding]:
    """The idle time as a whole, with the cause that has most of it."""
    bucket = next((m for m in bucket_medians(steps) if m.bucket == "idle"), None)
    if bucket is None:
        return []
    rows = full_steps(steps)
    mean_ns = sum(row.idle_ns for row in rows) // len(rows)
    message = f"nothing runs for {units.percent(bucket.share)} of the time: {_why_idle(idle)}"
    message += f"most on rank {bucket.worst_rank}"
    numbers = tuple(sorted({row.step for row in rows}))
    return [
        Finding("host_bound", "idle", mean_ns, mean_ns, None, (bucket.worst_rank,),
                numbers, (), message)
    ]  # fmt: skip


def _why_idle(idle: Sequence[IdleRow]) -> str:
    """The largest cause, the op that has most of it, and its part of all idle time."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for row in idle:
        sums[row.cause][row.op or ""] += row.idle_ns
    total = sum(ops.total() for ops in sums.values())
    if not total:
        return ""
    cause = max(sums, key=lambda name: sums[name].total())
    op = sums[cause].most_common(1)[0][0]
    named = f" ({_short(op)})" if op else ""
    return f"{IDLE_MEANING[cause]}{named} is {units.percent(sums[cause].total() / total)} of it, "


def _short(op: str) -> str:
    op = op.removeprefix("autograd::engine::evaluate_function: ")
    return op if len(op) <= _MOST_LETTERS else op[: _MOST_LETTERS - 3] + "..."

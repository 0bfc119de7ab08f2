"""What held the run up, in words, with what each cause is worth."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer import units
from stepsplit.analyzer.report.medians import bucket_medians, full_steps, step_median_ns
from stepsplit.analyzer.report.report import BlameRow, Finding, Pipeline, StepRow

WORTH = 0.01
"""Causes below this share of the step are not worth a line."""
MOST = 5
_DID = {
    "compute": "computes while others wait",
    "host": "runs nothing while others wait: its host is late",
    "copy": "copies memory while others wait",
    "transfer": "is in slow transfers while others wait",
    "missing": "is not in the recording",
    "unknown": "",
}


def findings_of(
    steps: Sequence[StepRow], blamed: Sequence[BlameRow], pipeline: Pipeline | None
) -> tuple[Finding, ...]:
    """The causes known so far, largest gain first. A gain is ns of the average rank's step."""
    count = len(steps)
    if not count:
        return ()
    step_ns = step_median_ns(steps)
    found = [_of_blame(row, count) for row in blamed if row.rank is not None]
    found += _of_schedule(blamed, pipeline, count)
    found += _of_idle(steps)
    worth = [finding for finding in found if finding.gain_ns >= WORTH * step_ns]
    return tuple(sorted(worth, key=lambda finding: -finding.gain_ns)[:MOST])


def _of_blame(row: BlameRow, count: int) -> Finding:
    gain = row.caused_ns // count
    axis = f" on {row.axis}" if row.axis else ""
    return Finding(
        code=f"late_{row.cause}",
        bucket="skew" if row.caused_skew_ns >= row.caused_bubble_ns else "bubble",
        gain_ns=gain,
        measured_ns=row.caused_ns,
        predicted_ns=None,
        ranks=() if row.rank is None else (row.rank,),
        steps=row.steps,
        events=(),
        message=f"rank {row.rank} {_DID[row.cause]}{axis}",
    )


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


def _of_idle(steps: Sequence[StepRow]) -> list[Finding]:
    idle = next((m for m in bucket_medians(steps) if m.bucket == "idle"), None)
    if idle is None:
        return []
    rows = full_steps(steps)
    mean_ns = sum(row.idle_ns for row in rows) // len(rows)
    message = (
        f"nothing runs for {units.percent(idle.share)} of the time: host-bound, data loading or "
        f"synchronization; most on rank {idle.worst_rank}"
    )
    numbers = tuple(sorted({row.step for row in rows}))
    return [
        Finding("host_bound", "idle", mean_ns, mean_ns, None, (idle.worst_rank,),
                numbers, (), message)
    ]  # fmt: skip

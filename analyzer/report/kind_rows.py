"""The kinds of the complete steps as rows of report.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.headline import compute_mean_split
from stepsplit.analyzer.report.step_rows import StepRow
from stepsplit.analyzer.split.step_kinds import KindCalls, StepKind


class StepKindRow(Struct, frozen=True):
    """Complete steps that do the same: equal calls, and equally many kernels.

    Attributes:
        kind: "headline" for those over which means and medians are taken, else "other 1", "other 2"
            in the order of their first step.
        count: their number.
        steps: the numbers of the steps.
        mean_ns: mean duration of one over ranks and steps.
        share: their share of the time of all complete steps, 0..1.
        compute_ns: mean of this bucket; the seven add up to mean_ns.
        collective_ns: mean of this bucket.
        p2p_ns: mean of this bucket.
        skew_ns: mean of this bucket.
        bubble_ns: mean of this bucket.
        copy_ns: mean of this bucket.
        idle_ns: mean of this bucket.
        calls: the calls of a step, summed over the recorded ranks.
        kernels: compute kernels of a step and rank (ops of a CPU run), the mean.
        period: every so many steps is one, or one that also does what sets another kind apart; None
            if they are not regular, or fewer than two.
        extra: what a step does beyond one of the headline, in words; "" for the headline, or if
            nothing is known.
    """

    kind: str
    count: int
    steps: tuple[int, ...]
    mean_ns: int
    share: float
    compute_ns: int
    collective_ns: int
    p2p_ns: int
    skew_ns: int
    bubble_ns: int
    copy_ns: int
    idle_ns: int
    calls: tuple[KindCalls, ...]
    kernels: float
    period: int | None
    extra: str


def build_kind_rows(
    kinds: Sequence[StepKind], steps: Iterable[StepRow], *, on_device: bool
) -> tuple[StepKindRow, ...]:
    """A row for each kind of steps; () if all are of one."""
    complete = [row for row in steps if row.kind != "partial"]
    ranks, total_ns = len({row.rank for row in complete}), sum(row.step_ns for row in complete)
    by_step: dict[int, list[StepRow]] = defaultdict(list)
    for row in complete:
        by_step[row.step].append(row)
    built = []
    for kind in kinds:
        own = [row for step in kind.steps for row in by_step[step]]
        mean = compute_mean_split(own)
        built.append(
            StepKindRow(
                kind.kind,
                len(kind.steps),
                kind.steps,
                mean.step_ns,
                sum(row.step_ns for row in own) / (total_ns or 1),
                mean.compute_ns,
                mean.collective_ns,
                mean.p2p_ns,
                mean.skew_ns,
                mean.bubble_ns,
                mean.copy_ns,
                mean.idle_ns,
                calls=kind.calls,
                kernels=kind.kernels,
                period=kind.period,
                extra=kind.describe_extra(kinds[0], ranks, on_device=on_device),
            )
        )
    return tuple(built)


_MAX_NUMBERS = 8
"""More numbers of steps are counted, not listed."""


def describe_other_steps(kinds: Sequence[StepKindRow]) -> str:
    """How many steps are not of the headline's kind, how long they take, and the bucket in which
    they differ most, in words; "" if all are of one kind."""
    if not kinds:
        return ""
    headline, *others = kinds
    count, every = sum(kind.count for kind in others), sum(kind.count for kind in kinds)
    mean_ns = sum(kind.count * kind.mean_ns for kind in others) / count
    apart_ns = {
        bucket: sum(kind.count * getattr(kind, f"{bucket}_ns") for kind in others) / count
        - getattr(headline, f"{bucket}_ns")
        for bucket in BUCKETS
    }
    most = max(apart_ns, key=lambda bucket: abs(apart_ns[bucket]))
    sign = "+" if apart_ns[most] >= 0 else "-"
    steps = sorted(step for kind in others for step in kind.steps)
    numbers = ", ".join(f"#{step}" for step in steps[:_MAX_NUMBERS])
    numbers += f" and {count - _MAX_NUMBERS} more" if count > _MAX_NUMBERS else ""
    all_ns = sum(kind.count * kind.mean_ns for kind in kinds) / every
    return (
        f"{count} of {every} complete steps do other work ({numbers}): "
        f"{units.format_milliseconds(mean_ns)} each, most apart in {most} "
        f"({sign}{units.format_milliseconds(abs(apart_ns[most]))}); they take "
        f"{units.format_percent(sum(kind.share for kind in others))} of the time, and all {every} "
        f"steps take {units.format_milliseconds(all_ns)} in the mean"
    )

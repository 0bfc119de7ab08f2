"""A sample of a watched training: analyzed and judged, then reduced to a few numbers per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepsplit.analyzer.analysis import analyze
from stepsplit.analyzer.errors import StepsplitError, write
from stepsplit.analyzer.report.io import REPORT_NAME, to_json
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import StepRow, list_full_steps
from stepsplit.analyzer.units import format_number_list
from stepsplit.analyzer.watch.records import RankFinding, RankSample, WatchSample
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.formats.watch_notes import SampleReport
from stepsplit.collectors.safe_io.atomic_file import PRIVATE

SPOILS = frozenset(
    {
        "clock_unaligned", "collectives_not_recorded", "device_stopped", "device_times_missing",
        "device_work_lost", "entries_damaged", "file_cut", "file_skipped", "file_torn", "no_clock",
        "no_device_data", "no_steps", "no_steps_on_rank", "step_torn", "trace_cut_off",
    }
)  # fmt: skip
"""Warnings of a report after which its split is not that of the sampled steps."""


def reduce_sample(
    folder: Path, reports: Sequence[SampleReport], sample_id: str, mesh: Mesh | None = None
) -> WatchSample:
    """Analyzes the traces of a sample, saves their report beside them and judges it.

    The split of each rank is that of one step, the one of median duration, so that its buckets add
    up to the step.

    Args:
        folder: The folder of the sample's traces.
        reports: What the sampled ranks say of it, at least one.
        sample_id: The id of the sample.
        mesh: The layout of the job, if it was stated.

    Returns:
        The sample; without ranks and with the reason if it does not count.
    """
    ranks: tuple[RankSample, ...] = ()
    rank_findings: tuple[RankFinding, ...] = ()
    # A rank without a trace spoils the sample: the waits of the others would be guesses.
    no_data = next((f"rank {one.rank}: {one.no_data}" for one in reports if one.no_data), "")
    finding = ""
    if not no_data:
        try:
            report = analyze(folder, mesh=mesh)
            write(folder / REPORT_NAME, to_json(report), PRIVATE)
        except StepsplitError as error:
            no_data = str(error)
        except MemoryError:
            no_data = "its analysis needs more memory than it may use"
        except Exception as error:  # noqa: BLE001 - the watch goes on
            no_data = f"its analysis failed: {error!r}"
        else:
            no_data = judge_report(report, [each.rank for each in reports])
            ranks = () if no_data else split_ranks(report)
            if report.findings and ranks:
                finding = report.findings[0].message
                rank_findings = tuple(
                    RankFinding(one.ranks[0], _MAKES_LONGER.get(one.code, one.bucket), one.message)
                    for one in report.findings
                    if len(one.ranks) == 1
                )
    first = reports[0]
    return WatchSample(
        id=sample_id,
        step=first.step,
        steps=first.steps,
        unix_ns=min(each.unix_ns for each in reports),
        pivot=first.pivot,
        ranks=ranks,
        no_data=no_data,
        finding=finding,
        rank_findings=rank_findings,
        cost_ns=max(each.cost_ns for each in reports),
    )


_MAKES_LONGER = {"uneven_ranks": "compute"}
"""The bucket of the rank itself where a finding's is that of the ranks that wait for it."""


def judge_report(report: Report, sampled: Iterable[int]) -> str:
    """Why the analyzed sample does not count; "" if it does.

    sampled: the ranks that say that they have a trace.
    """
    missing = sorted(set(sampled) - {row.rank for row in report.steps})
    if missing:
        return f"no steps in the trace of rank {format_number_list(missing)}"
    for warning in report.warnings:
        if warning.code in SPOILS:
            is_named = warning.rank is None or f"rank {warning.rank}" in warning.message
            return warning.message if is_named else f"rank {warning.rank}: {warning.message}"
    if not any(row.kind == "full" for row in report.steps):
        return "no recorded step is whole"
    return ""


def split_ranks(report: Report) -> tuple[RankSample, ...]:
    """Each rank's split of the report's median step, with what it makes others wait."""
    step = choose_median_step(report.steps)
    exposed_ns: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in report.exposed:
        if row.step == step:
            spent_ns = row.collective_ns + row.p2p_ns + row.skew_ns
            exposed_ns[row.rank][row.axis or ""] += spent_ns
    caused_ns: dict[int | None, int] = defaultdict(int)
    for blame in report.blame:
        caused_ns[blame.rank] += blame.caused_ns
    n_steps = len(list_full_steps(report.steps))
    return tuple(
        RankSample(
            rank=row.rank,
            split=row.split,
            exposed_ns=dict(exposed_ns[row.rank]),
            caused_wait_ns=caused_ns[row.rank] // n_steps,
            estimated=row.estimated,
        )
        for row in report.steps
        if row.step == step
    )


def choose_median_step(steps: Iterable[StepRow]) -> int:
    """The step of median duration among the full ones; the shorter of two.

    A step is as long as its longest rank.
    """
    longest_ns: dict[int, int] = defaultdict(int)
    for row in steps:
        if row.kind == "full":
            longest_ns[row.step] = max(longest_ns[row.step], row.step_ns)
    ordered = sorted(longest_ns, key=lambda step: (longest_ns[step], step))
    return ordered[(len(ordered) - 1) // 2]

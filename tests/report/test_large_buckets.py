"""The large buckets of a report that no finding is about, with their largest parts."""

from __future__ import annotations

from typing import Any

from support.report_builders import analysis

from stepsplit.analyzer.report.explain import LargeBucket, list_unexplained_buckets
from stepsplit.analyzer.report.report import BlameRow, Finding, GroupRow, IdleRow, Report
from stepsplit.analyzer.report.step_rows import ExposedRow, StepRow
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.analyzer.split.kernels import KernelFamily

REPORT = analysis().report


def build_step(rank: int, **buckets_ns: int) -> StepRow:
    """A full step of 1,000 ns whose other time is compute."""
    spent: dict[str, Any] = {f"{name}_ns": 0 for name in ("collective", "p2p", "skew", "bubble",
                             "copy", "idle")} | buckets_ns  # fmt: skip
    return StepRow(rank=rank, step=1, kind="full", start_ns=0, step_ns=1000,
                   compute_ns=1000 - sum(spent.values()), overlapped_ns=0, bubble_covered_ns=0,
                   fused_ns=0, estimated=False, **spent)  # fmt: skip


def build_report(steps: tuple[StepRow, ...], **tables: Any) -> Report:
    return Report(run=REPORT.run, steps=steps, **tables)


def test_each_large_bucket_names_its_largest_part() -> None:
    report = build_report(
        (build_step(0, collective_ns=200, skew_ns=100), build_step(1, collective_ns=200)),
        groups=(GroupRow(0, "tp", "tp", (0, 1)),),
        collectives=(
            CollectiveRow(0, "all_reduce", None, None, 3, 50, 0, None, None),
            CollectiveRow(0, "broadcast", None, None, 1, 60, 0, None, None),
        ),
        exposed=(
            ExposedRow(0, 1, "tp", "forward", 150, 0, 100, 0),
            ExposedRow(0, 1, "tp", "backward", 50, 0, 0, 0),
            ExposedRow(1, 1, "tp", "forward", 150, 0, 0, 0),
            ExposedRow(1, 1, "tp", "backward", 50, 0, 0, 0),
            ExposedRow(1, 9, None, "forward", 900, 0, 0, 0),
        ),
        blame=(BlameRow(1, "compute", 80, 0, 80, "tp", (1,)),
               BlameRow(None, "unknown", 20, 0, 20, "tp", (1,))),
        kernels=(KernelFamily(0, "gemm", 3, 600, 1.0), KernelFamily(1, "norm", 3, 200, 1.0)),
    )  # fmt: skip

    assert list_unexplained_buckets(report) == (
        LargeBucket("compute", 0.75, "75.0 % of kernel time is gemm"),
        LargeBucket("collective", 0.2, "75.0 % of it on tp in forward, mostly all_reduce"),
    )


def test_waits_name_what_no_rank_caused_and_no_op() -> None:
    """The all_gathers move most; which op waited in this phase is not in the report."""
    report = build_report(
        (build_step(0, skew_ns=100),),
        groups=(GroupRow(0, "dp_shard", "", (0, 1)),),
        collectives=(
            CollectiveRow(0, "all_gather", None, None, 3, 50, 1, None, None),
            CollectiveRow(0, "reduce_scatter", None, None, 1, 20, 90, None, None),
        ),
        exposed=(ExposedRow(0, 1, "dp_shard", "grad_sync", 0, 0, 100, 0),),
        blame=(BlameRow(None, "unknown", 60, 0, 60, "dp_shard", (1,)),
               BlameRow(None, "variation", 40, 0, 40, "dp_shard", (1,))),
    )  # fmt: skip

    assert list_unexplained_buckets(report)[-1] == LargeBucket(
        "skew", 0.1, "100.0 % of it on dp_shard in grad_sync; 60.0 % of it has an unknown cause"
    )


def test_a_bucket_of_a_finding_is_left_out() -> None:
    steps = (build_step(0, idle_ns=100, skew_ns=60),)
    found = Finding("host_bound", "idle", 50, None, None, (), (), (), "idle")
    report = build_report(steps, findings=(found,))

    assert [one.bucket for one in list_unexplained_buckets(report)] == ["compute", "skew"]


def test_the_waits_name_who_caused_them_and_idle_time_its_op() -> None:
    report = build_report(
        (build_step(0, idle_ns=100, skew_ns=60),),
        exposed=(ExposedRow(0, 1, None, "backward", 0, 0, 60, 0),),
        blame=(BlameRow(5, "compute", 45, 0, 45, "tp", (1,)),
               BlameRow(None, "unknown", 15, 0, 15, "tp", (1,))),
        idle=(IdleRow(0, "python", "aten::mm", 20, 1), IdleRow(0, "python", None, 60, 9),
              IdleRow(0, "allocation", "cudaMalloc", 20, 1)),
    )  # fmt: skip

    assert list_unexplained_buckets(report)[1:] == (
        LargeBucket(
            "idle", 0.1, "80.0 % of it is Python code between ops; largest op aten::mm, 25.0 % of"
            " that"),
        LargeBucket(
            "skew", 0.06, "100.0 % of it on no known axis in backward; 75.0 % of it"
            " caused by rank 5"),
    )  # fmt: skip

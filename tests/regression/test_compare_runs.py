"""Two small reports by hand, and what differs between them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st

from stepsplit.analyzer import (
    BUCKETS,
    AxisSize,
    BucketChange,
    CallsChange,
    CallStats,
    CollectiveRow,
    Coverage,
    ExposedChange,
    ExposedRow,
    FamilyChange,
    Finding,
    FindingChange,
    GroupRow,
    Host,
    KernelFamily,
    MemoryRow,
    Pipeline,
    Report,
    Run,
    Setting,
    Side,
    Split,
    StepRow,
    Strategy,
    UsageError,
)
from stepsplit.analyzer.regression.compare import compare_reports, compare_with_baseline

RUN = Run("base", 2, (0, 1), (Host("a", (0, 1)),), "nccl", "H100", (AxisSize("tp", 2),), "run.json",
          "2.13.0", "2.30", "0", None, (Strategy("tp", "tp", 2),))  # fmt: skip
TP = GroupRow(0, "tp", "mesh_tp", (0, 1))


def step(rank: int, number: int, kind: str = "full", **buckets_ns: int) -> StepRow:
    parts = {f"{bucket}_ns": buckets_ns.get(bucket, 0) for bucket in BUCKETS}
    memos = {"overlapped_ns": 0, "bubble_covered_ns": 0, "fused_ns": 0}
    total = sum(parts.values())
    return StepRow(rank, number, kind, 0, total, **parts, **memos, estimated=False)


def baseline() -> Report:
    """Two ranks, two full steps of 100 and 110 ns; rank 1 never waits."""
    return Report(
        run=RUN,
        groups=(TP,),
        steps=(
            step(0, 0, "partial", compute=900),
            step(0, 1, compute=70, collective=20, skew=10),
            step(0, 2, compute=80, collective=20, skew=10),
            step(1, 0, "partial", compute=900),
            step(1, 1, compute=80, collective=20),
            step(1, 2, compute=90, collective=20),
        ),
        exposed=(
            ExposedRow(0, 0, "tp", "forward", 500, 0, 0, 0),
            ExposedRow(0, 1, "tp", "forward", 15, 0, 10, 0),
            ExposedRow(0, 1, "tp", "backward", 5, 0, 0, 0),
            ExposedRow(0, 2, "tp", "forward", 20, 0, 10, 0),
            ExposedRow(1, 1, "tp", "forward", 20, 0, 0, 0),
            ExposedRow(1, 2, "tp", "forward", 20, 0, 0, 0),
        ),
        collectives=(CollectiveRow(0, "all_reduce", "bfloat16", 4096, 6, 10, 2, 8e9, 8e9),),
        kernels=(
            KernelFamily(0, "gemm", 20, 150, 1.0), KernelFamily(1, "gemm", 20, 170, 1.0),
        ),
        memory=(MemoryRow(0, 500, *[None] * 7), MemoryRow(1, 700, *[None] * 7)),
        mfu=0.4,
    )  # fmt: skip


def slower() -> Report:
    """The same, on a newer NCCL, where rank 1 is late by 40 ns and what it sends is smaller."""
    return msgspec.structs.replace(
        baseline(),
        run=msgspec.structs.replace(RUN, name="new", nccl="2.31"),
        steps=(
            step(0, 1, compute=70, collective=20, skew=50),
            step(0, 2, compute=80, collective=20, skew=51),
            step(1, 1, compute=120, collective=20),
            step(1, 2, compute=131, collective=20),
        ),
        exposed=(ExposedRow(0, 1, "tp", "forward", 40, 0, 101, 0),
                 ExposedRow(1, 1, "tp", "forward", 40, 0, 0, 0)),
        collectives=(
            CollectiveRow(0, "all_reduce", "bfloat16", 4096, 2, 10, 2, 8e9, 8e9),
            CollectiveRow(0, "all_reduce", "bfloat16", 2048, 2, 30, 40, 6e9, 6e9),
        ),
        kernels=(
            KernelFamily(0, "gemm", 20, 150, 0.9), KernelFamily(0, "reduce", 2, 0, 0.0),
            KernelFamily(1, "gemm", 20, 200, 0.8), KernelFamily(1, "reduce", 2, 51, 0.2),
        ),
        memory=(MemoryRow(0, 800, *[None] * 7),),
        mfu=None,
    )  # fmt: skip


def test_steps_of_other_sizes_are_compared_for_the_same_work() -> None:
    two, eight = (
        msgspec.structs.replace(report, pipeline=Pipeline((), count, "1f1b", 0.2, None, 0.2))
        for report, count in ((baseline(), 2), (slower(), 8))
    )

    assert compare_reports(two, eight).microbatch_ratio == (145 / 8) / (105 / 2)
    assert compare_reports(two, two).microbatch_ratio is None
    assert compare_reports(two, slower()).microbatch_ratio is None

    found = compare_reports(baseline(), slower())
    one, other = found.baseline, found.candidate
    half, double = replace(one, tokens_per_s=1000.0), replace(other, tokens_per_s=1500.0)
    assert replace(found, baseline=half, candidate=double).token_ratio == 1.5
    as_many = replace(other, tokens_per_s=1000 * 105 / 145)
    assert replace(found, baseline=half, candidate=as_many).token_ratio is None


def test_what_differs_between_two_runs() -> None:
    found = compare_reports(baseline(), slower())
    assert found.baseline == Side(
        "base", 2, 105, 100, 110, Split(compute_ns=80, collective_ns=20, skew_ns=5), None, 700, 0.4
    )
    assert found.candidate == Side(
        "new", 2, 145, 140, 151, Split(compute_ns=100, collective_ns=20, skew_ns=25), None, 800,
        None,
    )  # fmt: skip
    assert (found.difference_ns, found.ratio, found.within_noise) == (40, 145 / 105, False)
    assert found.settings == (Setting("NCCL", "2.30", "2.31"),)
    assert found.buckets == (
        BucketChange(80, 100, "compute"),
        BucketChange(5, 25, "skew"),
        BucketChange(20, 20, "collective"),
        *(BucketChange(0, 0, bucket) for bucket in ("p2p", "bubble", "copy", "idle")),
    )
    assert found.exposed == (
        ExposedChange(5, 25, "skew", "tp"), ExposedChange(20, 20, "collective", "tp")
    )  # fmt: skip
    assert found.collectives == (
        CallsChange("tp", "all_reduce", "bfloat16", 2048, None, CallStats(1.0, 30, 40, 6e9)),
        CallsChange(
            "tp",
            "all_reduce",
            "bfloat16",
            4096,
            CallStats(2.0, 10, 2, 8e9),
            CallStats(1.0, 10, 2, 8e9),
        ),
    )
    assert found.kernels == (
        FamilyChange(0, 12, "reduce", 0.0, 1.0),
        FamilyChange(80, 87, "gemm", 10.0, 10.0),
    )


def test_a_run_against_itself_differs_in_nothing() -> None:
    found = compare_reports(baseline(), baseline())
    assert found.same
    assert (found.difference_ns, found.ratio, found.within_noise) == (0, 1.0, True)
    other_name = replace(found, candidate=replace(found.candidate, name="again"))
    assert other_name.same
    assert not compare_reports(baseline(), slower()).same


def found(code: str, gain_ns: int, *ranks: int, message: str = "") -> Finding:
    return Finding(code, "idle", gain_ns, None, None, ranks, (1, 2), (), message)


def test_bottlenecks_are_compared_by_cause_and_ranks() -> None:
    """Rank 1 becomes slow, the loader of rank 0 is fixed, and host_bound hardly changes."""
    before = msgspec.structs.replace(
        baseline(), findings=(found("data_loading", 9, 0, message="loads"), found("host_bound", 5))
    )
    rows = tuple(
        msgspec.structs.replace(row, step_ns=row.step_ns + 60, idle_ns=60) for row in before.steps
    )
    slow = (found("slow_rank", 40, 1, message="slow"), found("slow_rank", 3, 0))
    after = msgspec.structs.replace(
        before, steps=rows, findings=(*slow, found("host_bound", 6, message="bound"))
    )
    comparison = compare_reports(before, after)
    assert comparison.findings == (
        FindingChange(0, 40, "slow_rank", (1,), "slow"),
        FindingChange(9, 0, "data_loading", (0,), "loads"),
        FindingChange(0, 3, "slow_rank", (0,), ""),
        FindingChange(5, 6, "host_bound", (), "bound"),
    )
    assert comparison.changed_findings == comparison.findings[:3], "at least 2 of the step's 105 ns"
    assert compare_reports(before, before).changed_findings == ()
    assert not compare_reports(before, msgspec.structs.replace(before, findings=())).same


def test_another_layout_is_compared_and_listed_in_the_settings() -> None:
    piped = msgspec.structs.replace(
        baseline(),
        run=msgspec.structs.replace(
            RUN, mesh=(AxisSize("pp", 2),), strategies=(Strategy("pp", "pp", 2, "1f1b"),)
        ),
        pipeline=Pipeline((), 4, "1f1b", 0.25, 0.2, 1 / 3),
    )
    found = compare_reports(baseline(), piped)
    assert found.settings == (
        Setting("mesh", "tp 2", "pp 2"),
        Setting("schedule", "none detected", "1f1b"),
        Setting("microbatches", "none detected", "4"),
        Setting("strategies", "tp 2", "pp 2 (1f1b)"),
    )
    assert (found.baseline.bubble_fraction, found.candidate.bubble_fraction) == (None, 0.25)


@pytest.mark.parametrize("known", ["baseline", "candidate"])
def test_meshes_inferred_from_changed_calls_are_compared_by_the_ranks_of_their_groups(
    known: str,
) -> None:
    """An all_reduce per layer was added, and the same group now looks like tensor parallelism."""
    source = "rank sets and operations"
    inferred = msgspec.structs.replace(RUN, mesh=(AxisSize("dp", 2),), mesh_source=source)
    report = baseline()
    other = msgspec.structs.replace(
        report,
        run=inferred,
        groups=(GroupRow(0, "dp", "default_pg", (0, 1)),),
        exposed=tuple(msgspec.structs.replace(row, axis="dp") for row in report.exposed),
    )
    sides = (report, other) if known == "baseline" else (other, report)

    found = compare_reports(*sides)

    assert [row.name for row in found.settings] == ["inferred mesh"]
    assert {(row.axis, row.difference_ns) for row in found.exposed} == {("tp", 0)}
    assert {row.axis for row in found.collectives} == {"tp"}
    assert all(row.baseline == row.candidate for row in found.collectives)


def on_mesh(source: str, sizes: dict[str, int], *calls: tuple[str, str, tuple[int, ...]]) -> Report:
    """A run of four ranks with a call of each axis: its name, op and the ranks of one group."""
    run = msgspec.structs.replace(
        RUN, world_size=4, ranks=(0, 1, 2, 3), mesh_source=source,
        mesh=tuple(AxisSize(axis, size) for axis, size in sizes.items()),
    )  # fmt: skip
    return Report(
        run=run,
        groups=tuple(GroupRow(i, axis, axis, ranks) for i, (axis, _, ranks) in enumerate(calls)),
        steps=tuple(step(rank, n, compute=80, collective=20) for rank in range(4) for n in (0, 1)),
        exposed=tuple(ExposedRow(0, 0, axis, "forward", 16, 0, 0, 0) for axis, _, _ in calls),
        collectives=tuple(
            CollectiveRow(i, op, "bfloat16", 64, 2, 10, 0, None, None)
            for i, (_, op, _) in enumerate(calls)
        ),
    )


@pytest.mark.parametrize("source", ["rank sets and operations", "run.json"])
def test_meshes_with_other_groups_keep_their_axes_and_are_compared_by_op(source: str) -> None:
    """Data parallel before, a pipeline with tensor parallelism after: no group is the same."""
    before = on_mesh(source, {"dp_replicate": 4}, ("dp_replicate", "all_reduce", (0, 1, 2, 3)))
    after = on_mesh("rank sets and operations", {"pp": 2, "tp": 2},
                    ("tp", "all_reduce", (0, 1)), ("pp", "send", (0, 2)))  # fmt: skip

    found = compare_reports(before, after)

    assert found.meshes_differ
    assert {(row.axis, row.op, row.candidate_axis) for row in found.collectives} == {
        ("dp_replicate", "all_reduce", "tp"), ("pp", "send", None)
    }  # fmt: skip
    assert [(row.bucket, row.axis, row.candidate_axis) for row in found.exposed] == [
        ("collective", "dp_replicate", "pp + tp")
    ]
    (among, _) = compare_with_baseline([before, after, before])
    assert {row.axis for row in among.exposed} == {"dp_replicate", "tp", "pp"}, "each its own"
    assert not compare_reports(before, before).meshes_differ


def test_a_pipeline_is_no_other_axis_though_it_has_the_same_ranks() -> None:
    before = on_mesh("run.json", {"dp_replicate": 4}, ("dp_replicate", "all_reduce", (0, 1, 2, 3)))
    after = on_mesh("messages", {"pp": 4}, ("pp", "send", (0, 1, 2, 3)))

    found = compare_reports(before, after)

    assert found.meshes_differ
    assert {row.axis for row in found.collectives} == {"dp_replicate", "pp"}


def test_a_setting_that_one_side_does_not_know_is_unknown() -> None:
    unknown = msgspec.structs.replace(RUN, mesh=None, torch=None)
    found = compare_reports(baseline(), msgspec.structs.replace(baseline(), run=unknown))
    assert found.settings == (Setting("mesh", "tp 2", None), Setting("torch", "2.13.0", None))


@pytest.mark.parametrize(
    ("one", "other", "within"),
    [
        ((100, 110, 120), (108, 112, 116), True),
        ((100, 110, 120), (111, 112, 116), False),
        ((100, 101, 900), (110, 111, 112), False),
        ((100, 110, 120), (110,), True),
        ((115,), (100, 110, 120), True),
        ((100, 110, 120), (130,), None),
        ((110,), (111,), None),
    ],
    ids=[
        "each reaches the other",
        "no candidate so quick",
        "an odd step excuses none",
        "one step as the others",
        "one step as the later ones",
        "one step may be odd",
        "one each",
    ],
)
def test_noise_is_what_the_steps_of_both_reach(
    one: tuple[int, ...], other: tuple[int, ...], within: bool | None
) -> None:
    first, second = (
        Report(run=RUN, steps=tuple(step(0, n, compute=ns) for n, ns in enumerate(times)))
        for times in (one, other)
    )
    assert compare_reports(first, second).within_noise is within


def test_unmatched_messages_and_calls_count_per_rank() -> None:
    alone = msgspec.structs.replace(
        baseline(),
        collectives=(
            CollectiveRow(0, "send", "bfloat16", 64, 6, 10, 0, None, None),
            CollectiveRow(0, "all_reduce", "bfloat16", 4096, 12, 10, 2, None, None),
        ),
        coverage=(Coverage("tp", 1, 0, 1, 18, 18),),
    )
    counts = {
        row.op: row.baseline and row.baseline.count
        for row in compare_reports(alone, alone).collectives
    }
    assert counts == {"send": 1.0, "all_reduce": 2.0}


def test_unmatched_calls_along_several_axes_count_per_rank_in_older_reports_too() -> None:
    """Such a report has no names of groups, and no axis in the coverage of these."""
    named = GroupRow(0, None, "WEIGHTS_GROUP", (0, 1), "dp_replicate x tp")
    for group in (named, msgspec.structs.replace(named, name="")):
        axis = group.name or None
        report = msgspec.structs.replace(
            baseline(), groups=(group,), coverage=(Coverage(axis, 1, 0, 1, 6, 6),)
        )
        (row,) = compare_reports(report, report).collectives
        assert row.baseline is not None
        assert row.baseline.count == 1.0


def test_kernels_that_a_side_does_not_tell_are_not_compared() -> None:
    silent = msgspec.structs.replace(baseline(), kernels=())
    assert compare_reports(baseline(), silent).kernels == ()


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match="base: no step to compare; record at least one"):
        compare_reports(Report(run=RUN), baseline())


TIMES = st.lists(
    st.lists(st.integers(0, 10**12), min_size=7, max_size=7), min_size=1, max_size=6
)  # fmt: skip


def run_of(times: list[list[int]], run: Run = RUN) -> Report:
    rows = (
        step(i % 2, i // 2, **dict(zip(BUCKETS, parts, strict=True)))
        for i, parts in enumerate(times)
    )
    return Report(run=run, steps=tuple(rows))


@pytest.mark.parametrize(("axis", "size"), [("sideways", 2), ("tp", 0)])
def test_a_mesh_that_no_job_has_is_refused(axis: str, size: int) -> None:
    odd = msgspec.structs.replace(RUN, mesh=(AxisSize(axis, size),))

    with pytest.raises(UsageError, match=r"^base: .*mesh axis"):
        compare_reports(run_of([[1] * 7], odd), run_of([[1] * 7], odd))


@given(TIMES, TIMES)
def test_differences_add_up_to_the_difference_of_the_mean_step(
    one: list[list[int]], other: list[list[int]]
) -> None:
    found = compare_reports(run_of(one), run_of(other))
    means_ns = [sum(map(sum, times)) // len(times) for times in (one, other)]
    assert sum(row.difference_ns for row in found.buckets) == means_ns[1] - means_ns[0]
    for row in found.buckets:
        column = BUCKETS.index(row.bucket)
        assert abs(row.baseline_ns - sum(parts[column] for parts in one) / len(one)) <= 1
    backwards = compare_reports(run_of(other), run_of(one))
    assert {row.bucket: -row.difference_ns for row in backwards.buckets} == {
        row.bucket: row.difference_ns for row in found.buckets
    }

"""Model comparison: a few events, a prediction by hand, and the complete waterfall.

By default rank and model compute 80 us and all_reduce twice 10 us on tp, from 60 to 80.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec import structs
from support.builders import GpuTrace
from support.gap_builders import (
    US,
    Expected,
    adds_up,
    found_in,
    gap,
    latency,
    model,
    price,
    ranks,
    report_of,
    rows,
    split,
)
from support.prediction_builders import GIB, job, prediction
from support.report_builders import analysis
from support.screens import print_lines
from support.splitting import RunSplit

from stepsplit.analyzer import (
    Communication,
    ComparedCalls,
    ComparedMemory,
    ComparedStage,
    Finding,
    Gap,
    GapRow,
    MemoryRow,
    ParallelConfig,
    Pipeline,
    Rates,
    Report,
    SlowKernel,
    Split,
    StageMemory,
    UsageError,
    predict,
)
from stepsplit.analyzer.gap.comm_gap import AxisLink
from stepsplit.analyzer.gap.gap import (
    CommCost,
    build_comm_cost,
    build_gap_findings,
    check_layout,
    compute_gap,
    describe_mismatch,
)
from stepsplit.analyzer.model.config_decode import TomlTable
from stepsplit.analyzer.report.headline import compute_mean_step_ns
from stepsplit.collectors import Mesh, RunSpec
from stepsplit.dashboard.reporters.gap import build_gap_section

TWICE = ((60, 70), (70, 80))
SUMS = ("all_reduce", "tp", 2, 20, 20)
USUAL = split(compute=80, collective=20)


def message(found: Gap, cause: str) -> str:
    return next(row.message for row in found.rows if row.cause == cause)


def test_a_run_as_predicted_has_no_gap(tmp_path: Path) -> None:
    found = gap(tmp_path, ranks(tmp_path, TWICE), model(USUAL, SUMS))
    assert rows(found) == []
    assert found.calls == (
        ComparedCalls(
            0, "tp", "all_reduce", 2, 2, 8000, 8000, 20 * US, 20 * US, 20 * US, 20 * US, True
        ),
    )  # fmt: skip


def test_more_calls_cost_their_predicted_time(tmp_path: Path) -> None:
    once = model(split(compute=80, collective=10), ("all_reduce", "tp", 1, 10, 10))
    found = gap(tmp_path, ranks(tmp_path, TWICE), once)
    assert rows(found) == [("calls", "collective", "tp", 10)]
    assert message(found, "calls") == (
        "all_reduce on tp: 2 calls (8.00 kB), predicted 1 call (4.00 kB)"
    )


def test_larger_calls_cost_the_predicted_time_of_their_size(tmp_path: Path) -> None:
    """18 us for 8,000 bytes."""
    found = ranks(tmp_path, ((60, 78),), ((0, 60), (78, 98)), nelems=2000)
    once = model(split(compute=80, collective=10), ("all_reduce", "tp", 1, 10, 10))
    assert rows(gap(tmp_path, found, once)) == [("calls", "collective", "tp", 8)]


def test_a_slow_link_is_slow_calls(tmp_path: Path) -> None:
    found = ranks(tmp_path, ((60, 80), (80, 100)), ((0, 60), (100, 120)))
    slow = gap(tmp_path, found, model(USUAL, SUMS))
    assert rows(slow) == [("link", "collective", "tp", 20)]
    assert message(slow, "link") == "all_reduce on tp takes 2.00x the predicted time"


def test_small_calls_are_slow_by_latency(tmp_path: Path) -> None:
    found = ranks(tmp_path, ((60, 80), (80, 100)), ((0, 60), (100, 120)))
    slow = gap(tmp_path, found, model(USUAL, SUMS), of=latency)
    assert rows(slow) == [("latency", "collective", "tp", 20)]
    assert message(slow, "latency") == (
        "all_reduce on tp takes 2.00x the predicted time (small calls, latency-bound)"
    )


def test_overlap_is_lost_where_the_same_calls_are_exposed(tmp_path: Path) -> None:
    hidden = model(split(compute=80), ("all_reduce", "tp", 2, 20, 0))
    found = gap(tmp_path, ranks(tmp_path, TWICE), hidden)
    assert rows(found) == [("overlap", "collective", "tp", 20)]
    assert message(found, "overlap") == (
        "less of the communication on tp is overlapped than predicted"
    )


def test_overlap_is_gained_where_compute_hides_more(tmp_path: Path) -> None:
    found = gap(tmp_path, ranks(tmp_path, TWICE, ((0, 80),)), model(USUAL, SUMS))
    assert rows(found) == [("overlap", "collective", "tp", -20)]


def test_no_overlap_is_lost_where_a_slow_link_leaves_the_same_time_hidden(tmp_path: Path) -> None:
    """Of 40 us 20 are overlapped, as predicted for 20."""
    found = ranks(tmp_path, ((40, 60), (60, 80)))
    hidden = model(split(compute=80), ("all_reduce", "tp", 2, 20, 0))
    assert rows(gap(tmp_path, found, hidden)) == [("link", "collective", "tp", 20)]


def test_more_calls_and_lost_overlap_are_two_parts(tmp_path: Path) -> None:
    hidden = model(split(compute=80), ("all_reduce", "tp", 1, 10, 0))
    assert rows(gap(tmp_path, ranks(tmp_path, TWICE), hidden)) == [
        ("calls", "collective", "tp", 10),
        ("overlap", "collective", "tp", 10),
    ]


def test_slow_calls_that_stay_hidden_are_no_part(tmp_path: Path) -> None:
    found = ranks(tmp_path, ((20, 40), (40, 60)), ((0, 80),))
    hidden = model(split(compute=80), ("all_reduce", "tp", 2, 20, 0))
    assert rows(gap(tmp_path, found, hidden)) == []


def test_what_the_model_does_not_have_is_extra_calls(tmp_path: Path) -> None:
    found = gap(tmp_path, ranks(tmp_path, TWICE), model(split(compute=80)))
    assert rows(found) == [("calls", "collective", "tp", 20)]
    assert message(found, "calls") == ("all_reduce on tp: 2 calls (8.00 kB), predicted 0 calls")


def test_what_is_not_sent_is_fewer_calls(tmp_path: Path) -> None:
    found = gap(tmp_path, ranks(tmp_path, (), ((0, 80),)), model(USUAL, SUMS))
    assert rows(found) == [("calls", "collective", "tp", -20)]
    assert message(found, "calls") == ("all_reduce on tp: 0 calls, predicted 2 calls (8.00 kB)")


@pytest.mark.parametrize(
    ("mesh", "word"),
    [
        ({"dp_replicate": 2}, "dp_replicate"),
        ({"dp_replicate": 2}, "dp_shard"),
        ({"dp_shard": 2, "cp": 2}, "dp_shard"),
        ({"dp_replicate": 2, "cp": 2}, "dp_cp"),
        ({"cp": 2}, "dp_cp"),
    ],
)
def test_ranks_that_sum_gradients_have_one_word(
    tmp_path: Path, mesh: dict[str, int], word: str
) -> None:
    axes = Mesh.of(mesh)
    found = ranks(tmp_path, TWICE, mesh=axes, count=axes.world_size)
    assert rows(gap(tmp_path, found, model(USUAL, ("all_reduce", word, 2, 20, 20)))) == []


def test_a_group_that_no_axis_holds_keeps_its_name(tmp_path: Path) -> None:
    found = ranks(tmp_path, TWICE, mesh=Mesh.of({"dp": 2, "tp": 2}), count=4)
    assert rows(gap(tmp_path, found, model(split(compute=80)))) == [
        ("calls", "collective", "dp_replicate x tp", 20)
    ]


def two_stages(folder: Path, arrived: float = 70) -> RunSplit:
    """Stage 0 computes to 60 and sends; stage 1 waits from 20 on, and computes what arrived."""
    for rank, (op, until) in enumerate((("send", 60), ("recv", 20))):
        trace = GpuTrace(rank, 2, groups=[("0", "pp", [0, 1])]).step(1, 0, arrived + 30)
        trace.kernel("gemm", 0, until).message(op, 1 - rank, until, arrived, launched=1)
        trace.kernel("gemm", arrived, arrived + 30).write(folder)
    return found_in(folder, Mesh.of({"pp": 2}))


def test_a_message_between_stages_is_counted_once(tmp_path: Path) -> None:
    """Stage 1 waits for 40 us in the bubble; the model has the same, and 10 us for the message."""
    between = model(split(compute=50, p2p=10, bubble=40), ("recv", "pp", 1, 10, 10), stages=2)
    last = replace(between, splits=(split(bubble=100), between.splits[1]))
    assert rows(gap(tmp_path, two_stages(tmp_path), last)) == []
    assert rows(gap(tmp_path, two_stages(tmp_path, 85), last)) == [("link", "p2p", "pp", 15)]


@pytest.mark.parametrize("axes", [{}, {"cp": 2}, {"dp_replicate": 1, "dp_shard": 2, "zero": 3}])
def test_predicted_messages_add_up_to_their_buckets(axes: dict[str, int]) -> None:
    """The predicted calls of a stage add up to the predicted buckets of the stage."""
    layout = {"tp": 2, "pp": 2, "dp_replicate": 2} | axes
    expected = predict(job(layout=ParallelConfig(**layout)))  # type: ignore[arg-type]
    whole = {
        (bucket, stage): getattr(each, f"{bucket}_ns")
        for stage, each in enumerate(expected.splits) for bucket in ("collective", "p2p")
    }  # fmt: skip
    for one in expected.communication:
        bucket = "p2p" if one.message.op in ("send", "recv") else "collective"
        whole[bucket, one.message.stage] -= one.exposed_ns
    assert all(abs(left) <= 2 for left in whole.values())


def test_each_bucket_has_an_explanation(tmp_path: Path) -> None:
    """Rank 1 comes 10 us late to tp, the host is 20 us late with the copy, and the last kernel."""
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=[("0", "tp", [0, 1])]).step(1, 0, 140)
        trace.kernel("gemm", 0, 60 + 10 * rank).all_reduce(60 + 10 * rank, 80, launched=1)
        trace.kernel("gemm", 80, 100).memcpy(100, 110).kernel("gemm", 130, 140).write(tmp_path)
    expected = model(
        split(compute=80, collective=10, skew=1, idle=5), ("all_reduce", "tp", 1, 10, 10)
    )
    found = gap(tmp_path, found_in(tmp_path, Mesh.of({"tp": 2})), expected)
    assert (found.shown.rank, found.shown.kind) == (0, "full")
    assert rows(found) == [
        ("kernels", "compute", None, 10),
        ("skew", "skew", None, 9),
        ("copy", "copy", None, 10),
        ("idle", "idle", None, 15),
    ]
    assert [row.message for row in found.rows] == [
        "compute takes more time than predicted (slower or more kernels)",
        "more waiting within the stage than predicted, mostly for rank 1 (compute)",
        "memory copies that the model does not include",
        "more idle time than predicted; 100.0 % of it is launch-bound host work",
    ]


def test_a_smaller_bucket_is_reported_as_less(tmp_path: Path) -> None:
    expected = model(split(compute=100, collective=20, skew=1, bubble=2, copy=3, idle=4), SUMS)
    found = gap(tmp_path, ranks(tmp_path, TWICE), expected)
    assert rows(found) == [
        ("kernels", "compute", None, -20),
        ("skew", "skew", None, -1),
        ("bubble", "bubble", "pp", -2),
        ("copy", "copy", None, -3),
        ("idle", "idle", None, -4),
    ]
    assert all("less" in row.message for row in found.rows)


def test_what_a_rank_loses_to_its_peers_is_no_matter_of_the_model(tmp_path: Path) -> None:
    found = ranks(tmp_path, TWICE)
    slow = tuple(SlowKernel(rank, "gemm", "gemm", 2.0, 15 * US, 40) for rank in (0, 1))
    expected = model(split(compute=60, collective=20), SUMS)
    assert rows(gap(tmp_path, found, expected, slow_kernels=slow)) == [
        ("slow_rank", "compute", None, 15),
        ("kernels", "compute", None, 5),
    ]


def uneven(*heavy: int) -> Finding:
    return Finding("uneven_stages", "bubble", 20 * US, 1, 1, heavy, (1,), (), "stage 0 has more")


def waiting(folder: Path, bubble: float, **known: object) -> Gap:
    """Stage 1, which waits for 40 us, compared with a predicted bubble."""
    here = split(compute=50, p2p=10, bubble=bubble)
    expected = model(here, ("recv", "pp", 1, 10, 10), stages=2)
    expected = replace(expected, splits=(split(bubble=100), here), bubble_fraction=0.25)
    return gap(folder, two_stages(folder), expected, **known)


@pytest.mark.parametrize(
    ("heavy", "bubble", "parts"),
    [
        (0, 10, [("uneven_stages", 20), ("bubble", 10)]),
        (0, 30, [("uneven_stages", 10)]),
        (0, 50, [("bubble", -10)]),
        (1, 10, [("bubble", 30)]),
    ],
)
def test_a_stage_waits_for_another_that_has_more_to_compute(
    tmp_path: Path, heavy: int, bubble: float, parts: list[tuple[str, float]]
) -> None:
    more = Finding(
        "uneven_stages", "bubble", 20 * US, None, None, (heavy,), (1,), (), "stage 0 has more"
    )
    found = waiting(tmp_path, bubble, findings=(more,))
    assert [(cause, us) for cause, _, _, us in rows(found)] == parts


def test_the_bubble_names_the_grid_its_ideal_and_the_models(tmp_path: Path) -> None:
    found = waiting(tmp_path, 20, pipeline=Pipeline((), 4, "1f1b", 0.3, 0.2, 0.43))
    assert message(found, "bubble") == (
        "more waiting for other stages than predicted; measured bubble 30.0 %,"
        " ideal 20.0 % (1F1B), predicted 25.0 %"
    )


def test_missing_ranks_are_a_caveat(tmp_path: Path) -> None:
    found = ranks(tmp_path, ((60, 80), (100, 110)), ((0, 60), (80, 100), (110, 120)), count=1,
                  mesh=Mesh.of({"tp": 2}))  # fmt: skip
    compared = gap(tmp_path, found, model(split(compute=80, collective=20), SUMS))
    adds_up(compared)
    assert compared.notes == (
        "waits of 1 of 1 steps are estimates (ranks or ends of calls missing)",
    )


def test_missing_stages_are_a_caveat(tmp_path: Path) -> None:
    found = ranks(tmp_path, (), count=1, mesh=Mesh.of({"pp": 4}))
    compared = gap(tmp_path, found, model(split(compute=80, bubble=20), stages=4))
    assert rows(compared) == [("bubble", "bubble", "pp", -20), ("idle", "idle", None, 20)]
    assert [one.stage for one in compared.stages] == [0]
    assert compared.notes == ("only 1 of 4 stages are in the recording",)


def test_a_step_that_is_not_whole_has_no_counts(tmp_path: Path) -> None:
    """What ran before reaches into the only step."""
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=[("0", "tp", [0, 1])])
        trace.kernel("gemm", 0, 20, launched=0).step(1, 10, 100)
        trace.kernel("gemm", 20, 60).all_reduce(60, 80, launched=11).kernel("gemm", 80, 100)
        trace.write(tmp_path)
    expected = model(split(compute=80, collective=10), ("all_reduce", "tp", 2, 10, 10))
    compared = gap(tmp_path, found_in(tmp_path, Mesh.of({"tp": 2})), expected)
    assert rows(compared) == [
        ("kernels", "compute", None, -20),
        ("exposed", "collective", "tp", 10),
    ]
    assert compared.calls == ()
    assert compared.notes == ("stage 0 has no full step: using step 1 of rank 0 (partial)",)


def test_a_recording_without_steps_cannot_be_compared_with_a_model(tmp_path: Path) -> None:
    found = ranks(tmp_path, TWICE)
    without = tuple(structs.replace(one, steps=()) for one in found.ranks)
    empty = structs.replace(found, ranks=without)
    with pytest.raises(UsageError, match="no step"):
        compute_gap(empty, model(USUAL, SUMS), price, report_of(tmp_path, found))


def test_memory_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    peaks = (GIB, 3 * GIB, None)
    held = [MemoryRow(i, peak, *[None] * 7) for i, peak in enumerate(peaks)]
    expected = replace(model(USUAL, SUMS), memory=(StageMemory(0, GIB, GIB, 0, 0, 0, 0),))
    found = gap(tmp_path, ranks(tmp_path, TWICE), expected, memory=tuple(held))
    assert found.memory == (ComparedMemory(0, 1, 3 * GIB, 2 * GIB),)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSplit, Report]:
    """Two calls exposed, one hidden; 120 us."""
    folder = tmp_path_factory.mktemp("recorded")
    compute = ((0, 60), (80, 100), (105, 120))
    found = ranks(folder, (*TWICE, (85, 95)), compute, nelems=1500)
    return found, report_of(folder, found)


US_EACH = st.integers(0, 200)
CALLS = st.tuples(
    st.sampled_from(("all_reduce", "all_gather", "send", "recv")),
    st.sampled_from(("tp", "pp", "dp_shard")),
    st.integers(1, 5),
    US_EACH,
).flatmap(lambda one: st.integers(0, one[3]).map(lambda held: (*one, held)))


@given(
    compute=US_EACH, skew=US_EACH, bubble=US_EACH, idle=US_EACH, odd_ns=st.integers(0, 3),
    calls=st.lists(CALLS, max_size=5), of=st.sampled_from((price, latency)),
)  # fmt: skip
def test_the_parts_add_up_to_the_nanosecond(
    recorded: tuple[RunSplit, Report], compute: int, skew: int, bubble: int, idle: int,
    odd_ns: int, calls: list[Expected], of: CommCost,
) -> None:  # fmt: skip
    """Whatever is predicted, and whatever its rounding leaves beyond its calls."""
    found, report = recorded
    p2p = sum(one[-1] for one in calls if one[0] in ("send", "recv"))
    collective = sum(one[-1] for one in calls) - p2p
    whole = split(compute=compute + 1, collective=collective, p2p=p2p, skew=skew, bubble=bubble,
                  idle=idle)  # fmt: skip
    whole = replace(whole, collective_ns=whole.collective_ns + odd_ns)
    compared = compute_gap(found, model(whole, *calls), of, report)
    adds_up(compared)
    assert all(one.gain_ns > 0 for one in build_gap_findings(compared, ()))


def slow(high: float, *causes: Finding, **gaps_us: int) -> list[tuple[str, int]]:
    """(code, gain in us) of the findings for a gap with these causes on tp, given the findings of
    the replay; the model predicts 100 us of collectives in 1000, with `high` as upper bound."""
    expected = split(compute=900, collective=100)
    stage = ComparedStage(0, 1, 7, "full", expected, expected)
    parts = (GapRow(cause, "collective", "tp", us * US, "") for cause, us in gaps_us.items())
    high_ns = round(expected.step_ns * high)
    gap = Gap((stage,), 0, tuple(parts), (), (), expected.step_ns, high_ns, "high", ())
    return [(one.code, one.gain_ns // US) for one in build_gap_findings(gap, causes)]


def test_findings_of_the_model_are_listed_largest_first() -> None:
    parts = {"link": 20, "latency": 30, "calls": 9, "overlap": 40, "skew": 90, "exposed": 90}
    assert slow(1.0, **parts) == [
        ("less_overlap", 40), ("slower_small_calls", 30), ("slower_calls", 20),
    ]  # fmt: skip


def test_a_part_within_the_model_uncertainty_is_a_finding_only_for_call_counts() -> None:
    assert slow(1.3, link=29, overlap=31, calls=12) == [("less_overlap", 31), ("extra_calls", 12)]


def test_a_finding_saves_at_most_its_measured_bucket() -> None:
    """Collectives take 100 us: another part of the difference is negative."""
    assert slow(1.0, link=250, overlap=-250) == [("slower_calls", 100)]


def test_a_run_that_is_faster_has_nothing_to_fix() -> None:
    assert slow(1.0, link=-200, calls=-200) == []


def test_a_problem_found_by_the_replay_is_not_reported_again() -> None:
    cause = Finding("no_overlap", "collective", 50 * US, None, None, (), (), (), "")
    assert slow(1.0, cause, overlap=40, link=20) == [("slower_calls", 20)]


def disagreed(found: RunSplit, stated: ParallelConfig, world_size: int = 2) -> tuple[str, ...]:
    spec = RunSpec("run", world_size, "nccl", found.layout.mesh)
    return check_layout(stated, spec, found, "my.toml")


def test_a_run_file_of_other_ranks_is_refused(tmp_path: Path) -> None:
    found = ranks(tmp_path, TWICE)
    assert disagreed(found, ParallelConfig(tp=2)) == ()
    with pytest.raises(UsageError) as error:
        disagreed(found, ParallelConfig(tp=2, dp_replicate=4))
    assert str(error.value) == (
        "my.toml describes 8 ranks (tp 2 dp 4) but the recording has 2; fix [parallel]"
    )


def test_a_run_file_of_other_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        disagreed(ranks(tmp_path, TWICE), ParallelConfig(pp=2))
    assert str(error.value) == (
        "my.toml has 2 stages but the recording has no pipeline; fix pp in [parallel], or record"
        " a run.json with the mesh"
    )


@pytest.mark.parametrize(
    ("bucket", "is_other"), [("idle", False), ("compute", True)], ids=["host-bound", "other work"]
)
def test_a_step_that_the_host_lengthens_is_not_of_another_job(bucket: str, is_other: bool) -> None:
    report = analysis().report
    steps = [
        structs.replace(
            row, step_ns=10 * row.step_ns,
            **{f"{bucket}_ns": getattr(row, f"{bucket}_ns") + 9 * row.step_ns},
        )
        for row in report.steps
    ]  # fmt: skip
    long = structs.replace(report, steps=tuple(steps), mfu=None)
    usual = compute_mean_step_ns(report.steps)
    expected = replace(prediction(), splits=(Split(compute_ns=usual),))

    found = describe_mismatch(long, expected, TomlTable("job.toml", "", {"parallel": {}}))

    assert (found is not None) is is_other
    wide = replace(expected, high_ns=20 * usual)
    assert describe_mismatch(long, wide, TomlTable("job.toml", "", {"parallel": {}})) is None, (
        "a step within the band of the prediction is what the job may take"
    )


def test_a_run_file_of_another_mesh_is_a_caveat(tmp_path: Path) -> None:
    assert disagreed(ranks(tmp_path, TWICE), ParallelConfig(dp_replicate=2)) == (
        "layout mismatch: my.toml has tp 1 dp 2, the recording has tp 2 dp 1 (from run.json)",
    )


def test_a_single_trace_may_belong_to_more_ranks_than_it_names(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100).kernel("gemm", 0, 60)
    trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 60, 70).write(tmp_path)
    unknown = found_in(tmp_path, None)
    assert check_layout(ParallelConfig(tp=8), None, unknown, "my.toml") == ()


@pytest.mark.parametrize(
    "layout", [ParallelConfig(tp=2, pp=2, dp_replicate=2), ParallelConfig(cp=2, dp_replicate=2)]
)
def test_a_call_of_a_predicted_size_costs_what_is_predicted(layout: ParallelConfig) -> None:
    """One of twice the bytes costs more, and none less than its latency."""
    of = build_comm_cost(job(layout=layout), Rates())
    for one in predict(job(layout=layout)).communication:
        if one.time.ns:
            size, each_ns = one.message.message_bytes, one.time.ns / one.message.count
            assert of(one, size) == each_ns
            assert 0 < of(one, 1) <= each_ns <= of(one, 2 * size)


def screen(found: Gap) -> list[str]:
    return print_lines(*build_gap_section(found), width=80)


def test_the_screen_shows_both_sides_and_the_parts(tmp_path: Path) -> None:
    """Times in ms; compute takes 0.1 ms longer than predicted."""
    found = ranks(tmp_path, ((60e3, 80e3), (80e3, 100e3)), ((0, 60e3), (100e3, 120.1e3)))
    took = ("all_reduce", "tp", 2, 20_000, 20_000)
    expected = replace(model(split(compute=80e3, collective=20e3), took), notes=("a guess",))

    def ms(like: Communication, message_bytes: int) -> float:
        return 1000 * price(like, message_bytes)

    assert screen(gap(tmp_path, found, expected, of=ms)) == [
        "MODEL COMPARISON   median step, step 1 of rank 0: measured 120 ms, predicted 100",
        "ms (100-100 ms), difference +20.1 %   confidence high",
        "difference by cause",
        "+20.0 ms  all_reduce on tp takes 2.00x the predicted time",
        "+0.10 ms  smaller differences together",
        "calls: counts and bytes as predicted",
        "caveat: a guess",
    ]


def test_the_screen_names_calls_that_differ_and_memory(tmp_path: Path) -> None:
    once = model(USUAL, ("all_reduce", "tp", 1, 20, 20))
    once = replace(once, memory=(StageMemory(0, GIB, GIB, 0, 0, 0, 0),))
    held = (MemoryRow(0, 3 * GIB, *[None] * 7),)
    lines = screen(gap(tmp_path, ranks(tmp_path, TWICE), once, memory=held))
    assert lines[-3:] == [
        "calls that differ: stage 0 all_reduce on tp 2, predicted 1 (8.00 kB, predicted",
        "4.00 kB)",
        "peak memory: stage 0 3.0 GiB (model 2.0 GiB)",
    ]


def test_bandwidths_are_compared_with_the_link_peak(tmp_path: Path) -> None:
    """Two calls of 4,000 bytes over two ranks in 20 us: all_reduce sends each byte once."""
    found = compute_gap(
        ranks(tmp_path, TWICE), model(USUAL, SUMS), price,
        report_of(tmp_path, ranks(tmp_path, TWICE)), links=lambda axis: AxisLink(2, 1e9),
    )  # fmt: skip
    (row,) = found.calls
    assert (row.bytes, row.time_ns) == (8_000, 20_000)
    assert row.busbw_bytes_per_s == 8_000 / 20e-6
    assert row.link_bytes_per_s == 1e9


def test_weights_of_adapters_are_compared_with_what_optimizers_know(tmp_path: Path) -> None:
    """An optimizer knows the weights that it updates; the frozen ones are in the peak."""
    held = (MemoryRow(0, 3 * GIB, None, GIB // 8, None, None, None, None, None),)
    stage = StageMemory(0, 2 * GIB + GIB // 8, 0, 0, 0, 0, 0, frozen_bytes=2 * GIB)
    expected = replace(model(USUAL, SUMS), memory=(stage,))
    assert gap(tmp_path, ranks(tmp_path, TWICE), expected, memory=held).memory == (
        ComparedMemory(0, 0, 3 * GIB, 2 * GIB + GIB // 8),
        ComparedMemory(0, 0, GIB // 8, GIB // 8, "weights"),
    )


def test_memory_is_compared_by_category(tmp_path: Path) -> None:
    held = (MemoryRow(0, None, None, GIB, 2 * GIB, None, None, None, None),)
    expected = replace(model(USUAL, SUMS), memory=(StageMemory(0, GIB, GIB, 0, 0, 0, 0),))
    found = gap(tmp_path, ranks(tmp_path, TWICE), expected, memory=held)
    assert found.memory == (
        ComparedMemory(0, 0, GIB, GIB, "weights"),
        ComparedMemory(0, 0, 2 * GIB, GIB, "gradients"),
    )
    assert screen(found)[-2:] == [
        "weights: stage 0 1.07 GB (model 1.07 GB)",
        "gradients: stage 0 2.15 GB (model 1.07 GB)",
    ]

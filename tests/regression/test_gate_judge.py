"""Some runs a side and a budget: pass, regressed or inconclusive, and why."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats
from support.gate_builders import BLAME, CALLS, GROUPS, MS, SETUP, TIMES, check, run, runs

from stepsplit.analyzer import CheckedMetric, DataError, UsageError
from stepsplit.analyzer.regression.checks import parse_budgets
from stepsplit.analyzer.regression.judge import check_candidate
from stepsplit.analyzer.regression.metrics import (
    BucketTime,
    CallMetrics,
    CausedWait,
    Doubt,
    GroupRanks,
    RunMetrics,
)

QUIET = (0.100, 0.101, 0.099, 0.1005, 0.0995)
MORE = (0.120, 0.121, 0.119, 0.1205, 0.1195)
SAME = (0.1002, 0.1012, 0.0992, 0.1007, 0.0997)
NOISY = (0.100, 0.150, 0.070, 0.130, 0.060)
BASE = runs("base", "exposed_comm", QUIET)


def judged(candidate: list, baseline: list, *rules: str) -> CheckedMetric:
    verdict = check(candidate, baseline, *rules)
    return verdict.gated[0]


@pytest.mark.parametrize(
    ("values", "rule", "answer"),
    [
        (MORE, "exposed_comm:5%", "regressed"),
        (MORE, "exposed_comm:30%", "pass"),
        (MORE, "exposed_comm:1pt", "regressed"),
        (MORE, "exposed_comm:3pt", "pass"),
        (MORE, "exposed_comm:5%,3pt", "pass"),
        (MORE, "exposed_comm:5%,1pt", "regressed"),
        (SAME, "exposed_comm:5%", "pass"),
        (SAME, "exposed_comm:0.01%", "inconclusive"),
        (NOISY, "exposed_comm:5%", "inconclusive"),
        (MORE, "exposed_comm:<=15%", "pass"),
        (MORE, "exposed_comm:<=11%", "regressed"),
        (NOISY, "exposed_comm:<=10%", "inconclusive"),
    ],
)
def test_a_measured_metric(values: tuple[float, ...], rule: str, answer: str) -> None:
    assert judged(runs("own", "exposed_comm", values), BASE, rule).answer == answer


def test_the_whole_row_of_a_regression() -> None:
    found = judged(runs("own", "exposed_comm", MORE), BASE, "exposed_comm:5%")
    assert (found.metric, found.budget, found.answer) == ("exposed_comm", "5%", "regressed")
    assert found.baseline == pytest.approx(0.100) and found.candidate == pytest.approx(0.120)
    assert found.harm == pytest.approx(0.020) and found.allowed == pytest.approx(0.005)
    # Five of variance 0.625e-6 a side: an error of half a thousandth; t of freedom 8 is 2.449.
    assert found.low == pytest.approx(0.020 - 2.449 * 0.0005, abs=1e-6)
    assert found.high == pytest.approx(0.020 + 2.449 * 0.0005, abs=1e-6)
    assert found.p == pytest.approx(float(stats.t.sf(0.020 / 0.0005, 8)), rel=1e-6)
    assert found.detectable == pytest.approx(0.005 + 0.889 * 0.0005, abs=1e-6)


def test_where_less_is_worse() -> None:
    base, worse = runs("base", "mfu", (0.40, 0.41, 0.405)), runs("own", "mfu", (0.3, 0.31, 0.305))
    found = judged(worse, base, "mfu:5%")
    assert found.answer == "regressed" and found.harm == pytest.approx(0.10)
    assert judged(base, worse, "mfu:5%").note == "better"
    assert judged(base, [], "mfu:>=35%").answer == "pass"


def test_the_model_sets_the_limit() -> None:
    slow = runs("own", "step", (1.30e8, 1.31e8, 1.29e8), predicted={"step": 1.0e8})
    assert judged(slow, [], "step:model+20%").answer == "regressed"
    assert judged(slow, [], "step:model+50%").answer == "pass"
    with pytest.raises(UsageError, match="no prediction of step; analyze the run with --job"):
        judged(runs("own", "step", (1.0e8,)), [], "step:model+20%")


def test_alarms_are_rare_over_all_metrics_together() -> None:
    """One metric at p = 2/252 is a regression alone, but not together with two similar ones."""
    names = ("exposed_comm", "skew", "bubble", "idle", "step")
    base = [run(f"base{i}", dict.fromkeys(names, v)) for i, v in enumerate((1, 2, 3, 4, 6))]
    own = [run(f"own{i}", dict.fromkeys(names, v)) for i, v in enumerate((5, 7, 8, 9, 10))]
    rules = [f"{name}:5%" for name in names]
    alone = check(own, base, rules[0])
    together = check(own, base, *rules)
    assert alone.answer == "regressed" and together.answer == "inconclusive"
    assert together.gated[0].p == pytest.approx(5 * alone.gated[0].p)
    assert together.gated[0].note == "over the budget, but within the noise of the runs"


def test_one_run_per_side_is_inconclusive() -> None:
    verdict = check(runs("own", "exposed_comm", (0.2,)), BASE[:1], "exposed_comm:5%")
    assert verdict.answer == "inconclusive" and verdict.low_confidence
    assert verdict.gated[0].note == (
        "noise unknown with one run per side: record 3 to 5 runs per side"
    )
    stored = check(runs("own", "exposed_comm", (0.2,)), BASE, "exposed_comm:5%")
    assert stored.answer == "regressed" and stored.low_confidence


def test_counts_are_compared_exactly_and_never_of_low_confidence() -> None:
    more = (*CALLS, CallMetrics("tp", "all_reduce", "float32", 8, 4, False, 30_000, 0))
    own = [run("own", {}, calls=more)]
    verdict = check(own, [run("base", {})], "calls:exact", "bytes:1%")
    calls, size = verdict.gated
    assert (calls.answer, calls.baseline, calls.candidate) == ("regressed", 80.0, 84.0)
    assert calls.note == "tp all_reduce 64 -> 68"
    assert (size.answer, size.harm) == ("pass", 32.0)
    assert not verdict.low_confidence
    assert [astuple_of(row) for row in verdict.calls] == [
        ("tp", "all_reduce", "float32", 8, 0, 4, 0, 120_000)
    ]
    assert verdict.causes[0].message == (
        "tp all_reduce: +4 calls per step (baseline: none; candidate: 4 of 8 B)"
    )


def astuple_of(row: object) -> tuple:
    return tuple(getattr(row, name) for name in row.__struct_fields__)  # type: ignore[attr-defined]


def test_smaller_buckets_are_named_as_such() -> None:
    tp, dp = CALLS
    halves = replace(dp, message_bytes=12_500_000, calls=32, transfer_ns=600_000)
    verdict = check([run("own", {}, calls=(tp, halves))], [run("base", {})], "calls:exact")
    assert verdict.causes[0].message == (
        "dp_replicate all_reduce: +16 calls per step (baseline: 16 of 25.0 MB; "
        "candidate: 32 of 12.5 MB), same bytes in smaller messages"
    )


def test_fewer_calls_pass_and_suggest_a_new_baseline() -> None:
    found = judged([run("own", {}, calls=CALLS[:1])], [run("base", {})], "calls:exact")
    assert (found.answer, found.note) == ("pass", "improved: consider updating the baseline")


CUT = Doubt("trace_cut_off", "the file is truncated; 489 complete entries were read", 1)
OTHER_JOB = Doubt("job_mismatch", "describes another job", None)


def test_counts_of_an_incomplete_run_are_no_verdict() -> None:
    """Fewer calls, since the trace of a rank was cut off; and the same as a baseline of it."""
    fewer = [replace(CALLS[0], calls=40), CALLS[1]]
    whole, cut = run("whole", {}), run("cut", {"step": 1.0}, calls=fewer, doubts=[CUT])
    for candidate, baseline in ((cut, whole), (whole, cut)):
        verdict = check([candidate], [baseline], "calls:exact", "bytes.tp:5%")
        assert [one.answer for one in verdict.gated] == ["inconclusive", "inconclusive"]
        text = "cut: rank 1: the file is truncated; 489 complete entries were read"
        assert {one.note for one in verdict.gated} == {text}
        assert text in verdict.warnings
    assert check([cut], [], "calls:<=100").answer == "inconclusive"


def test_what_all_runs_lack_alike_and_baselines_of_old_versions_do_not_matter() -> None:
    for before in ((CUT,), None):
        baseline = run("before", {}, doubts=before)
        verdict = check([run("own", {"step": 1.0}, doubts=[CUT])], [baseline], "calls:exact")
        assert (verdict.answer, verdict.warnings) == ("pass", ())


def test_a_regression_of_runs_that_keep_their_warm_up_is_inconclusive() -> None:
    few = Doubt("few_steps", "2 full steps: the first counts too", None)
    base = runs("base", "exposed_comm", QUIET)
    short = runs("own", "exposed_comm", MORE, doubts=[few])
    found = check(short, base, "exposed_comm:5%").gated[0]
    assert (found.answer, found.note) == (
        "inconclusive",
        "own0: 2 full steps: the first counts too",
    )
    alike = runs("base", "exposed_comm", QUIET, doubts=[few])
    assert check(short, alike, "exposed_comm:5%").answer == "regressed"
    longer = runs("long", "exposed_comm", MORE)
    assert check(longer, alike, "exposed_comm:5%").answer == "regressed"
    assert check([short[0], *longer[1:]], base, "exposed_comm:5%").answer == "regressed"
    fine = runs("own", "exposed_comm", SAME, doubts=[few])
    assert check(fine, base, "exposed_comm:5%").answer == "pass"


def test_a_job_file_of_another_job_is_no_limit() -> None:
    own = run("own", {"step": 9.0}, predicted={"step": 10.0}, doubts=[OTHER_JOB])
    found = check([own], [], "step:model+20%").gated[0]
    assert (found.answer, found.note) == ("inconclusive", "own: describes another job")


def test_an_axis_that_a_run_does_not_have_is_refused() -> None:
    both = run("own", {"step": 1.0}), run("base", {})
    for rule in ("calls.tpp:exact", "bytes.:5%", "calls.2:exact"):
        with pytest.raises(UsageError, match=r"has no axis .*; its axes: dp_replicate, tp"):
            check([both[0]], [both[1]], rule)
    with pytest.raises(UsageError, match=r"has no exposed_comm\.2"):
        check([both[0]], [both[1]], "exposed_comm.2:5%")


def test_a_baseline_that_differs_in_itself_cannot_be_exact() -> None:
    base = [run("base0", {"step": 1.0}), run("base1", {"step": 2.0}, calls=CALLS[:1])]
    found = judged([run("own", {})], base, "calls:exact")
    assert found.answer == "inconclusive" and "an exact comparison is not possible" in found.note


def test_calls_of_one_axis_and_a_limit_on_them() -> None:
    assert judged([run("own", {})], [], "calls.tp:<=64").answer == "pass"
    assert judged([run("own", {})], [], "calls.tp:<=63").answer == "regressed"
    assert judged([run("own", {}, calls=CALLS[:1])], [run("base", {})], "calls:0").answer == "pass"


def test_why_a_straggler_is_named_with_its_group() -> None:
    """A recording knows its groups, which the file of a baseline does not keep."""
    times = (*TIMES[:4], BucketTime("skew", None, 34 * MS), BucketTime("skew", "tp", 33 * MS))
    blame = (CausedWait(3, "compute", "tp", 62 * MS), *BLAME)
    own = runs("own", "exposed_comm", MORE, times=times, blame=blame)
    verdict = check_candidate(own, BASE, parse_budgets(["exposed_comm:5%"]))
    (cause,) = verdict.causes
    assert (cause.bucket, cause.axis, cause.rank, cause.group) == ("skew", "tp", 3, (2, 3))
    assert cause.moved_ns == 30 * MS
    assert cause.message == (
        "skew on tp: +30.0 ms per step and rank; rank 3 (compute) delays its group (2, 3) by "
        "62.0 ms more per step"
    )


def test_why_more_idle_time_is_named_with_the_rank_that_delays_others_by_it() -> None:
    """Rank 2 computes longer too, which is no reason to idle."""
    blame = (CausedWait(3, "host", "tp", 30 * MS), CausedWait(2, "compute", "tp", 40 * MS), *BLAME)
    times = (*TIMES[:4], BucketTime("idle", None, 16 * MS))
    groups = (GroupRanks(None, "", (2, 3, 6, 7), "dp_replicate x tp"),)
    own = runs("own", "step", MORE, times=times, blame=blame)
    own = [replace(one, groups=groups) for one in own]
    (cause,) = check(own, runs("base", "step", QUIET), "step:5%").causes
    assert (cause.bucket, cause.rank, cause.moved_ns) == ("idle", 3, 16 * MS)
    assert cause.message == (
        "idle: +16.0 ms per step and rank; rank 3 (host) delays other ranks by 30.0 ms more per "
        "step"
    )


def test_why_a_slow_link_is_named_with_its_collective() -> None:
    times = (*TIMES[:1], BucketTime("collective", None, 22 * MS),
             BucketTime("collective", "dp_replicate", 13 * MS), *TIMES[4:])  # fmt: skip
    slow = (CALLS[0], replace(CALLS[1], transfer_ns=4_000_000))
    own = runs("own", "exposed_comm", MORE, times=times, calls=slow)
    (cause,) = check(own, BASE, "exposed_comm:5%").causes
    assert (cause.bucket, cause.axis, cause.op) == ("collective", "dp_replicate", "all_reduce")
    assert cause.message.endswith("mostly all_reduce of 25.0 MB, 16 calls per step")


def test_without_a_change_hardly_any_comparison_lists_one() -> None:
    """Nine metrics of five runs a side, each with noise of its own: by an interval of 96 % for each
    a fifth of the comparisons would."""
    rng, names = np.random.default_rng(7), ("compute", "collective", "p2p", "skew", "bubble",
                                            "copy", "idle", "overlap", "step")  # fmt: skip

    def noisy(side: str) -> list[RunMetrics]:
        return [run(f"{side}{i}", dict(zip(names, rng.normal(1, 0.1, 9), strict=True)))
                for i in range(5)]  # fmt: skip

    budgets = parse_budgets(["calls:exact"])
    listed = sum(bool(check_candidate(noisy("own"), noisy("base"), budgets).others)
                 for _ in range(200))  # fmt: skip
    assert listed <= 12


def test_significant_changes_without_a_budget_are_listed() -> None:
    base = [run(f"b{i}", {"exposed_comm": v, "idle": v}) for i, v in enumerate(QUIET)]
    own = [run(f"o{i}", {"exposed_comm": w, "idle": v}) for i, (w, v) in
           enumerate(zip(SAME, MORE, strict=True))]  # fmt: skip
    verdict = check(own, base, "exposed_comm:5%")
    assert verdict.answer == "pass" and not verdict.causes
    assert [one.metric for one in verdict.others] == ["idle"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"mesh": "tp 4"}, "mesh is dp_replicate 2 tp 2 in base0, tp 4 in own0"),
        ({"device": "NVIDIA A100"}, "device is NVIDIA H100 in base0, NVIDIA A100 in own0"),
        ({"world_size": 8}, "world size is 4 in base0, 8 in own0"),
        ({"ranks": (0, 1)}, "ranks recorded is 4 ranks"),
        ({"backend": "gloo"}, "backend is nccl in base0, gloo in own0"),
    ],
)
def test_runs_of_another_setup_are_refused_without_across_setups(
    setting: dict[str, object], words: str
) -> None:
    own = runs("own", "exposed_comm", QUIET, setup=replace(SETUP, **setting))
    rule = "exposed_comm:5%"
    with pytest.raises(UsageError, match=words):
        check(own, BASE, rule)
    assert any(words in one for one in check(own, BASE, rule, across_setups=True).warnings)


def test_other_versions_are_compared_with_a_warning() -> None:
    setup = replace(SETUP, torch="2.14.0", nccl="2.31.1", driver="590.1")
    own = runs("own", "exposed_comm", MORE, setup=setup)
    verdict = check(own, BASE, "exposed_comm:5%")
    assert verdict.answer == "regressed"
    assert verdict.warnings == (
        "torch is 2.13.0 in base0, 2.14.0 in own0",
        "NCCL is 2.30.7 in base0, 2.31.1 in own0",
        "driver is 580.65.06 in base0, 590.1 in own0",
    )


def test_bandwidth_is_each_axis_and_op_that_all_runs_have() -> None:
    def links(name: str, tp: float, dp: float) -> object:
        return run(name, {"busbw.tp.all_reduce": tp, "busbw.dp_replicate.all_reduce": dp})

    base = [links(f"b{i}", 80e9 + i, 40e9 + i) for i in range(5)]
    own = [links(f"o{i}", 80e9 - i, 20e9 + i) for i in range(5)]
    verdict = check(own, base, "busbw:10%")
    assert {one.metric: one.answer for one in verdict.gated} == {
        "busbw.dp_replicate.all_reduce": "regressed",
        "busbw.tp.all_reduce": "pass",
    }
    with pytest.raises(UsageError, match="remove the busbw budget"):
        check(BASE, BASE[:1], "busbw:10%")


def test_what_cannot_be_judged_is_refused_with_a_hint() -> None:
    rule = "exposed_comm:5%"
    with pytest.raises(UsageError, match="needs a baseline; pass --baseline"):
        check(BASE, [], rule)
    with pytest.raises(UsageError, match="own0 has no exposed_comm; remove that budget"):
        check(runs("own", "mfu", (0.4,)), BASE, rule)
    with pytest.raises(UsageError, match="same recording; pass each run once per side"):
        check(BASE, runs("twice", "exposed_comm", (0.1, 0.1)), rule)
    with pytest.raises(DataError, match="analyze the recording again"):
        check([run("own", {}, calls=None)], [run("base", {})], "calls:exact")
    with pytest.raises(UsageError, match="at least one budget"):
        check(BASE, BASE)


def test_an_axis_that_never_waits_is_zero_where_the_mesh_has_it() -> None:
    own = runs("own", "step", (1.0, 2.0, 3.0))
    found = judged(own, runs("base", "step", (1.5, 2.5)), "skew.tp:5%")
    assert (found.answer, found.baseline, found.candidate, found.p) == ("pass", 0.0, 0.0, None)
    with pytest.raises(UsageError, match=r"has no skew\.cp"):
        judged(own, BASE, "skew.cp:5%")


def without_names(name: str, axis: str | None, mesh: str | None, *calls: CallMetrics) -> RunMetrics:
    """A run of four ranks on one group, whose axis was inferred from its calls."""
    setup = replace(SETUP, mesh=mesh, mesh_source=mesh and "rank sets and operations")
    values = {"calls": 18.0, f"exposed_comm.{axis}": 0.2, f"busbw.{axis}.all_reduce": 1e9}
    times = [BucketTime("collective", None, MS), BucketTime("collective", axis, MS)]
    built = run(name, values if axis else {}, setup=setup, calls=calls, times=times, blame=[])
    return replace(built, groups=(GroupRanks(axis, "default_pg", (0, 1, 2, 3)),))


def reduction(axis: str, calls: int, message_bytes: int) -> CallMetrics:
    return CallMetrics(axis, "all_reduce", "float32", message_bytes, calls, False, 1000, 0)


@pytest.mark.parametrize(
    ("axis", "mesh"),
    [("tp", "tp 4"), (None, None), ("dp_replicate", "dp_replicate 4")],
    ids=["another axis", "none", "the same"],
)
def test_an_added_collective_is_the_finding_whatever_axis_it_suggests(
    axis: str | None, mesh: str | None
) -> None:
    """16 calls are new and 2 changed their size: 16 more."""
    base = without_names(
        "base", "dp_replicate", "dp_replicate 4", reduction("dp_replicate", 2, 9000)
    )
    name = axis or "default_pg"
    more = without_names("own", axis, mesh, reduction(name, 16, 4000), reduction(name, 2, 9004))
    verdict = check([more], [base], "calls:exact")
    (found,) = verdict.gated
    assert (found.answer, found.harm, found.note) == (
        "regressed",
        16,
        "dp_replicate all_reduce 2 -> 18",
    )
    assert [cause.message for cause in verdict.causes] == [
        "dp_replicate all_reduce: +16 calls per step (baseline: 2 of 9.00 kB; candidate: "
        "16 of 4.00 kB + 2 of 9.00 kB)"
    ]
    assert verdict.warnings == (
        ()
        if mesh == "dp_replicate 4"
        else (
            f"mesh is dp_replicate 4 in base, {mesh or 'unknown'} in own, inferred from the calls; "
            "groups are compared by their ranks",
        )
    )


def test_the_metrics_of_an_axis_are_compared_with_those_of_the_same_ranks() -> None:
    base = without_names(
        "base", "dp_replicate", "dp_replicate 4", reduction("dp_replicate", 2, 9000)
    )
    own = without_names("own", "tp", "tp 4", reduction("tp", 2, 9000))
    for rule in ("exposed_comm.dp_replicate:<=10%", "busbw.dp_replicate.all_reduce:>=2GB/s"):
        assert check([own], [base], rule).gated[0].candidate in (0.2, 1e9)


def test_an_inferred_mesh_with_other_groups_is_another_mesh() -> None:
    base = without_names(
        "base", "dp_replicate", "dp_replicate 4", reduction("dp_replicate", 2, 9000)
    )
    own = without_names("own", "tp", "dp_replicate 2 tp 2", reduction("tp", 2, 9000))
    own = replace(own, groups=(GroupRanks("tp", "default_pg", (0, 1)),))
    with pytest.raises(UsageError, match="mesh is dp_replicate 4 in base, dp_replicate 2 tp 2 in"):
        check([own], [base], "calls:exact")
    across = check_candidate([own], [base], parse_budgets(["calls:exact"]), across_setups=True)
    assert {row.axis for row in across.calls} == {"dp_replicate", "tp"}


def test_meshes_that_the_jobs_state_are_refused_if_they_differ() -> None:
    base = without_names(
        "base", "dp_replicate", "dp_replicate 4", reduction("dp_replicate", 2, 9000)
    )
    own = without_names("own", "tp", "tp 4", reduction("tp", 2, 9000))
    stated = [
        replace(one, setup=replace(one.setup, mesh_source=source))
        for one, source in ((base, "run.json"), (own, "group names"))
    ]
    with pytest.raises(UsageError, match="mesh is dp_replicate 4 in base, tp 4 in own"):
        check(stated[1:], stated[:1], "calls:exact")


def test_calls_along_several_axes_match_older_baselines_and_are_named_as_on_screens() -> None:
    """A baseline has such calls by the description of their groups, and no groups if the mesh is
    stated."""
    norm, more = (
        CallMetrics("WEIGHTS_GROUP", "all_reduce", "float32", 4, calls, False, 30_000, 0)
        for calls in (4, 8)
    )
    named = GroupRanks(None, "WEIGHTS_GROUP", (0, 1, 2, 3), "dp_replicate x tp")
    base = [replace(run("base", {}, calls=(*CALLS, norm)), groups=())]
    same, grown = (
        replace(run("own", {}, calls=(*CALLS, calls)), groups=(*GROUPS, named))
        for calls in (norm, more)
    )
    assert judged([same], base, "calls:exact").answer == "pass"
    for rule in ("calls:exact", "calls.WEIGHTS_GROUP:exact", "calls.dp_replicate x tp:exact"):
        verdict = check_candidate([grown], base, parse_budgets([rule]))
        assert verdict.gated[0].note == "dp_replicate x tp all_reduce 4 -> 8"
        assert [row.axis for row in verdict.calls] == ["dp_replicate x tp"]
        (cause,) = verdict.causes
        assert cause.message.startswith("dp_replicate x tp all_reduce: +4 calls per step")
        assert cause.group == (0, 1, 2, 3)
    # An older baseline of an inferred mesh has the group, without a name.
    older = [replace(one, groups=(*GROUPS, replace(named, name=""))) for one in base]
    verdict = check_candidate([grown], older, parse_budgets(["calls:exact"]))
    assert [row.axis for row in verdict.calls] == ["dp_replicate x tp"]
    assert verdict.causes[0].group == (0, 1, 2, 3)
    # Of a baseline file as candidate, too, which has one group of each description.
    assert check([grown], base, "calls:exact").gated[0].note.startswith("dp_replicate x tp ")

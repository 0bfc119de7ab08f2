"""Two runs by part of the model, and a budget of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import CpuTrace

from stepsplit.analyzer import check_runs, compare_runs
from stepsplit.analyzer.errors import UsageError


def record(folder: Path, attention_us: float) -> Path:
    """Three steps of attention and 100 us of an MLP."""
    trace = CpuTrace()
    length = attention_us + 100
    for step in range(3):
        start, middle = step * length, step * length + attention_us
        trace.step(step, start, start + length)
        trace.annotation("stepsplit::module layers.0.attn", start, middle)
        trace.annotation("stepsplit::module layers.0.mlp", middle, start + length)
        trace.op("aten::mm", start, middle).op("aten::mm", middle, start + length)
    folder.mkdir()
    trace.write(folder)
    return folder


def test_the_parts_of_two_runs_add_up_to_their_difference(tmp_path: Path) -> None:
    before, after = record(tmp_path / "a", 50), record(tmp_path / "b", 80)
    comparison = compare_runs(before, after)
    parts = [(row.part, row.baseline_ns, row.candidate_ns) for row in comparison.parts]
    assert parts == [("attention", 50_000, 80_000), ("mlp", 100_000, 100_000)]
    assert sum(row.difference_ns for row in comparison.parts) == comparison.difference_ns


def record_parts(folder: Path, parts: dict[str, list[tuple[str, float]]]) -> Path:
    """Three steps of parts that run these ops."""
    trace, length = CpuTrace(), sum(us for ops in parts.values() for _, us in ops)
    for step in range(3):
        at = step * length
        trace.step(step, at, at + length)
        for part, ops in parts.items():
            trace.annotation(f"stepsplit::module {part}", at, at + sum(us for _, us in ops))
            for name, us in ops:
                trace.op(name, at, at + us)
                at += us
    folder.mkdir()
    trace.write(folder)
    return folder


@pytest.mark.parametrize(
    ("us", "reason"), [(20, ""), (40, "the same kernels take 2.00 times as long")]
)
def test_what_a_step_runs_once_is_not_measured_by_its_microbatches(
    us: int, reason: str, tmp_path: Path
) -> None:
    def record_steps(folder: Path, n_products: int, norm_us: int) -> Path:
        trace, length = CpuTrace(), 100 * n_products + norm_us
        for step in range(3):
            start = step * length
            trace.step(step, start, start + length)
            for product in range(n_products):
                at = start + 100 * product
                trace.annotation("stepsplit::module layers.0.mlp", at, at + 100)
                trace.op("aten::mm", at, at + 100)
            trace.annotation("stepsplit::module norm", start + length - norm_us, start + length)
            trace.op("aten::pow", start + length - norm_us, start + length)
        folder.mkdir()
        trace.write(folder)
        return folder

    runs = record_steps(tmp_path / "a", 1, 20), record_steps(tmp_path / "b", 4, us)
    reasons = {row.part: row.reason for row in compare_runs(*runs).parts}
    assert reasons["norm"] == reason


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ([("aten::native_layer_norm", 30)], [("aten::pow", 20), ("aten::mul", 30)],
         "no longer fused: 1 kernel of a step became 2"),
        ([("aten::pow", 20), ("aten::mul", 30)], [("aten::native_layer_norm", 30)],
         "now fused: 2 kernels of a step became 1"),
        ([("aten::pow", 20)], [("aten::pow", 10), ("aten::pow", 30)],
         "1 kernel of a step became 2"),
        ([("aten::pow", 20)], [("aten::pow", 40)], "the same kernels take 2.00 times as long"),
        ([("aten::pow", 20)], [("aten::exp", 20)], "other kernels"),
        ([("aten::pow", 20)], [("aten::pow", 21)], ""),
    ],
)  # fmt: skip
def test_the_kernels_of_a_part_say_why_it_changed(
    before: list[tuple[str, float]], after: list[tuple[str, float]], reason: str, tmp_path: Path
) -> None:
    runs = (
        record_parts(tmp_path / name, {"layers.0.mlp": [("aten::mm", 100)], "layers.0.norm": ops})
        for name, ops in (("a", before), ("b", after))
    )
    assert explain_parts(*runs) == {"norm": reason, "mlp": ""}


def explain_parts(before: Path, after: Path) -> dict[str, str]:
    return {row.part: row.reason for row in compare_runs(before, after).parts}


def test_an_op_of_two_parts_is_counted_in_each(tmp_path: Path) -> None:
    """The same ops: that one of them took longer in another part moves no calls."""

    def record_fills(folder: Path, head_us: float, norm_us: float) -> Path:
        fills = [("aten::fill_", head_us)] * 3
        parts = {"head": [("aten::mm", 60), *fills], "norm": [("aten::fill_", norm_us)]}
        return record_parts(folder, parts)

    runs = record_fills(tmp_path / "a", 10, 29), record_fills(tmp_path / "b", 10, 31)
    assert explain_parts(*runs) == {"head": "", "norm": ""}
    slower = record_fills(tmp_path / "c", 10, 58)
    assert explain_parts(runs[0], slower) == {
        "head": "", "norm": "the same kernels take 2.00 times as long",
    }  # fmt: skip


def test_an_op_that_takes_no_time_in_a_part_explains_none(tmp_path: Path) -> None:
    trace = CpuTrace()
    for step in range(3):
        start = 100.0 * step
        trace.step(step, start, start + 100)
        trace.annotation("stepsplit::module mlp", start, start + 60)
        trace.op("aten::fill_", start, start + 60)
        trace.annotation("stepsplit::module norm", start + 60, start + 100)
        trace.op("aten::fill_", start + 60, start + 60)
    trace.write(tmp_path)
    assert explain_parts(tmp_path, tmp_path) == {"mlp": "", "norm": ""}


def test_a_short_op_that_one_report_leaves_out_is_no_other_kernel(tmp_path: Path) -> None:
    """A report has the 30 kernels with the most time, so noise decides on the last ones."""

    def record_many(folder: Path, exp_us: float, *more: tuple[str, float]) -> Path:
        small = [(f"aten::op{i}", 2.0) for i in range(29)]
        mlp = [("aten::mm", 900.0), *small, ("aten::exp", exp_us), *more]
        return record_parts(folder, {"mlp": mlp})

    runs = record_many(tmp_path / "a", 3), record_many(tmp_path / "b", 1)
    assert explain_parts(*runs) == {"mlp": ""}
    # One that takes a tenth of the part was not there before.
    assert explain_parts(runs[0], record_many(tmp_path / "c", 3, ("aten::erf", 100))) == {
        "mlp": "other kernels"
    }


def test_faster_kernels_do_not_explain_a_part_that_takes_longer(tmp_path: Path) -> None:
    def record_waiting(folder: Path, idle_us: float, mm_us: float) -> Path:
        trace, length = CpuTrace(), idle_us + mm_us
        for step in range(3):
            start = step * length
            trace.step(step, start, start + length)
            trace.annotation("stepsplit::module mlp", start, start + length)
            trace.op("aten::mm", start + idle_us, start + length)
        folder.mkdir()
        trace.write(folder)
        return folder

    runs = record_waiting(tmp_path / "a", 10, 100), record_waiting(tmp_path / "b", 90, 50)
    assert explain_parts(*runs) == {"mlp": ""}


@pytest.mark.parametrize(
    ("budget", "answer"),
    [("part:attention:<=90us", "pass"), ("part:attention:<=60us", "regressed"),
     ("part.mlp:<=100us", "pass")],
)  # fmt: skip
def test_a_part_has_a_budget(tmp_path: Path, budget: str, answer: str) -> None:
    runs = [record(tmp_path / f"run{us}", us) for us in (79, 80, 81, 82, 83, 84)]
    result = check_runs(runs[3:], runs[:3], budgets=[budget])
    assert (result.answer, [row.metric for row in result.gated]) == (
        answer,
        [f"part.{'mlp' if 'mlp' in budget else 'attention'}"],
    )


def test_a_run_without_the_part_is_one_line(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 80)
    with pytest.raises(UsageError, match=r"has no part\.experts"):
        check_runs([run], [run], budgets=["part:experts:5%"])

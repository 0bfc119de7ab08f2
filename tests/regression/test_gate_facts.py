"""A report's facts for the gate: every value by hand from the steps that it is a median of."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.report_builders import analysis

from stepsplit.analyzer import (
    CollectiveRow,
    DataError,
    ExposedRow,
    GroupRow,
    Report,
    Setup,
    StepCallsRow,
    StepRow,
)
from stepsplit.analyzer.analysis import read_run_metrics
from stepsplit.analyzer.regression.metrics import extract_metrics, read_baseline, to_json

SAMPLES = Path(__file__).parents[2] / "sample_traces"
US = 1_000


def step(rank: int, number: int, kind: str = "full", **buckets: int) -> StepRow:
    """A step of 1,000 us: what no bucket is given is compute; 40 us of communication are hidden."""
    names = ("collective", "p2p", "skew", "bubble", "copy", "idle")
    rest = {f"{name}_ns": buckets.get(name, 0) * US for name in names}
    compute = 1_000 * US - sum(rest.values())
    memos = {"overlapped_ns": 40 * US, "bubble_covered_ns": 0, "fused_ns": 0}
    return StepRow(
        rank, number, kind, 0, 1_000 * US, compute_ns=compute, **rest, **memos, estimated=False
    )


def report() -> Report:
    """Two ranks; step 1 is cut off, step 2 warms up, in step 4 rank 1 comes late."""
    usual, late = {"collective": 100, "idle": 20}, {"collective": 100, "skew": 60, "idle": 20}
    steps = [step(rank, 1, "partial", collective=900) for rank in (0, 1)]
    steps += [step(rank, 2, collective=500) for rank in (0, 1)]
    steps += [step(rank, number, **usual) for number in (3, 5) for rank in (0, 1)]
    steps += [step(0, 4, **late), step(1, 4, **usual)]
    exposed = [
        ExposedRow(row.rank, row.step, "tp", "forward", row.collective_ns, 0, row.skew_ns, 0)
        for row in steps
    ]
    return Report(
        run=analysis().report.run,
        groups=(GroupRow(0, "tp", "mesh_tp", (0, 1)),),
        steps=tuple(steps),
        exposed=tuple(exposed),
        collectives=(
            CollectiveRow(0, "all_reduce", "float32", 8_000, 10, 40 * US, 5 * US, 2e8, 2e8),
            CollectiveRow(0, "all_gather", "float32", 4_000, 10, 20 * US, 5 * US, 2e8, 1e8),
        ),
        step_calls=(
            StepCallsRow(0, "all_reduce", "float32", 8_000, 4, 4, 4),
            StepCallsRow(0, "all_gather", "float32", 4_000, 4, 2, 4),
        ),
        mfu=0.41,
    )


def test_values_are_medians_over_the_steps_left_when_partial_and_first_are_out() -> None:
    facts = extract_metrics(report(), "report.json")
    found = {one.metric: one.value for one in facts.values}
    assert facts.steps == 3
    assert found == pytest.approx(
        {
            "step": 1_000_000.0, "mean_step": 1_000_000.0,
            "exposed_comm": 0.1, "collective": 0.1, "p2p": 0.0, "skew": 0.0, "bubble": 0.0,
            "compute": 0.88, "copy": 0.0, "idle": 0.02,
            "overlap": 40 / 140,
            "exposed_comm.tp": 0.1, "collective.tp": 0.1, "skew.tp": 0.0,
            "busbw.tp.all_reduce": 2e8, "busbw.tp.all_gather": 1e8,
            "calls": 8.0, "calls.tp": 8.0, "bytes": 48_000.0, "bytes.tp": 48_000.0,
            "mfu": 0.41,
        }
    )  # fmt: skip
    assert facts.calls is not None
    assert [(c.op, c.calls, c.varies, c.transfer_ns) for c in facts.calls] == [
        ("all_gather", 4, True, 20 * US), ("all_reduce", 4, False, 40 * US),
    ]  # fmt: skip


def test_the_warm_up_stays_where_few_steps_would_be_left() -> None:
    short = replace(report(), steps=tuple(row for row in report().steps if row.step < 5))
    found = extract_metrics(short, "x")
    assert (found.steps, [one.code for one in found.doubts or ()]) == (3, ["few_steps"])
    assert extract_metrics(report(), "x").doubts == ()


def test_the_setup_of_a_run() -> None:
    assert extract_metrics(analysis().report, "x").setup == Setup(
        world_size=4, ranks=(0, 1, 2, 3), hosts=2, device="NVIDIA H100", mesh="pp 2 tp 2",
        backend="nccl", schedule="1F1B", microbatches=4, torch="2.13.0", nccl="2.30.7",
        driver=None, mesh_source="run.json",
    )  # fmt: skip


def test_an_older_report_without_call_counts_has_none() -> None:
    assert extract_metrics(replace(report(), step_calls=()), "x").calls is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": ()}, "x: no step to check; record at least one full step"),
        ({"mfu": float("nan")}, "x: mfu is not a finite number; analyze the recording again"),
    ],
)
def test_a_run_that_cannot_be_judged_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(DataError) as error:
        extract_metrics(replace(report(), **change), "x")
    assert str(error.value).startswith(words)


def test_a_baseline_file_brings_the_same_runs_back_a_fact_a_line(tmp_path: Path) -> None:
    facts = [extract_metrics(report(), "x"), *read_run_metrics(SAMPLES / "tp2_pp2")]
    file = tmp_path / "base.json"
    file.write_bytes(to_json(facts))
    assert read_baseline(file) == tuple(replace(one, groups=()) for one in facts)
    assert read_run_metrics(file) == read_baseline(file)
    assert '{"metric":"exposed_comm","value":0.1},' in [
        line.strip() for line in file.read_text().splitlines()
    ]
    assert file.stat().st_size < 10_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": "stepsplit.baseline/9", "runs": []}', "schema stepsplit.baseline/9"),
        ('{"schema": "stepsplit.baseline/1", "runs": []}', "contains no run"),
        ('{"schema": "stepsplit.baseline/1", "runs": [{}]}', "not a stepsplit baseline"),
        ('{"schema": "stepsplit.baseline/1", "runs": [', "not a stepsplit baseline"),
        ('{"schema": "stepsplit.baseline/1", "runs": ' + "[" * 100_000, "not a stepsplit baseline"),
    ],
)
def test_a_baseline_file_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "base.json"
    file.write_text(text)
    with pytest.raises(DataError, match=words):
        read_run_metrics(file)


def test_calls_of_a_step_in_the_samples() -> None:
    """tp=2, pp=2, 3 microbatches: all_reduces 2 layers a stage forward and backward, by 4 ranks."""
    (facts,) = read_run_metrics(SAMPLES / "tp2_pp2")
    assert facts.calls is not None
    assert {(c.axis, c.op): (c.calls, c.varies) for c in facts.calls} == {
        ("tp", "all_reduce"): (48, False), ("pp", "send"): (12, False), ("pp", "recv"): (12, False),
    }  # fmt: skip

"""Measured messages of a run compared with the predicted ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace
from support.prediction_builders import MS, prediction
from support.splitting import recording_of, split_of

from stepsplit.analyzer import Band, CommOp, Communication, Prediction, predict
from stepsplit.analyzer.gap.comm_gap import (
    Amount,
    MeasuredMessages,
    MessageComparison,
    MessageRow,
    collect_messages,
    compare_messages,
)
from stepsplit.analyzer.model.config_file import parse_job

SAMPLES = Path(__file__).parents[2] / "sample_traces"
NONE = Amount(0, 0)


def measured(folder: Path) -> tuple[MeasuredMessages, ...]:
    return collect_messages(split_of(recording_of(folder)))


def predicted(*messages: tuple[str, str, int, int, int]) -> Prediction:
    """A prediction that sends (axis, op, stage, count, message bytes) only."""
    found = (
        CommOp("any", op, axis, stage, "forward", count, size, size, size)
        for axis, op, stage, count, size in messages
    )
    communication = tuple(Communication(one, Band(MS, MS, MS), 0) for one in found)
    return replace(prediction(), communication=communication)


def seen(axis: str, op: str, size: int, count: int, *, rank: int = 0, step: int = 1):
    return MeasuredMessages(rank, 0, step, axis, op, size, count)


def test_calls_count_in_the_step_in_which_the_host_made_them(tmp_path: Path) -> None:
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_tp", [0, 1])])
        trace.step(1, 0, 100).step(2, 100, 200).step(3, 200, 300)
        for start in (0, 100, 200):
            trace.kernel("gemm", start + 10, start + 95, launched=start)
            trace.all_reduce(start + 96, start + 105, launched=start + 5)
            trace.all_reduce(start + 106, start + 109, launched=start + 50, nelems=1)
        trace.write(tmp_path)
    assert measured(tmp_path) == tuple(
        MeasuredMessages(rank, 0, step, "tp", "all_reduce", size, 1)
        for rank in range(2)
        for step in (1, 2, 3)
        for size in (4, 4000)
    )


def test_sends_and_receives_count_apart_on_either_end(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1])]
    first = CpuTrace(0, 2, world).step(1, 0, 100).op("aten::mm", 0, 40)
    first.message("send", 1, 40, 50).message("send", 1, 60, 70, n=1).write(tmp_path)
    last = CpuTrace(1, 2, world).step(1, 0, 100).message("recv", 0, 5, 50)
    last.message("recv", 0, 55, 70, n=1).op("aten::mm", 75, 100).write(tmp_path)
    assert measured(tmp_path) == (
        MeasuredMessages(0, 0, 1, "pp", "send", 4000, 2),
        MeasuredMessages(1, 1, 1, "pp", "recv", 4000, 2),
    )


def test_measured_and_predicted_share_a_row_and_scalars_are_separate() -> None:
    found = (
        seen("tp", "all_reduce", 8000, 3),
        seen("tp", "all_reduce", 2000, 1),
        seen("tp", "all_reduce", 4, 1),
        seen("cp", "all_to_all", -1, 2),
        seen("default_pg", "barrier", 1, 1),
    )
    expected = predicted(
        ("tp", "all_reduce", 0, 4, 8000),
        ("pp", "send", 0, 1, 5000),
        ("tp", "all_reduce", 0, 1, 4),
        ("tp", "all_reduce", 1, 9, 9000),
    )
    assert compare_messages(found, expected) == MessageComparison(
        rows=(
            MessageRow(0, "cp", "all_to_all", Amount(2, None), NONE),
            MessageRow(0, "pp", "send", NONE, Amount(1, 5000)),
            MessageRow(0, "tp", "all_reduce", Amount(4, 26_000), Amount(4, 32_000)),
        ),
        scalars=(
            MessageRow(0, "default_pg", "barrier", Amount(1, 0), NONE),
            MessageRow(0, "tp", "all_reduce", Amount(1, 4), Amount(1, 4)),
        ),
    )


def test_ranks_and_steps_that_differ_are_reported_and_never_equal() -> None:
    found = [seen("ep", "all_to_all", 5000, 2, rank=r, step=s) for r in (0, 1) for s in (1, 2)]
    found[3] = replace(found[3], message_bytes=6000)
    expected = predicted(("ep", "all_to_all", 0, 2, 5000))
    (row,) = compare_messages(found, expected).rows
    assert row == MessageRow(0, "ep", "all_to_all", Amount(2, 10_000), Amount(2, 10_000), True)
    assert not row.equal
    assert compare_messages(found[:3], expected).equal


def test_a_rank_without_the_calls_of_its_peers_differs() -> None:
    found = [seen("tp", "all_reduce", 5000, 2, rank=0), seen("cp", "all_gather", 5000, 2, rank=1)]
    rows = compare_messages(found, predicted(("tp", "all_reduce", 0, 2, 5000))).rows
    assert [(row.axis, row.varies) for row in rows] == [("cp", True), ("tp", True)]


@pytest.mark.parametrize(
    ("of_mesh", "of_model"),
    [
        ({"dp_replicate"}, {"dp_replicate"}),
        ({"dp_shard x cp"}, {"dp_shard"}),
        ({"dp_replicate x cp"}, {"dp_cp"}),
        ({"cp"}, {"dp_cp"}),
        ({"dp_replicate"}, {"dp_shard"}),
        ({"dp_replicate", "dp_shard"}, {"dp_replicate", "dp_shard"}),
        ({"dp_shard x cp", "dp_replicate"}, {"dp_replicate", "dp_shard"}),
    ],
)
def test_data_parallel_ranks_have_one_word(of_mesh: set[str], of_model: set[str]) -> None:
    found = [seen(axis, "all_reduce", 5000, 1) for axis in of_mesh]
    expected = predicted(*((axis, "all_reduce", 0, 1, 5000) for axis in of_model))
    assert compare_messages(found, expected).equal


RUN = """
[model]
layers = {model.layers}
hidden = {model.hidden}
heads = {model.heads}
ffn = {model.ffn}
vocab = {model.vocab}
norm = "rms"
biases = false
learned_positions = true
tied = false
[parallel]
{parallel}
[training]
seq_len = 64
micro_batch = 4
global_batch = {batch}
dtype = "fp32"
framework = "{framework}"
[hardware]
preset = "cpu"
"""


def of_sample(name: str, parallel: str, batch: int, framework: str) -> MessageComparison:
    recording = recording_of(SAMPLES / name)
    assert recording.spec is not None
    text = RUN.format(
        model=recording.spec.model, parallel=parallel, batch=batch, framework=framework
    )
    return compare_messages(measured(SAMPLES / name), predict(parse_job(text)))


@pytest.mark.parametrize(("name", "microbatches"), [("pp2_m2", 2), ("pp2_m8", 8)])
def test_messages_of_a_recorded_pipeline_match_the_model(name: str, microbatches: int) -> None:
    found = of_sample(name, "pp = 2", 4 * microbatches, "fsdp2")
    each = Amount(microbatches, microbatches * 64 * 4 * 512 * 4)
    assert found.rows == tuple(
        MessageRow(stage, "pp", op, each, each) for stage in (0, 1) for op in ("recv", "send")
    )


def test_recorded_ddp_reduces_the_predicted_bytes_in_its_own_buckets() -> None:
    (row,) = of_sample("dp4", "dp = 4", 16, "ddp").rows
    gradients = 12_723_200
    assert row == MessageRow(
        0, "dp_replicate", "all_reduce", Amount(4, gradients), Amount(2, gradients)
    )


def test_recorded_fsdp_matches_the_predicted_reduce_scatters_and_merges_gathers() -> None:
    """The root unit of the recording holds embedding, head and positions, and stays gathered."""
    found = of_sample("fsdp4", "dp_shard = 4\nzero = 3", 16, "fsdp2").rows
    gradients, ends = 6_427_648, 132_096
    assert found == (
        MessageRow(
            0, "dp_shard", "all_gather",
            Amount(5, 2 * gradients - ends), Amount(7, 2 * gradients - 33_792),
        ),
        MessageRow(0, "dp_shard", "reduce_scatter", Amount(3, gradients), Amount(4, gradients)),
    )  # fmt: skip

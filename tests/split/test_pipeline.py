"""The pipeline: its boxes by annotations and by messages, its schedule, its ideal bubble."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path
from statistics import quantiles

import pytest
from simulator.playing import Durations, runnable
from simulator.schedules import SCHEDULES, actions
from support.builders import BASE_NS, COMM_STREAM, CpuTrace, GpuTrace

from stepsplit.analyzer import analyze, examine
from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.analyzer.split.microbatch_marks import PHASE_OF_LETTER
from stepsplit.analyzer.split.microbatch_slots import MicrobatchSlot
from stepsplit.analyzer.split.pipeline import number_microbatches
from stepsplit.analyzer.split.schedule import (
    DetectedSchedule,
    classify_schedule,
    detect_schedule,
    normalize_schedule,
)

MARK = re.compile(rb"stepsplit::(?=[FBIW] stage=)")
SAMPLES = Path(__file__).parents[2] / "sample_traces"
STAGES = [("0", "mesh_pp", [0, 1])]
EQUAL = (1.0, 1.0, 1.0)
PHASES = ("forward", "backward", "weight")


def order(words: str, durations: dict[str, int] | None = None) -> list[MicrobatchSlot]:
    """The boxes of one rank, such as "0F0 0B0": stage, letter, microbatch; 10 ns each."""
    boxes, at = [], 0
    for word in words.split():
        letter = next(letter for letter in "FBIW" if letter in word)
        stage, microbatch = map(int, word.split(letter))
        end = at + (durations or {}).get(letter, 10)
        boxes.append(MicrobatchSlot(stage, microbatch, PHASE_OF_LETTER[letter], at, end))
        at = end
    return boxes


def played(
    schedule: str, ranks: int, microbatches: int, chunks: int = 1
) -> list[list[MicrobatchSlot]]:
    orders = actions(schedule, ranks, microbatches, chunks)
    return [order(" ".join(f"{a.stage}{a.kind}{a.microbatch}" for a in one)) for one in orders]


Marked = tuple[int, str, int, float, float]
"""(stage, phase, microbatch, start, end) of a box, in microseconds."""


def boxes_of(place: Path) -> list[tuple[int, Marked]]:
    """The boxes of the recording, each with its rank; times as in the traces."""
    found = examine([place])
    shown, begun = found.tables.boxes, int(found.report.run.t0_unix_ns) - BASE_NS
    columns = (shown.rank, shown.stage, shown.phase, shown.microbatch, shown.start_ns, shown.dur_ns)
    return [
        (rank, (stage, PHASES[phase], mb, (begun + start) / 1000, (begun + start + ns) / 1000))
        for rank, stage, phase, mb, start, ns in zip(*(c.tolist() for c in columns), strict=True)
    ]


def boxes(folder: Path, trace: GpuTrace | CpuTrace) -> list[Marked]:
    return [box for _, box in boxes_of(trace.write(folder))]


def autograd(trace: GpuTrace, start: float, end: float, *kernels: tuple[float, float]) -> GpuTrace:
    """Kernels that autograd launches from start to end, one a microsecond."""
    name = "autograd::engine::evaluate_function: MmBackward0"
    trace._add(name, "cpu_op", start, end, tid=101)
    for n, (begins, ends) in enumerate(kernels):
        trace.kernel("gemm", begins, ends, launched=start + 0.5 + n)
    return trace


# The ideal.


def test_the_ideal_bubble_of_each_schedule_on_four_ranks_with_eight_microbatches() -> None:
    """Passes of a stage where F + B is one pass; thirds of a pass where the backward is split."""
    names = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
    assert {name: compute_ideal_bubble_fraction(name, 4, 8, 1, EQUAL) for name in names} == {
        "naive": 24 / 32,
        "gpipe": 3 / 11,
        "1f1b": 3 / 11,
        "zb-h1": 3 / 27,
        "zb-h2": 3 / 27,
        "zb-v": 3 / 51,
        "dualpipe": 2 / 26,
        "dualpipe-v": 6 / 54,
    }
    assert compute_ideal_bubble_fraction("interleaved", 4, 8, 2) == 3 / 19
    assert compute_ideal_bubble_fraction("interleaved", 4, 2, 2) == 5 / 9


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if "dualpipe" not in name])
def test_the_ideal_bubble_matches_a_replay_of_the_order(schedule: str) -> None:
    """Not of dualpipe, whose two actions at once are played one after the other."""
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    length = runnable(actions(schedule, 4, 12, chunks), Durations(backward=2))
    holes = (length - 3 * 12 * chunks) / length
    assert compute_ideal_bubble_fraction(schedule, 4, 12, chunks, EQUAL) == pytest.approx(holes)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("times", [(10, 12, 8), (10, 8, 12), (10, 15, 5), (10, 10, 3)])
def test_so_does_that_of_unequal_forwards_and_gradients(
    schedule: str, times: tuple[int, int, int]
) -> None:
    chunks = 2 if schedule == "zb-v" else 1
    length = runnable(actions(schedule, 4, 12, chunks), Durations(times[0], 0, *times[1:]))
    holes = (length - sum(times) * 12 * chunks) / length
    assert compute_ideal_bubble_fraction(schedule, 4, 12, chunks, times) == pytest.approx(holes)


def test_weight_gradients_fill_what_their_share_of_the_backward_allows() -> None:
    """Three ranks ahead, each forward 10 and input gradient 12 less the weight gradient's 8."""
    assert compute_ideal_bubble_fraction("zb-h1", 4, 8, 1, (10, 12, 8)) == 42 / (8 * 30 + 42)
    assert compute_ideal_bubble_fraction("zb-h1", 4, 2, 1, (10, 12, 8)) == 58 / (2 * 30 + 58)
    assert compute_ideal_bubble_fraction("zb-h2", 4, 8, 1, (10, 20, 9)) == 36 / (8 * 39 + 36)


def test_the_ideal_is_none_where_it_is_not_known() -> None:
    unknown = [
        compute_ideal_bubble_fraction("zb-h1", 4, 8),
        compute_ideal_bubble_fraction("zb-h1", 4, 8, 1, (0, 0, 0)),
        compute_ideal_bubble_fraction("zerobubble", 4, 8, 1, EQUAL),
        compute_ideal_bubble_fraction("unknown", 4, 8, 1, EQUAL),
        compute_ideal_bubble_fraction("1f1b", 0, 8),
    ]
    assert unknown == [None] * 5


# Which schedule.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_every_schedule_is_detected_from_its_boxes(
    schedule: str, ranks: int, microbatches: int
) -> None:
    line = played(schedule, ranks, microbatches, 2 if schedule == "interleaved" else 1)
    assert classify_schedule(line) == schedule


def test_two_ranks_and_two_microbatches_distinguish_three_schedules() -> None:
    last = order("1F0 1B0 1F1 1B1")
    assert classify_schedule([order("0F0 0F1 0B0 0B1"), last]) == "1f1b"
    assert classify_schedule([order("0F0 0B0 0F1 0B1"), last]) == "naive"
    assert classify_schedule([order("0F0 0F1 0B0 0B1"), order("1F0 1F1 1B0 1B1")]) == "gpipe"


def test_fewer_microbatches_than_ranks_still_distinguish_1f1b_from_gpipe() -> None:
    assert [classify_schedule(played(name, 4, 2)) for name in ("1f1b", "gpipe")] == [
        "1f1b",
        "gpipe",
    ]


def test_zero_bubble_schedules_are_distinguished_by_their_warmup() -> None:
    last = order("1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2")
    h1, h2 = order("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"), order("0F0 0F1 0F2 0I0 0W0 0I1 0W1")
    searched = order("0F0 0I0 0F1 0W0 0I1 0W1")
    found = [classify_schedule([first, last]) for first in (h1, h2, searched)]
    assert found == ["zb-h1", "zb-h2", "zerobubble"]


def test_an_interleaved_schedule_with_weight_gradients_is_zero_bubble() -> None:
    first = order("0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1")
    last = order("1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1")
    assert classify_schedule([first, last]) == "zb-h1"


def test_two_models_that_share_their_ranks_are_dualpipe_however_their_stages_are_numbered() -> None:
    first, last = "0F0 1F0 1B0 0B0", "1F0 0F0 0B0 1B0"
    assert classify_schedule([order(first), order(last)]) == "dualpipe"


def test_the_recorded_ranks_determine_the_schedule() -> None:
    """Of four ranks the second alone: three forwards warm it up."""
    second = order("1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4")
    assert classify_schedule([[], second, [], []]) == "1f1b"
    assert classify_schedule([[], [], [], []]) is None


def test_an_order_or_a_placement_of_no_schedule_is_none() -> None:
    early = order("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3")
    assert classify_schedule([early, order("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")]) is None
    assert classify_schedule([order("0F0 1F0 1B0 0B0"), order("2F0 3F0 3B0 2B0")]) is None
    assert classify_schedule([order("0F0 3F0 3B0 0B0"), order("1F0 2F0 2B0 1B0")]) is None


def test_detection_uses_complete_steps_and_times_of_one_microbatch_on_a_stage() -> None:
    took = {"F": 10, "I": 12, "W": 8}
    first = order("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", took)
    last = order("1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2", took)
    begun = [first[:4], last[:4]]
    assert detect_schedule([begun, [first, last]]) == DetectedSchedule("zb-h1", 3, 1, (10, 12, 8))


def test_dualpipes_microbatches_are_those_of_both_directions() -> None:
    line = [order("0F0 1F0 1B0 0B0"), order("1F0 0F0 0B0 1B0")]
    assert detect_schedule([line]) == DetectedSchedule("dualpipe", 2, 2, None)


def test_times_are_of_actions_alone_and_of_backwards_that_are_split() -> None:
    """A whole backward takes 20, and a forward and a backward at once take 100."""
    boxes = order("0F0 1I0 1W0 0B0", {"F": 10, "I": 12, "W": 8, "B": 20})
    at_once = [MicrobatchSlot(0, 1, "forward", 50, 150), MicrobatchSlot(1, 1, "backward", 50, 150)]
    assert detect_schedule([[[*boxes, *at_once]]]) == DetectedSchedule(
        "dualpipe-v", 2, 2, (10, 12, 8)
    )


def test_a_schedule_called_for_one_microbatch_after_the_other_is_the_naive_one() -> None:
    first = number_microbatches(order("0F0 0B0 0F0 0B0 0F0 0B0"))
    last = number_microbatches(order("1F0 1B0 1F0 1B0 1F0 1B0"))

    assert [box.microbatch for box in first] == [0, 0, 1, 1, 2, 2]
    seen = detect_schedule([[first, last]])
    assert (seen.name, seen.microbatches) == ("naive", 3)


def test_spellings_of_a_schedule_map_to_one_name() -> None:
    stated = {
        "ScheduleGPipe": "gpipe",
        "Schedule1F1B": "1f1b",
        "ScheduleInterleaved1F1B": "interleaved",
        "ScheduleLoopedBFS": "interleaved",
        "ScheduleInterleavedZeroBubble": "zb-h1",
        "ScheduleZBVZeroBubble": "zb-v",
        "ScheduleDualPipeV": "dualpipe-v",
        "DualPipe": "dualpipe",
        "ZB-H2": "zb-h2",
        "zero_bubble": "zerobubble",
        "naive": "naive",
        "1f1b": "1f1b",
    }
    assert {name: normalize_schedule(name) for name in stated} == stated


# Boxes that annotations mark.


def test_a_forward_and_a_backward_at_once_are_two_boxes(tmp_path: Path) -> None:
    trace = CpuTrace(0, 1).op("aten::mm", 0, 40).annotation("PP:0F0", 0, 10)
    trace.annotation("PP:(0F1;3B0)OVERLAP_F_B", 10, 40).annotation("PP:(0F2)OVERLAP", 41, 42)
    assert boxes(tmp_path, trace) == [
        (0, "forward", 0, 0, 10),
        (0, "forward", 1, 10, 40),
        (3, "backward", 0, 10, 40),
    ]


def test_torchs_gpipe_marks_are_boxes_of_the_ranks_own_stage(tmp_path: Path) -> None:
    trace = CpuTrace(1, 2, STAGES).op("aten::mm", 0, 40)
    trace.annotation("Forward 0", 0, 10).annotation("Backward 0", 20, 40)
    assert boxes(tmp_path, trace) == [(1, "forward", 0, 0, 10), (1, "backward", 0, 20, 40)]
    trace.groups = [("0", "mesh_tp", [0, 1])]
    assert boxes(tmp_path, trace) == []


def test_a_mark_that_a_device_shows_on_two_streams_is_one_box(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=STAGES).message("recv", 1, 0, 60).kernel("gemm", 60, 90)
    trace.gpu_annotation("PP:0F0", 60, 90)
    trace._add("PP:0F0", "gpu_user_annotation", 0, 60, tid=COMM_STREAM)
    assert boxes(tmp_path, trace) == [(0, "forward", 0, 60, 90)]


# Boxes that messages tell.


def test_on_the_first_stage_a_forward_follows_a_backward_where_autograd_ends(
    tmp_path: Path,
) -> None:
    """1F1B, three microbatches: F0 and F1, then B0 F2 B1 B2; the optimizer is no backward."""
    trace = GpuTrace(0, 2, groups=STAGES).step(1, 0, 1000)
    trace.kernel("gemm", 10, 20, launched=1).message("send", 1, 20, 25, launched=2)
    trace.kernel("gemm", 25, 35, launched=3).message("send", 1, 35, 40, launched=4)
    trace.message("recv", 1, 40, 60, launched=4.5)
    autograd(trace, 5, 8, (60, 70), (70, 80)).kernel("gemm", 80, 90, launched=9)
    trace.message("send", 1, 90, 95, launched=10).message("recv", 1, 95, 99, launched=10.5)
    autograd(trace, 11, 14, (100, 120)).message("recv", 1, 120, 130, launched=15)
    autograd(trace, 16, 19, (130, 150)).kernel("clip", 150, 155, launched=20)
    trace.annotation("Optimizer.step#AdamW.step", 21, 25).kernel("adam", 155, 170, launched=22)
    assert boxes(tmp_path, trace) == [
        (0, "forward", 0, 10, 20),
        (0, "forward", 1, 25, 35),
        (0, "backward", 0, 60, 80),
        (0, "forward", 2, 80, 90),
        (0, "backward", 1, 100, 120),
        (0, "backward", 2, 130, 150),
    ]


def test_on_the_last_stage_a_backward_begins_where_autograd_does_and_steps_count_anew(
    tmp_path: Path,
) -> None:
    trace = GpuTrace(1, 2, groups=STAGES)
    for number, t in ((1, 0), (2, 200)):
        trace.step(number, t, t + 100).message("recv", 0, t, t + 20, launched=t + 1)
        trace.kernel("gemm", t + 20, t + 30, launched=t + 2)
        trace.kernel("loss", t + 30, t + 32, launched=t + 3)
        autograd(trace, t + 4, t + 8, (t + 32, t + 60)).message("send", 0, t + 60, t + 70)
    assert boxes(tmp_path, trace) == [
        (1, "forward", 0, 20, 32),
        (1, "backward", 0, 32, 60),
        (1, "forward", 0, 220, 232),
        (1, "backward", 0, 232, 260),
    ]


def test_between_stages_each_message_ends_a_box_even_if_its_batch_names_no_peer(
    tmp_path: Path,
) -> None:
    """A cast before the gradient is sent belongs to the backward that made it."""
    groups = [("0", "mesh_pp", [0, 1, 2])]
    trace = GpuTrace(1, 3, groups=groups).step(1, 0, 200).message("recv", 0, 1, 10)
    trace.kernel("gemm", 12, 20, launched=12)
    trace.kernel("ncclDevKernel_SendRecv", 20, 40, launched=13, stream=COMM_STREAM)
    autograd(trace, 14, 16, (40, 70)).kernel("cast", 70, 72, launched=17)
    trace.message("send", 0, 72, 75, launched=18).kernel("clip", 80, 85, launched=19)
    assert boxes(tmp_path, trace) == [
        (1, "forward", 0, 12, 20),
        (1, "backward", 0, 40, 72),
    ]


def test_communication_within_the_stage_belongs_to_the_box_and_that_of_gradients_does_not(
    tmp_path: Path,
) -> None:
    groups = [("0", "mesh_pp", [0, 4]), ("1", "mesh_tp", [0, 1]), ("2", "mesh_dp", [0, 2])]
    trace = GpuTrace(0, 8, groups=groups).step(1, 0, 200).kernel("gemm", 10, 20)
    trace.all_reduce(20, 30, group="1", launched=11).message("send", 4, 30, 35)
    trace.message("recv", 4, 40, 60)
    autograd(trace, 61, 65, (65, 90)).all_reduce(90, 120, group="2", launched=64)
    assert boxes(tmp_path, trace) == [
        (0, "forward", 0, 10, 30),
        (0, "backward", 0, 65, 90),
    ]


def test_what_a_backward_launches_after_its_output_was_sent_is_the_weight_gradient(
    tmp_path: Path,
) -> None:
    groups = [("0", "mesh_pp", [0, 1, 2])]
    trace = GpuTrace(1, 3, groups=groups).step(1, 0, 200).message("recv", 0, 1, 10)
    trace.kernel("gemm", 12, 20).message("send", 2, 20, 25).message("recv", 2, 25, 40)
    autograd(trace, 41, 43, (43, 60)).message("send", 0, 60, 65)
    autograd(trace, 66, 68, (68, 80)).message("recv", 0, 90, 95)
    assert boxes(tmp_path, trace) == [
        (1, "forward", 0, 12, 20),
        (1, "backward", 0, 43, 60),
        (1, "weight", 0, 68, 80),
    ]


def test_messages_from_the_last_rank_to_the_first_are_of_several_chunks(tmp_path: Path) -> None:
    groups = [("0", "mesh_pp", [0, 1, 2])]
    trace = GpuTrace(0, 3, groups=groups).kernel("gemm", 0, 10).message("send", 1, 10, 15)
    trace.message("recv", 2, 15, 20).kernel("gemm", 20, 30).message("send", 1, 30, 35)
    autograd(trace.message("recv", 1, 35, 40), 41, 43, (43, 50)).message("send", 2, 50, 55)
    autograd(trace.message("recv", 1, 55, 60), 61, 63, (63, 70))
    assert boxes(tmp_path, trace) == [
        (0, "forward", 0, 0, 10),
        (3, "forward", 0, 20, 30),
        (3, "backward", 0, 43, 50),
        (0, "backward", 0, 63, 70),
    ]


def test_the_optimizer_between_two_steps_that_nothing_marks_is_in_no_box(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=STAGES)
    for t in (0, 100):
        trace.kernel("gemm", t, t + 10).message("send", 1, t + 10, t + 15)
        trace.message("recv", 1, t + 15, t + 30)
        autograd(trace, t + 31, t + 33, (t + 33, t + 50)).kernel("adam", t + 60, t + 90)
        trace.annotation("Optimizer.step#AdamW.step", t + 55, t + 95)
    assert boxes(tmp_path, trace) == [
        (0, "forward", 0, 0, 10),
        (0, "backward", 0, 33, 50),
        (0, "forward", 1, 100, 110),
        (0, "backward", 1, 133, 150),
    ]


@pytest.mark.parametrize("update", ["clip", "multi_tensor_adam"])
def test_without_autograds_ranges_the_update_of_the_weights_is_in_no_box(
    tmp_path: Path, update: str
) -> None:
    """Only the kernels tell: no other backward has them."""
    groups = [("0", "mesh_pp", [0, 2]), ("1", "mesh_dp", [0, 1])]
    trace = GpuTrace(0, 4, groups=groups).step(1, 0, 200)
    for t in (0, 20):
        trace.kernel("gemm", t, t + 10).message("send", 2, t + 10, t + 15)
    for t in (40, 60):
        trace.message("recv", 2, t, t + 5).kernel("dgrad", t + 5, t + 15)
        trace.kernel("wgrad", t + 15, t + 20)
    trace.kernel(update, 80, 90).all_reduce(90, 100, group="1").kernel(update, 100, 120)
    assert boxes(tmp_path, trace) == [
        (0, "forward", 0, 0, 10),
        (0, "forward", 1, 20, 30),
        (0, "backward", 0, 45, 60),
        (0, "backward", 1, 65, 80),
    ]


def test_gradients_that_megatron_reduces_over_context_ranks_too_end_the_last_backward(
    tmp_path: Path,
) -> None:
    """One microbatch: no other backward tells what belongs to one."""
    groups = [
        ("0", "PIPELINE_MODEL_PARALLEL_GROUP", [0, 4]),
        ("1", "DATA_PARALLEL_GROUP_WITH_CP", [0, 1, 2, 3]),
        ("2", "CONTEXT_PARALLEL_GROUP", [0, 1]),
        ("3", "DATA_PARALLEL_GROUP", [0, 2]),
    ]
    trace = GpuTrace(0, 8, groups=groups).step(1, 0, 300).kernel("gemm", 0, 10)
    trace.message("send", 4, 10, 15).message("recv", 4, 40, 45).kernel("dgrad", 45, 55)
    trace.kernel("wgrad", 55, 60).all_reduce(90, 100, group="1").kernel("copy_back", 100, 180)
    assert boxes(tmp_path, trace) == [(0, "forward", 0, 0, 10), (0, "backward", 0, 45, 60)]


def test_the_end_of_a_backward_that_began_before_the_trace_is_no_box(tmp_path: Path) -> None:
    trace = autograd(GpuTrace(0, 2, groups=STAGES), 0, 2, (2, 9)).kernel("gemm", 10, 20)
    trace.message("send", 1, 20, 25).message("recv", 1, 25, 40)
    assert boxes(tmp_path, autograd(trace, 41, 43, (43, 60))) == [
        (0, "forward", 0, 10, 20),
        (0, "backward", 0, 43, 60),
    ]


def test_a_rank_that_launched_nothing_has_no_boxes(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2, groups=STAGES).message("send", 1, 10, 15)
    assert boxes(tmp_path, trace) == []


def test_a_rank_outside_of_any_pipeline_has_no_boxes(tmp_path: Path) -> None:
    """The same events make two boxes where the ranks are stages."""
    for name, count in (("mesh_pp", 2), ("mesh_tp", 0)):
        trace = GpuTrace(0, 2, groups=[("0", name, [0, 1])]).kernel("gemm", 10, 20)
        trace.message("send", 1, 20, 25).message("recv", 1, 25, 40)
        assert len(boxes(tmp_path, autograd(trace, 41, 43, (43, 60)))) == count


@pytest.mark.parametrize("name", ["pp2_m2", "pp2_m8", "tp2_pp2", "tp2_pp2_dp2"])
def test_in_real_recordings_messages_give_the_boxes_that_annotations_mark(
    name: str, tmp_path: Path
) -> None:
    """In the same order, most edges within 0.4 ms of boxes that last 12 to 70 ms."""
    for file in (SAMPLES / name).iterdir():
        if file.name.endswith("_trace.json.gz"):
            text = gzip.decompress(file.read_bytes())
            unmarked, marks = MARK.subn(b"unmarked", text)
            assert marks
            (tmp_path / file.name).write_bytes(gzip.compress(unmarked, 1))
        else:
            shutil.copy(file, tmp_path)
    marked, inferred = boxes_of(SAMPLES / name), boxes_of(tmp_path)
    assert [(rank, *box[:3]) for rank, box in inferred] == [
        (rank, *box[:3]) for rank, box in marked
    ]
    apart = [
        abs(one - other)
        for (_, own), (_, known) in zip(inferred, marked, strict=True)
        for one, other in zip(own[3:], known[3:], strict=True)
    ]
    assert quantiles(apart, n=10)[7] < 400


# The report.


def test_the_report_names_the_schedule_of_all_stages_and_its_ideal(tmp_path: Path) -> None:
    """ZB-H1 on two ranks; F, I and W take 10 us each: of 100 us one forward is bubble."""
    orders = ("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2")
    for rank, (words, lead) in enumerate(zip(orders, (0, 10), strict=True)):
        trace = CpuTrace(rank, 2, STAGES).step(1, 0, 100).op("aten::mm", lead, lead + 90)
        for n, word in enumerate(words.split()):
            trace.annotation(f"PP:{word}", lead + 10 * n, lead + 10 * n + 10)
        trace.write(tmp_path)
    found = analyze(tmp_path).pipeline
    assert found is not None
    assert (found.schedule, found.microbatches) == ("zb-h1", 3)
    assert (found.bubble_fraction, found.ideal_bubble_fraction) == (0.1, 0.1)

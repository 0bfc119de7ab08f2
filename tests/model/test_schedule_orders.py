"""Schedules: the order of each pipeline rank's passes and the model stages of its chunks."""

from __future__ import annotations

from itertools import product

import pytest
from simulator.schedules import SCHEDULES as SIMULATED, actions

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule import Pass, build_orders, list_chunk_positions
from stepsplit.analyzer.model.schedule_names import SCHEDULES, TWO_STAGES, Schedule


def written(schedule: Schedule, stages: int, microbatches: int, chunks: int = 1) -> list[str]:
    """Each rank's order in words such as F3 or, in chunk 1, F3'; & overlaps two passes."""
    return [
        " ".join(f"{o.kind}{o.microbatch}{chr(39) * o.chunk}{'&' * o.joined}" for o in order)
        for order in build_orders(schedule, stages, microbatches, chunks)
    ]


def test_naive_takes_one_microbatch_forth_and_back_before_the_next() -> None:
    assert written("naive", 2, 2) == ["F0 B0 F1 B1", "F0 B0 F1 B1"]


def test_gpipe_does_all_forwards_first() -> None:
    assert written("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]


def test_1f1b_warms_up_with_as_many_forwards_as_ranks_follow() -> None:
    assert written("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_microbatches_than_ranks_is_all_warm_up_on_the_first() -> None:
    assert written("1f1b", 4, 2)[0] == "F0 F1 B0 B1"


def test_interleaved_walks_groups_of_as_many_microbatches_as_ranks_through_the_chunks() -> None:
    assert written("interleaved", 2, 4, chunks=2) == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]


def test_interleaved_makes_larger_groups_where_pp_does_not_divide_the_microbatches() -> None:
    """Three of them on two ranks: one round of three, as torch.distributed.pipelining does it."""
    assert written("interleaved", 2, 3, chunks=2)[1] == "F0 F1 F2 F0' B0' F1' B1' F2' B2' B0 B1 B2"


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert build_orders("interleaved", 4, 8, 1) == build_orders("1f1b", 4, 8)


def test_zb_h2_runs_further_ahead_than_zb_h1_and_delays_weight_gradients_longer() -> None:
    assert written("zb-h1", 2, 3) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert written("zb-h2", 2, 3) == ["F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 I0 F1 I1 F2 I2 W0 W1 W2"]


def test_dualpipe_overlaps_a_forward_with_a_backward_of_the_other_direction() -> None:
    assert written("dualpipe", 2, 4) == [
        "F0 F2' F1 B2' F3'& B0 B3' I1 W1",
        "F2' F0 F3' B0 F1& B2' B1 I3' W3'",
    ]


def test_a_pipeline_of_one_rank_takes_each_microbatch_through_all_its_chunks() -> None:
    assert written("interleaved", 1, 2, chunks=2) == ["F0 F0' B0' B0 F1 F1' B1' B1"]


def test_chunks_lie_every_p_stages_or_in_a_v_or_in_two_copies_of_the_model() -> None:
    assert list_chunk_positions("interleaved", 2, 3) == ((0, 2, 4), (1, 3, 5))
    assert (
        list_chunk_positions("zb-v", 3)
        == list_chunk_positions("dualpipe-v", 3)
        == ((0, 5), (1, 4), (2, 3))
    )
    assert list_chunk_positions("dualpipe", 4) == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert list_chunk_positions("1f1b", 3) == ((0,), (1,), (2,))


@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one in SIMULATED])
def test_the_simulator_of_traces_writes_the_same_orders(schedule: Schedule) -> None:
    for p, rounds in product((2, 4, 6), (2, 3, 5)):
        chunks = 3 if schedule == "interleaved" else 1
        held = list_chunk_positions(schedule, p, chunks)
        for rank, simulated in enumerate(actions(schedule, p, rounds * p, chunks)):
            mine = build_orders(schedule, p, rounds * p, chunks)[rank]
            assert [(o.kind, held[rank][o.chunk], o.microbatch) for o in mine] == [
                (a.kind, a.stage % p if schedule == "dualpipe" else a.stage, a.microbatch)
                for a in simulated
            ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_chunk_does_every_microbatch_forth_and_back_once(schedule: Schedule) -> None:
    p, m = 4, 8
    chunks = 2 if schedule in TWO_STAGES or schedule == "interleaved" else 1
    for order in build_orders(schedule, p, m, chunks):
        forwards = sorted((o.chunk, o.microbatch) for o in order if o.kind == "F")
        inputs = sorted((o.chunk, o.microbatch) for o in order if o.kind == "I")
        weights = sorted((o.chunk, o.microbatch) for o in order if o.kind == "W")
        backwards = sorted((o.chunk, o.microbatch) for o in order if o.kind == "B")
        assert inputs == weights
        assert forwards == sorted(inputs + backwards)
        assert len(forwards) == len(set(forwards)) == (m if schedule == "dualpipe" else chunks * m)


@pytest.mark.parametrize(
    ("schedule", "sizes", "line"),
    [
        ("dualpipe", (4, 6, 1), "dualpipe needs at least 2 pp = 8 microbatches, not 6"),
        (
            "dualpipe",
            (3, 8, 1),
            "dualpipe needs an even pp and number of microbatches, not 3 and 8",
        ),
        ("1f1b", (4, 8, 2), "1f1b has 1 chunk per rank, not 2; use interleaved"),
        ("1f1b", (4, 0, 1), "4 stages, 0 microbatches, 1 chunks: all must be 1 or more"),
        (
            "interleaved",
            (4, 9, 2),
            "interleaved: can't split 9 microbatches into 9 // 4 = 2 equal rounds; "
            "use 8 or 12 microbatches, a multiple of pp = 4",
        ),
    ],
)
def test_invalid_sizes_are_rejected_with_the_arithmetic(
    schedule: Schedule, sizes: tuple[int, int, int], line: str
) -> None:
    with pytest.raises(UsageError) as refused:
        build_orders(schedule, *sizes)
    assert str(refused.value) == line


def test_ranks_share_their_passes() -> None:
    first, second = build_orders("gpipe", 2, 2)
    assert first == second == (Pass("F", 0), Pass("F", 1), Pass("B", 0), Pass("B", 1))

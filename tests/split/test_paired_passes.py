"""Passes of two ranks that batch their messages, by what autograd says of their launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from simulator.schedules import Order, actions
from support.builders import CpuTrace
from support.required import shared_repro
from support.splitting import recording_of, split_of

from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors import Mesh, RunSpec

NODE = "autograd::engine::evaluate_function: MmBackward0"


def run(
    folder: Path, orders: Sequence[Order], firsts: tuple[int, ...], *, numbers: bool = True
) -> RunSplit:
    """Two ranks that do these actions, each with one op, the same in all of them. As in DualPipe,
    what one sends goes with what it receives for its next action, in one batch; a forward and a
    backward in opposite directions are one action.

    firsts: the stages that receive no output; numbers: autograd's are recorded.
    """
    rank_of = {one.stage: rank for rank, order in enumerate(orders) for one in order}
    traces = [CpuTrace(rank, 2, [("0", "default_pg", [0, 1])]) for rank in (0, 1)]
    left = [group_actions(order, len(firsts) > 1) for order in orders]
    free, waits = [10, 10], [False, False]
    unsent: list[list[tuple[bool, int, int]]] = [[], []]
    sent = set[tuple[bool, int, int]]()

    def find_source(backward: bool, stage: int) -> int | None:
        """The stage whose output or gradient is needed, if another rank has it."""
        source = stage + (1 if backward else -1)
        first = source if backward else stage
        return None if first in firsts or rank_of.get(source) == rank_of[stage] else source

    while any(left):
        before = [len(one) for one in left], [*waits]
        for rank, trace in enumerate(traces):
            if not left[rank]:
                continue
            needs = [
                (one.kind != "F", source, one.microbatch)
                for one in left[rank][0]
                if one.kind != "W"
                and (source := find_source(one.kind != "F", one.stage)) in rank_of
            ]
            if not waits[rank]:
                for _ in unsent[rank]:
                    trace.message("send", 1 - rank, free[rank], free[rank] + 2)
                sent.update(unsent[rank])
                unsent[rank], waits[rank] = [], True
            if not sent.issuperset(needs):
                continue
            begin = free[rank] if not needs else max(free) + 4
            for _ in needs:
                trace.message("recv", 1 - rank, free[rank] + 1, begin - 1)
            free[rank], waits[rank] = begin, False
            for one in left[rank].pop(0):
                at, backward = free[rank] + 2, one.kind != "F"
                number = {"Sequence number": 100 * one.stage + one.microbatch} if numbers else {}
                if one.kind in "BI":
                    trace.op(NODE, at, at + 10, **number)
                trace.op("aten::mm", at, at + 10, **({} if backward else number))
                to = one.stage + (-1 if backward else 1)
                if one.kind != "W" and to in rank_of and find_source(backward, to) == one.stage:
                    unsent[rank].append((backward, one.stage, one.microbatch))
                free[rank] = at + 12
        assert before != ([len(one) for one in left], waits), "deadlock"
    for trace in traces:
        trace.step(1, 0, max(free) + 10).write(folder)
    return split_of(recording_of(folder), RunSpec("run", 2, "gloo", mesh=Mesh.of({"pp": 2})))


def group_actions(order: Order, both_ways: bool) -> list[Order]:
    """The actions that are done at once; after the last one what it sends leaves."""
    groups: list[Order] = []
    for one in order:
        opposite = both_ways and groups and groups[-1][0].kind == "F" and one.kind != "F"
        if opposite and len(groups[-1]) == 1:
            groups[-1] += (one,)
        else:
            groups.append((one,))
    return [*groups, ()]


def list_passes(split: RunSplit, rank: int, step: int = 0) -> str:
    """As in 0F3: stage, phase, microbatch."""
    slots = split.ranks[rank].grids[step].slots
    return " ".join(f"{one.stage}{one.phase[0].upper()}{one.microbatch}" for one in slots)


def write(order: Order) -> str:
    """The same of what a rank was to do, without its weight gradients outside of autograd."""
    return " ".join(
        f"{one.stage}{one.kind.replace('I', 'B')}{one.microbatch}"
        for one in order
        if one.kind != "W"
    )


@pytest.mark.parametrize("microbatches", [4, 6, 8, 16])
def test_passes_whose_outputs_and_gradients_leave_at_once_are_known_by_their_autograd_nodes(
    microbatches: int, tmp_path: Path
) -> None:
    orders = actions("dualpipe", 2, microbatches)
    split = run(tmp_path, orders, (0, 2))
    assert [list_passes(split, rank) for rank in (0, 1)] == [write(one) for one in orders]
    assert split.schedule is not None
    assert (split.schedule.name, split.schedule.microbatches) == ("dualpipe", microbatches)


def test_a_recorded_job_of_dualpipe_passes_its_microbatches_in_dualpipes_order() -> None:
    split = split_of(recording_of(shared_repro("users3/dualpipe_cp") / "rec2"))
    for step in range(5):
        found = [list_passes(split, rank, step) for rank in (0, 1)]
        assert found == [write(one) for one in actions("dualpipe", 2, 8)]


def test_without_the_numbers_of_autograd_the_passes_are_unknown(tmp_path: Path) -> None:
    split = run(tmp_path, actions("dualpipe", 2, 8), (0, 2), numbers=False)
    assert split.schedule is None
    assert "no_grid" in {note.code for note in split.notes}


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1),
     ("dualpipe-v", 1)],
)  # fmt: skip
@pytest.mark.parametrize("microbatches", [4, 8])
def test_no_schedule_of_one_model_is_taken_for_dualpipe(
    schedule: str, chunks: int, microbatches: int, tmp_path: Path
) -> None:
    split = run(tmp_path, actions(schedule, 2, microbatches, chunks), (0,))
    assert split.schedule is None or split.schedule.name != "dualpipe"

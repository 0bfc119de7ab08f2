"""Bottlenecks on the host: their cause, their gain, and their place in the user's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import BASE_NS, CpuTrace, GpuTrace

from stepsplit.analyzer import Finding, analyze
from stepsplit.collectors.formats.rank_record import (
    CodeFrame,
    GcPause,
    HostSamples,
    MemoryState,
    RankRecord,
    StepTimes,
    write_record,
)
from stepsplit.collectors.formats.run_spec import RankInfo

DP = [("0", "mesh_dp_replicate", [0, 1])]
LOADER = "enumerate(DataLoader)#_{}ProcessDataLoaderIter.__next__"


def record(folder: Path, rank: int, host: HostSamples, memory: MemoryState | None = None) -> None:
    place = RankInfo(rank, rank, "host0", 1, "cpu")
    write_record(folder, RankRecord("job", place, 2, "gloo", host=host, memory=memory))


def look(times_us: Sequence[float], *frames: CodeFrame) -> HostSamples:
    """Looks at these times that all found the same place."""
    at_ns = tuple(BASE_NS + round(at * 1000) for at in times_us)
    return HostSamples((frames,), at_ns, (0,) * len(at_ns))


def late_pair(folder: Path, activity: str = "") -> None:
    """Two ranks, three steps of 1000 us: rank 1 is idle from 100 to 700, then works for 200; rank 0
    waits for it from 300. All of rank 1's idle time is in that activity, if any."""
    for rank, begin in ((0, 100), (1, 700)):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 100)
            if activity and rank:
                trace.op(activity, at + 100, at + 700)
            trace.op("aten::mm", at + begin, at + begin + 200)
            trace.all_reduce(at + begin + 200, at + begin + 200, at + 950, group="0", seq=step,
                             tid=7)  # fmt: skip
            trace.annotation("wait", at + begin + 201, at + 950)
            trace.op("aten::mm", at + 950, at + 1000)
        trace.write(folder)


def first(folder: Path) -> Finding:
    return analyze(folder).findings[0]


def test_a_late_host_is_named_with_its_place_in_the_user_s_code(tmp_path: Path) -> None:
    """Looks outside of the idle time, and those of the other rank, do not count."""
    late_pair(tmp_path)
    sleeping = [1000 * step + at for step in range(3) for at in (150, 300, 450, 600)]
    samples = HostSamples(
        places=((CodeFrame("get_batch", "train.py", 93),), (CodeFrame("main", "train.py", 12),)),
        at_unix_ns=tuple(BASE_NS + 1000 * at for at in (*sleeping, *range(720, 880))),
        place=(*(0 for _ in sleeping), *(1 for _ in range(720, 880))),
    )
    record(tmp_path, 1, samples)
    record(tmp_path, 0, look(range(300, 900), CodeFrame("step", "optimizer.py", 5)))
    found = first(tmp_path)
    assert (found.code, found.ranks, found.gain_ns) == ("host_stall", (1,), 600_000)
    assert found.message == (
        "rank 1 is host-bound: its idle time exceeds that of its peers by 60.0 % of the step; "
        "100.0 % of it is Python code between ops, mostly at train.py:93 in get_batch"
    )


def test_a_rank_that_is_late_in_one_step_is_so_named(tmp_path: Path) -> None:
    """900 of 5,000 us, in the second step. Looks in the other steps say nothing of its place."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(5):
            at, late = 1000 * step + 900 * (step > 1), 900 * (step == 1)
            trace.step(step, at, at + 1000 + late).op("aten::mm", at, at + 100)
            begin = at + 100 + late * rank
            trace.op("aten::mm", begin, begin + 700)
            end = at + 900 + late
            trace.all_reduce(begin + 700, begin + 700, end, group="0", seq=step, tid=7)
            trace.annotation("wait", begin + 701, end).op("aten::mm", end, end + 100)
        trace.write(tmp_path)
    early = [1000 * step + 900 * (step > 1) + 850 for step in (0, 2, 3, 4)]
    record(tmp_path, 1, look([1500, *early, *early], CodeFrame("main", "train.py", 12)))
    report = analyze(tmp_path)
    found = report.findings[0]
    assert (found.code, found.ranks, found.gain_ns, found.steps) == (
        "host_stall", (1,), 180_000, (1,)
    )  # fmt: skip
    assert (found.measured_ns, found.predicted_ns) == (180_000, 0)
    assert found.message == (
        "rank 1 is host-bound: its idle time exceeds that of its peers by 15.3 % of the step; "
        "100.0 % of it is Python code between ops; nearly all of it in step 1"
    )
    assert (report.blame[0].rank, report.blame[0].cause) == (1, "host")


@pytest.mark.parametrize(
    ("late_us", "ending"),
    [
        ({1: 900, 3: 800}, "; nearly all of it in steps 1, 3"),
        ({1: 900, 3: 800, 5: 850}, "; nearly all of it in steps 1, 3, 5"),
        # Four of six.
        ({1: 900, 2: 800, 3: 900, 4: 800}, ""),
        ({0: 300, 1: 300, 2: 300, 3: 300, 4: 300, 5: 300}, ""),
    ],
)
def test_the_steps_in_which_a_host_is_late_are_named_if_they_are_few(
    late_us: dict[int, int], ending: str, tmp_path: Path
) -> None:
    for rank in (0, 1):
        trace, at = CpuTrace(rank, 2, groups=DP), 0
        for step in range(6):
            late = late_us.get(step, 0)
            trace.step(step, at, at + 1000 + late).op("aten::mm", at, at + 100)
            begin = at + 100 + late * rank
            trace.op("aten::mm", begin, begin + 700)
            end = at + 900 + late
            trace.all_reduce(begin + 700, begin + 700, end, group="0", seq=step, tid=7)
            trace.annotation("wait", begin + 701, end).op("aten::mm", end, end + 100)
            at += 1000 + late
        trace.write(tmp_path)
    found = analyze(tmp_path).findings[0]
    assert (found.code, found.ranks) == ("host_stall", (1,))
    assert found.gain_ns == pytest.approx(1000 * sum(late_us.values()) / 6, rel=0.01)
    assert found.message.endswith(f"100.0 % of it is Python code between ops{ending}")


def test_a_place_in_a_library_is_named_with_its_caller(tmp_path: Path) -> None:
    late_pair(tmp_path)
    inner = CodeFrame("Trainer._prepare_inputs", "transformers/trainer.py", 2500)
    record(tmp_path, 1, look(range(150, 650, 50), inner, CodeFrame("main", "train.py", 88)))
    assert first(tmp_path).message.endswith(
        ", mostly at transformers/trainer.py:2500 in Trainer._prepare_inputs, called from "
        "train.py:88 in main"
    )


def test_no_place_is_named_if_looks_are_few_or_scattered(tmp_path: Path) -> None:
    late_pair(tmp_path)
    at_ns = tuple(BASE_NS + 1000 * at for at in range(150, 650, 50))
    places = tuple((CodeFrame(f"f{i}", "train.py", i),) for i in range(10))
    record(tmp_path, 1, HostSamples(places, at_ns, tuple(range(10))))
    assert first(tmp_path).message.endswith("Python code between ops")
    record(tmp_path, 1, look((200, 300, 400), CodeFrame("f", "train.py", 1)))
    assert first(tmp_path).message.endswith("Python code between ops")


def test_python_functions_in_the_trace_name_the_place_too(tmp_path: Path) -> None:
    """with_stack=True: the innermost function of the user's code, below those of libraries."""
    trace = GpuTrace(0, 1)
    for step in range(3):
        at = 2000 * step
        trace.step(step, at, at + 2000).op("aten::mm", at, at + 1)
        trace.kernel("gemm", at, at + 500, launched=at)
        trace.python("/home/me/train.py(12): main", at, at + 1990)
        trace.python("data.py(93): get_batch", at + 300, at + 1400)
        trace.python("torch/utils/_python_dispatch.py(7): f", at + 350, at + 1390)
        trace.python("threading.py(300): wait", at + 400, at + 1380)
        trace.python("<built-in function sleep>", at + 410, at + 1370)
        trace.op("aten::mm", at + 1400, at + 1401).kernel("gemm", at + 1400, at + 2000)
    trace.write(tmp_path)
    (found,) = analyze(tmp_path).findings
    assert (found.code, found.gain_ns) == ("host_bound", 900_000)
    assert found.message.endswith(", mostly at data.py:93 in get_batch")


def test_a_wait_for_the_data_loader_is_a_finding_of_its_own(tmp_path: Path) -> None:
    """Without it rank 1 is as early as rank 0: both gain the 600 that rank 0 waits for it."""
    late_pair(tmp_path, LOADER.format("Single"))
    record(tmp_path, 1, look(range(150, 650, 50), CodeFrame("Texts.__getitem__", "data.py", 7)))
    (found,) = analyze(tmp_path).findings
    assert (found.code, found.ranks, found.gain_ns) == ("data_loading", (1,), 600_000)
    assert (found.measured_ns, found.predicted_ns, found.steps) == (600_000, 0, (0, 1, 2))
    assert found.message == (
        "rank 1 waits for its data loader 60.0 % of the step; it loads in the training process "
        "(num_workers=0), mostly at data.py:7 in Texts.__getitem__"
    )


def test_the_rest_of_a_late_host_is_separate_from_its_loader(tmp_path: Path) -> None:
    """Rank 1 waits 300 for its loader, then 300 in Python. Either one alone gains 300."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 100)
            begin = at + (700 if rank else 100)
            if rank:
                trace.op(LOADER.format("Multi"), at + 100, at + 400)
            trace.op("aten::mm", begin, begin + 200)
            trace.all_reduce(begin + 200, begin + 200, at + 950, group="0", seq=step, tid=7)
            trace.annotation("wait", begin + 201, at + 950).op("aten::mm", at + 950, at + 1000)
        trace.write(tmp_path)
    loads, stalls = analyze(tmp_path).findings
    assert (loads.code, loads.ranks, loads.gain_ns) == ("data_loading", (1,), 300_000)
    assert loads.message == "rank 1 waits for its data loader 30.0 % of the step"
    assert (stalls.code, stalls.ranks, stalls.gain_ns) == ("host_stall", (1,), 300_000)


@pytest.mark.parametrize(
    ("short", "who", "named"),
    [
        (300, "every rank waits for its data loader 45.0 % of the step", ()),
        (
            50,
            "rank 1 waits for its data loader 60.0 % of the step (the others at most 5.0 %)",
            (1,),
        ),
    ],
)
def test_a_loader_that_is_slow_on_one_rank_is_not_that_of_every_rank(
    short: float, who: str, named: tuple[int, ...], tmp_path: Path
) -> None:
    """Rank 1 waits 600 of 1000 for its loader, rank 0 less."""
    for rank, wait in ((0, short), (1, 600)):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 100)
            begin = at + 100 + wait
            trace.op(LOADER.format("Multi"), at + 100, begin)
            trace.op("aten::mm", begin, begin + 200)
            trace.all_reduce(begin + 200, begin + 200, at + 950, group="0", seq=step, tid=7)
            trace.annotation("wait", begin + 201, at + 950).op("aten::mm", at + 950, at + 1000)
        trace.write(tmp_path)
    (found,) = [one for one in analyze(tmp_path).findings if one.code == "data_loading"]
    assert (found.message, found.ranks) == (who, named)


def test_the_evidence_of_a_wait_is_of_the_ranks_that_the_finding_names(tmp_path: Path) -> None:
    """Rank 0 waits 40 in each step; rank 1 waits longer, 200, in one: too little to be named."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, groups=DP)
        for step in range(40):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 100)
            begin = at + 100 + (40 if rank == 0 else 200 if step == 20 else 0)
            if begin > at + 100:
                trace.op(LOADER.format("Multi"), at + 100, begin)
            end = begin + 600
            trace.op("aten::mm", begin, end).all_reduce(
                end, end, at + 950, group="0", seq=step, tid=7
            )
            trace.annotation("wait", end + 1, at + 950).op("aten::mm", at + 950, at + 1000)
        trace.write(tmp_path)
    (found,) = (one for one in analyze(tmp_path).findings if one.code == "data_loading")
    assert found.ranks == (0,)
    assert {event.rank for event in found.events} == {0}


def test_a_wait_for_the_loader_counts_while_communication_runs_as_well(tmp_path: Path) -> None:
    """Rank 1 waits from 100 to 700, and until 400 an all_reduce of both runs: 300 are idle time.
    Without the wait the second all_reduce begins behind the first, at 400 instead of 900."""
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 5)
            trace.kernel("gemm", at, at + 100, launched=at + 1)
            trace.all_reduce(at + 100, at + 400, launched=at + 2)
            if rank:
                trace.op(LOADER.format("Multi"), at + 10, at + 700)
            begin, launched = (700, at + 700) if rank else (100, at + 3)
            trace.kernel("gemm", at + begin, at + begin + 200, launched=launched)
            trace.all_reduce(at + max(begin + 200, 400), at + 950, launched=launched)
            trace.kernel("adam", at + 950, at + 1000, launched=launched)
        trace.write(tmp_path)
    (found,) = analyze(tmp_path).findings
    assert (found.code, found.ranks, found.measured_ns) == ("data_loading", (1,), 300_000)
    assert found.gain_ns == 500_000


def test_garbage_collection_is_a_finding_with_its_longest_pause(tmp_path: Path) -> None:
    """A pause of 500 in one of three steps, inside of rank 1's idle time."""
    late_pair(tmp_path)
    pause = GcPause(BASE_NS + 1_150_000, 500_000, 2)
    record(tmp_path, 1, HostSamples(gc_pauses=(pause,)))
    stall, collect = analyze(tmp_path).findings
    assert (collect.code, collect.ranks, collect.steps) == ("gc_pause", (1,), (1,))
    assert collect.gain_ns == 166_667
    assert collect.message == (
        "Python's garbage collector stops rank 1 for 16.7 % of the step (up to 0.50 ms at once, "
        "generation 2); gc.freeze() after the setup shortens it; nearly all of it in step 1"
    )
    assert (stall.code, stall.gain_ns) == ("host_stall", 433_333), "the rest of the 600"


def synchronizing(folder: Path, *, rank_1: bool) -> None:
    """Steps of 1000 us: the host reads a value back, which ends with the gemm at 400, and launches
    the next work at 700; rank 1 does if rank_1, else it launches in time and waits for rank 0."""
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=DP)
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 1000).op("aten::mm", at, at + 5)
            trace.kernel("gemm", at, at + 400, launched=at + 1)
            late = not rank or rank_1
            if late:
                trace.op("aten::item", at + 10, at + 405)
                trace.call("cudaStreamSynchronize", at + 11, at + 404)
            begin = at + (700 if late else 400)
            trace.op("aten::mm", begin - 10, begin)
            trace.kernel("gemm", begin, begin + 200, launched=begin - 5 if late else at + 20)
            trace.all_reduce(begin + 200, at + 950, launched=begin if late else at + 30)
            trace.kernel("adam", at + 950, at + 1000, launched=begin + 1 if late else at + 40)
        trace.write(folder)


def test_synchronizations_of_all_ranks_are_named_with_their_op(tmp_path: Path) -> None:
    synchronizing(tmp_path, rank_1=True)
    (found,) = analyze(tmp_path).findings
    assert (found.code, found.ranks) == ("host_sync", ())
    assert 290_000 <= found.gain_ns <= 300_000
    assert found.message == (
        "every rank waits for its device and launches late: GPU idle 29.5 % of the step; mostly in "
        "aten::item"
    )


def test_a_synchronization_of_one_rank_remains_a_late_host(tmp_path: Path) -> None:
    synchronizing(tmp_path, rank_1=False)
    (found,) = analyze(tmp_path).findings
    assert (found.code, found.ranks) == ("host_stall", (0,))
    assert "late launches after a synchronization in aten::item" in found.message


def test_allocations_within_steps_name_the_call_and_the_allocator_s_retries(
    tmp_path: Path,
) -> None:
    trace = GpuTrace(0, 1)
    for step in range(3):
        at = 1000 * step
        trace.step(step, at, at + 1000).op("aten::mm", at, at + 1)
        trace.kernel("gemm", at, at + 400, launched=at)
        trace.op("aten::empty", at + 10, at + 700).call("cudaFree", at + 20, at + 690)
        trace.op("aten::mm", at + 700, at + 701)
        trace.kernel("gemm", at + 700, at + 1000, launched=at + 700)
    trace.write(tmp_path)
    record(tmp_path, 0, HostSamples(), MemoryState(allocation_retries=6))
    (found,) = analyze(tmp_path).findings
    assert (found.code, found.bucket) == ("allocation", "idle")
    assert found.gain_ns == 300_000
    assert found.message == (
        "rank 0 allocates or frees memory within the step: GPU idle 30.0 % of it; mostly in "
        "aten::empty; the allocator ran full 6 times and freed its cache"
    )


def write_late_rank(folder: Path, times: StepTimes) -> Finding:
    """The host of rank 1 launches the second gemm 40 us late in each step of 100 us; times are
    those of each rank's steps without and with the profiler."""
    for rank, late in ((0, 0), (1, 40)):
        trace = GpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])])
        for step in range(1, 5):
            at = 100 * step
            trace.step(step, at, at + 100)
            trace.kernel("gemm", at, at + 20, launched=at)
            trace.kernel("gemm", at + 20 + late, at + 50 + late, launched=at + 19 + late)
            trace.all_reduce(at + 50 + late, at + 95, launched=at + 20 + late)
            trace.kernel("adam", at + 95, at + 100, launched=at + 21 + late)
        trace.write(folder)
        record = RankRecord("run", RankInfo(rank, rank, "host0", 1, "cuda:0"), 2, "nccl")
        write_record(folder, replace(record, steps=times))
    (found,) = [one for one in analyze(folder).findings if one.code == "host_stall"]
    return found


def test_the_saving_of_a_late_host_leaves_out_what_the_profiler_costs(tmp_path: Path) -> None:
    """Steps without the profiler take 80 us: 20 of the 40 us end with the recording."""
    without, beside = (80_000,) * 5, (100_000,) * 4
    (tmp_path / "slowed").mkdir()
    (tmp_path / "as fast").mkdir()

    slowed = write_late_rank(tmp_path / "slowed", StepTimes(without, beside, without))
    as_fast = write_late_rank(tmp_path / "as fast", StepTimes(beside, beside, beside))

    assert (slowed.gain_ns, as_fast.gain_ns) == (20_000, 40_000)
    assert slowed.message.endswith("; the saving leaves out 0.02 ms of the profiler's own")
    assert "the profiler" not in as_fast.message


def test_work_that_starts_late_though_it_was_launched_in_time_is_no_host_s(tmp_path: Path) -> None:
    """As where another process uses the device between the two kernels."""
    for launched, codes in ((1, set()), (85, {"host_bound"})):
        folder = tmp_path / str(launched)
        folder.mkdir()
        for rank in (0, 1):
            trace = GpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])])
            for step in range(1, 4):
                at = 100 * step
                trace.step(step, at, at + 99).kernel("gemm", at, at + 40, launched=at)
                trace.kernel("gemm", at + 90, at + 100, launched=at + launched)
            trace.write(folder)
        found = {one.code for one in analyze(folder).findings}
        assert found & {"host_bound", "host_stall"} == codes

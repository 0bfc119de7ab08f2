"""A small run as the analyzer would report it: 4 ranks (pp2 x tp2), 5 steps, 1F1B, 4 microbatches.

Every interval is laid down by hand, and the rows of the report are sums over those intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from stepsplit.analyzer import (
    BUCKETS,
    Analysis,
    AxisSize,
    BlameRow,
    Boxes,
    CollectiveRow,
    ExposedRow,
    Finding,
    GroupRow,
    Host,
    Pipeline,
    Report,
    Run,
    Segments,
    StageRow,
    StepRow,
    Tables,
    WarningRow,
)
from support.detail_builders import detail

MS = 1_000_000
STEPS = (3, 4, 5, 6, 7)
ORDERS = (
    ("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"),
    ("F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"),
)
SEND_NS = MS * 6 // 10


@dataclass(frozen=True)
class Box:
    stage: int
    phase: int
    microbatch: int
    start_ns: int
    dur_ns: int


def schedule(forward_ns: int) -> list[Box]:
    """1F1B on two stages; a backward takes twice its forward, stage 1 a little longer."""
    done: dict[tuple[int, str], Box] = {}
    clocks, queues = [0, 0], [list(order) for order in ORDERS]
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            name = queue[0]
            needs = (1 - stage, name) if (name[0] == "F") == (stage == 1) else None
            if needs and needs not in done:
                continue
            before = done[needs] if needs else None
            ready = before.start_ns + before.dur_ns + SEND_NS if before else 0
            dur = forward_ns * (1 if name[0] == "F" else 2) * (100 + 6 * stage) // 100
            box = Box(stage, int(name[0] == "B"), int(name[1]), max(clocks[stage], ready), dur)
            done[stage, name], clocks[stage] = box, box.start_ns + dur
            queue.pop(0)
    return sorted(done.values(), key=lambda box: (box.stage, box.start_ns))


def band(rank: int, boxes: Sequence[Box], end_ns: int) -> list[tuple[str, int]]:
    """The buckets of a rank from 0 to end_ns; rank 3 is slow, so rank 2 waits for it."""
    parts: list[tuple[str, int]] = []
    now = 0
    for box in boxes:
        if box.start_ns > now:
            hole = box.start_ns - now
            message = min(hole, SEND_NS)
            parts += [("bubble", hole - message), ("p2p", message)]
        parts += _inside(rank, box.dur_ns)
        now = box.start_ns + box.dur_ns
    tail = end_ns - now - 9 * MS
    parts += [("bubble", tail - 3 * MS), ("compute", 7 * MS), ("copy", 2 * MS), ("idle", 3 * MS)]
    return [(bucket, dur) for bucket, dur in parts if dur > 0]


def _inside(rank: int, dur_ns: int) -> list[tuple[str, int]]:
    collective = dur_ns // 20
    skew = dur_ns // 14 if rank == 2 else dur_ns // 200
    half = (dur_ns - 2 * collective - 2 * skew) // 2
    first = [("compute", half), ("skew", skew), ("collective", collective)]
    rest = dur_ns - half - 2 * (skew + collective)
    return [*first, ("compute", rest), ("skew", skew), ("collective", collective)]


def report_and_tables() -> tuple[Report, Tables]:
    """The report of the run and its tables, as a store imports them."""
    made = analysis()
    return made.report, made.tables


def analysis(paths: Sequence[Path] = ()) -> Analysis:
    """The whole run: what an analysis of the paths would yield."""
    rows, segments, boxes = [], [], []
    start = 0
    for step in STEPS:
        placed = schedule((80 + (step * 7) % 5) * MS // 10)
        end = max(box.start_ns + box.dur_ns for box in placed) + 14 * MS
        for rank in range(4):
            own = [box for box in placed if box.stage == rank // 2]
            parts = band(rank, own, end)
            rows.append(_row(rank, step, start, parts))
            at = start
            for bucket, dur in parts:
                segments.append((rank, step, BUCKETS.index(bucket), at, dur))
                at += dur
            boxes += [
                (rank, step, b.stage, b.microbatch, b.phase, start + b.start_ns, b.dur_ns)
                for b in own
            ]
        start += end
    return Analysis(_report(rows), Tables(_columns(Segments, segments), _columns(Boxes, boxes)))


def _row(rank: int, step: int, start: int, parts: list[tuple[str, int]]) -> StepRow:
    sums = {f"{name}_ns": sum(dur for b, dur in parts if b == name) for name in BUCKETS}
    kind = "partial" if step == STEPS[0] else "full"
    memos = {"overlapped_ns": 4 * MS, "bubble_covered_ns": 0, "fused_ns": 0}
    total = sum(sums.values())
    return StepRow(rank, step, kind, start, total, **sums, **memos, estimated=False)


def _columns(kind: type[Struct], rows: list[tuple[int, ...]]):
    start = len(rows[0]) - 2
    ordered = sorted(rows, key=lambda row: (row[0], row[start]))
    types = {"bucket": np.uint8, "phase": np.uint8, "start_ns": np.int64, "dur_ns": np.int64}
    names = kind.__struct_fields__
    columns = zip(*ordered, strict=True)
    return kind(*(np.array(c, types.get(n, np.int32)) for n, c in zip(names, columns, strict=True)))


def _report(rows: list[StepRow]) -> Report:
    hosts = (Host("node01", (0, 1)), Host("node02", (2, 3)))
    mesh = (AxisSize("pp", 2), AxisSize("tp", 2))
    run = Run(
        "gpt-pp2-tp2",
        4,
        (0, 1, 2, 3),
        hosts,
        "nccl",
        "NVIDIA H100",
        mesh,
        "run.json",
        "2.13.0",
        "2.30.7",
        "1790000000000000000",
        0.03,
    )
    tp = [
        ExposedRow(r.rank, r.step, "tp", p, r.collective_ns * w // 3, 0, r.skew_ns * w // 3, 0)
        for r in rows
        for p, w in (("forward", 1), ("backward", 2))
    ]
    pp = [ExposedRow(r.rank, r.step, "pp", "forward", 0, r.p2p_ns, 0, r.bubble_ns) for r in rows]
    finer = detail(rows)
    return Report(
        run=run,
        warnings=(
            WarningRow("partial_step", "step 3 began before the recording: it enters no median"),
        ),
        groups=(
            GroupRow(0, "tp", "mesh_tp", (0, 1)),
            GroupRow(1, "tp", "mesh_tp", (2, 3)),
            GroupRow(2, "pp", "mesh_pp", (0, 2)),
        ),
        steps=tuple(rows),
        exposed=tuple(tp + pp),
        collectives=(
            CollectiveRow(
                0, "all_reduce", "bfloat16", 33_554_432, 320, 410_000, 20_000, 81.8e9, 81.8e9
            ),
            CollectiveRow(
                1, "all_reduce", "bfloat16", 33_554_432, 320, 415_000, 560_000, 80.9e9, 80.9e9
            ),
            CollectiveRow(2, "send", "bfloat16", 16_777_216, 160, 600_000, 0, 28.0e9, 28.0e9),
            CollectiveRow(2, "broadcast", None, None, 4, 21_000, 0, None, None),
        ),
        blame=(
            BlameRow(None, "schedule", 0, 220 * MS, 220 * MS, "pp", STEPS[1:]),
            BlameRow(3, "slower compute", 60 * MS, 4 * MS, 64 * MS, "tp", STEPS[1:]),
            BlameRow(0, "host", 3 * MS, 0, 3 * MS, "tp", (5,)),
        ),
        pipeline=Pipeline(
            (StageRow(0, 30 * MS, 0.231), StageRow(1, 27 * MS, 0.198)), 4, "1F1B", 0.214, 0.2, 0.272
        ),
        idle=finer.idle,
        kernels=finer.kernels,
        slow_kernels=finer.slow_kernels,
        contention=finer.contention,
        overlap=finer.overlap,
        lateness=finer.lateness,
        critical_path=finer.critical_path,
        path_steps=finer.path_steps,
        step_times=finer.step_times,
        coverage=finer.coverage,
        findings=(
            Finding(
                "slow_rank",
                "skew",
                15 * MS,
                None,
                None,
                (3,),
                STEPS[1:],
                (),
                "rank 3: GEMMs 13 % slower than on its peer; tp waits for it",
            ),
        ),
        mfu=0.412,
    )


def paced(report: Report, pace: float) -> Report:
    """The report with each part of its steps that many times as long."""
    parts = [f"{bucket}_ns" for bucket in BUCKETS]
    rows = []
    for row in report.steps:
        times = {name: round(pace * getattr(row, name)) for name in parts}
        rows.append(structs.replace(row, step_ns=sum(times.values()), **times))
    return structs.replace(report, steps=tuple(rows))


def make_run_of_many_ranks() -> Report:
    """128 ranks on 16 hosts, pp 4: later stages compute longer; rank 37 and host n9 are slow."""
    hosts = tuple(Host(f"n{host}", tuple(range(8 * host, 8 * host + 8))) for host in range(16))
    mesh = (AxisSize("pp", 4), AxisSize("dp_replicate", 4), AxisSize("tp", 8))
    run = Run(
        "many", 128, tuple(range(128)), hosts, "nccl", "gpu", mesh, "run.json", None, None, "0"
    )
    steps = []
    for rank in range(128):
        more = 10 * MS if rank == 37 else 5 * MS if rank // 8 == 9 else 0
        compute, bubble = (50 + rank // 32) * MS + more, (30 - rank // 32) * MS - more
        steps.append(
            StepRow(rank, 1, "full", 0, 80 * MS, compute, 0, 0, 0, bubble, 0, 0, 0, 0, 0, False)
        )
    return Report(run=run, steps=tuple(steps))

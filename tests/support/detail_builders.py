"""The finer rows of the run in report_builders: they agree with its steps, of which they are sums.

Rank 3 is slow in its GEMMs, comes last to tp and so has most of the critical path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepsplit.analyzer import (
    ContentionRow,
    Coverage,
    IdleRow,
    KernelFamily,
    Lateness,
    Overlap,
    PathPart,
    PathStep,
    SlowKernel,
    StepDurations,
    StepRow,
)

MS = 1_000_000
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT<float, __nv_bfloat16, __nv_bfloat16, 192>"


@dataclass(frozen=True)
class Detail:
    idle: tuple[IdleRow, ...]
    kernels: tuple[KernelFamily, ...]
    slow_kernels: tuple[SlowKernel, ...]
    contention: tuple[ContentionRow, ...]
    overlap: tuple[Overlap, ...]
    lateness: tuple[Lateness, ...]
    critical_path: tuple[PathPart, ...]
    path_steps: tuple[PathStep, ...]
    step_times: tuple[StepDurations, ...]
    coverage: tuple[Coverage, ...]


def detail(rows: Sequence[StepRow]) -> Detail:
    """What an analysis would find in steps of four ranks that begin and end together."""
    full = [row for row in rows if row.kind == "full"]
    by_rank = {rank: [row for row in full if row.rank == rank] for rank in range(4)}
    lead = by_rank[0]
    return Detail(
        idle=tuple(row for rank, own in by_rank.items() for row in _idle(rank, own)),
        kernels=tuple(row for rank, own in by_rank.items() for row in _families(rank, own)),
        slow_kernels=(SlowKernel(3, GEMM, "gemm", 1.13, 7 * MS, 960),),
        contention=tuple(ContentionRow(rank, 1.06, 48, 2 * MS) for rank in by_rank),
        overlap=tuple(row for rank, own in by_rank.items() for row in _overlap(rank, own)),
        lateness=_lateness(),
        critical_path=tuple(part for row in lead for part in _path(row)),
        path_steps=tuple(
            PathStep(row.step, row.start_ns, row.start_ns + row.step_ns, 3, 6) for row in lead
        ),
        step_times=(_times(None, lead), *(_times(rank, own) for rank, own in by_rank.items())),
        coverage=(Coverage("tp", 2, 2, 0, 1280, 0), Coverage("pp", 2, 2, 0, 640, 0)),
    )


def _idle(rank: int, own: Sequence[StepRow]) -> Iterable[IdleRow]:
    total = sum(row.idle_ns for row in own)
    waited, launched = total // (2 if rank == 3 else 6), total // 4
    yield IdleRow(rank, "data_loading", "DataLoader.__next__", total - waited - launched, 4)
    yield IdleRow(rank, "launch_bound", "aten::linear", launched, 32)
    yield IdleRow(rank, "synchronize", "aten::item", waited, 8)


def _families(rank: int, own: Sequence[StepRow]) -> Iterable[KernelFamily]:
    total = sum(row.compute_ns for row in own)
    attention, elementwise = total // 5, total // 10
    gemm = total - attention - elementwise
    sums = (("gemm", 960, gemm), ("attention", 320, attention), ("elementwise", 640, elementwise))
    for family, count, part in sums:
        yield KernelFamily(rank, family, count, part, part / total)


def _overlap(rank: int, own: Sequence[StepRow]) -> Iterable[Overlap]:
    collective, hidden = (sum(getattr(row, name) for row in own) for name in _MOVED)
    yield Overlap(rank, "tp", "all_reduce", collective + hidden, hidden, collective)
    p2p = sum(row.p2p_ns for row in own)
    yield Overlap(rank, "pp", "send", p2p, 0, p2p)


_MOVED = ("collective_ns", "overlapped_ns")


def _lateness() -> tuple[Lateness, ...]:
    return (
        Lateness(0, "tp", False, 2, 320, 166, 30_000, 5 * MS, 0.54, False),
        Lateness(1, "tp", False, 2, 320, 154, 28_000, 4 * MS, 1.0, False),
        Lateness(2, "tp", False, 2, 320, 12, 9_000, 108_000, 1.0, False),
        Lateness(3, "tp", False, 2, 320, 308, 560_000, 172 * MS, 1e-76, True),
        Lateness(2, "pp", True, 2, 160, 80, 11 * MS, 880 * MS, None, False),
    )


def _path(row: StepRow) -> Iterable[PathPart]:
    total = row.step_ns
    others = (
        PathPart(row.step, 0, "compute", None, total * 18 // 100),
        PathPart(row.step, 2, "collective", "tp", total * 5 // 100),
        PathPart(row.step, 3, "collective", "tp", total * 7 // 100),
        PathPart(row.step, 2, "p2p", "pp", total * 2 // 100),
        PathPart(row.step, 0, "bubble", "pp", total // 100),
        PathPart(row.step, 0, "idle", None, row.idle_ns),
    )
    yield from others
    rest = total - sum(part.ns for part in others)
    yield PathPart(row.step, 3, "compute", None, rest)


def _times(rank: int | None, own: Sequence[StepRow]) -> StepDurations:
    took = sorted(row.step_ns for row in own)
    middle = (took[(len(took) - 1) // 2] + took[len(took) // 2]) // 2
    return StepDurations(rank, len(took), middle, took[-1], took[-1], ())

"""The recipe "a cause" of CONTRIBUTING.md: a module with an entry, and the entry in CAUSES."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import analyze
from stepsplit.analyzer.diagnose.causes import CAUSES, findings
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.replay import reduce_work

PAIR = [("0", "mesh_dp", [0, 1])]


def find_sleeping_kernels(context: CauseContext) -> Iterator[Remedy]:
    """What each rank loses to kernels that only wait."""
    graph = context.graph
    for index, rank in enumerate(context.split.ranks):
        events = rank.trace.events
        rows = np.flatnonzero(events.match_prefix("nanosleep"))
        if not len(rows):
            continue
        spent_ns = int(events.dur_ns[rows].sum())
        first = graph.timelines.slice_rank(index).start
        cut_ns = np.zeros(len(graph), dtype=np.int64)
        cut_ns[first + 1] = spent_ns
        yield replay_remedy(
            context,
            partial(reduce_work, work="compute", cut_ns=cut_ns),
            bucket="compute",
            measured_ns=spent_ns,
            predicted_ns=0,
            rows=graph.steps.rank == index,
            message=f"rank {rank.trace.rank} sleeps on its device",
            ranks=(rank.trace.rank,),
        )


SLEEPING = CauseEntry(
    "sleeping_kernels", find_sleeping_kernels, basis="measured", as_set="sleeping"
)


def sleeping_rank(rank: int, sleeps: bool) -> GpuTrace:
    """80 of compute, 40 of them asleep if it sleeps, an all_reduce of 10, and 10 of optimizer."""
    trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100)
    trace.kernel("nanosleep" if sleeps else "gemm", 0, 40).kernel("gemm", 40, 80)
    return trace.all_reduce(80, 90).kernel("adam", 90, 100)


@pytest.fixture
def _with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "CAUSES", (*CAUSES, SLEEPING))


@pytest.mark.usefixtures("_with_toy")
def test_an_entry_is_a_finding_of_every_report(tmp_path: Path) -> None:
    traces = [sleeping_rank(0, True).write(tmp_path), sleeping_rank(1, True).write(tmp_path)]
    (found,) = analyze(*traces).findings
    assert (found.code, found.bucket, found.ranks) == ("sleeping_kernels", "compute", (0, 1))
    assert (found.gain_ns, found.measured_ns, found.steps) == (40_000, 40_000, (1,))
    assert found.message == (
        "ranks 0, 1 are sleeping and mask each other (fixing one of 2 saves at most 0.00 ms): "
        "rank 0 sleeps on its device; from a single step"
    )


@pytest.mark.usefixtures("_with_toy")
def test_what_saves_nothing_is_no_finding(tmp_path: Path) -> None:
    """Rank 1 computes as long: rank 0 would only wait for it."""
    traces = [sleeping_rank(0, True).write(tmp_path), sleeping_rank(1, False).write(tmp_path)]
    assert "sleeping_kernels" not in [one.code for one in analyze(*traces).findings]


def test_on_a_cpu_the_largest_row_comes_last_and_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step of 1 ms the CPU computes for 0.4 ms, of which six causes take 0.03 ms each."""

    def find_part(context: CauseContext) -> Iterator[Remedy]:
        cut_ns = np.where(context.counted, 30_000, 0)
        yield replay_remedy(
            context, partial(reduce_work, work="compute", cut_ns=cut_ns), bucket="compute",
            measured_ns=30_000, predicted_ns=0, rows=context.counted, message="a part",
        )  # fmt: skip

    parts = [CauseEntry(f"part_{n}", find_part, basis="measured") for n in range(6)]
    trace = CpuTrace(0, 1)
    for step in range(4):
        at = 1000 * step
        trace.step(step, at, at + 1000).op("aten::mm", at, at + 400)
    trace.write(tmp_path)
    (between,) = analyze(tmp_path).findings
    assert (between.code, between.gain_ns) == ("host_bound", 600_000)
    assert between.message.endswith(
        "on a CPU most of it usually stays: an upper limit, no saving to expect"
    )

    monkeypatch.setattr(findings, "CAUSES", (*parts, *CAUSES))
    codes = [one.code for one in analyze(tmp_path).findings]

    assert codes == ["part_0", "part_1", "part_2", "part_3", "host_bound"]


def test_every_cause_has_a_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "causes.md").read_text()
    table = page.partition("## Causes\n")[2].partition("\n\n#")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = [code.strip(" `") for row in rows for code in row.split(",")]
    assert sorted(documented) == sorted(cause.code for cause in CAUSES)

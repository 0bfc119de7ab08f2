"""Calls of libraries that move the tokens of experts, annotated by the recorder."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import analyze

torch = pytest.importorskip("torch")

JOBS = Path(__file__).parent.parent / "collector_jobs"


class Group:
    group_name = "7"


class Buffer:
    """As much of deep_ep.Buffer as the recorder sees."""

    group = Group()

    def dispatch(self, x: Any, topk_idx: Any = None) -> tuple[Any, ...]:
        """Sends tokens."""
        return x, topk_idx

    def combine(self, x: Any) -> Any:
        return x

    def low_latency_dispatch(self, x: Any, *, received: Any) -> tuple[Any, ...]:
        def hook() -> Any:
            return x.add_(1)

        return received, hook


@pytest.fixture
def library() -> Iterator[type[Buffer]]:
    own = type("Buffer", (), dict(vars(Buffer)))
    sys.modules["deep_ep"] = types.ModuleType("deep_ep")
    sys.modules["deep_ep"].Buffer = own  # type: ignore[attr-defined]
    yield own
    del sys.modules["deep_ep"]


def record(run: Any) -> list[str]:
    """The recorder's ranges of what runs, in order of time."""
    from stepsplit.collectors.record.library_calls import annotate_library_calls

    with torch.profiler.profile() as profiler, annotate_library_calls():
        run()
    return [e.name for e in profiler.events() if e.name.startswith("stepsplit::")]


def test_a_range_has_the_group_and_the_tokens_that_are_passed_in(library: type[Buffer]) -> None:
    tokens, scales = torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(6, 1)
    names = record(
        lambda: (library().dispatch(tokens), library().dispatch((tokens, scales), topk_idx=1),
                 library().combine(x=tokens[:2]), library().combine(None))
    )  # fmt: skip
    start = "library=DeepEP group=7"
    assert names == [
        f"stepsplit::dispatch {start} tokens=6 bytes=48 dtype=bfloat16",
        f"stepsplit::dispatch {start} tokens=6 bytes=72 dtype=bfloat16",
        f"stepsplit::combine {start} tokens=2 bytes=16 dtype=bfloat16",
        f"stepsplit::combine {start}",
    ]


def test_the_half_that_receives_has_the_range_of_the_call(library: type[Buffer]) -> None:
    x = torch.zeros(3, 2)

    def run() -> None:
        received, hook = library().low_latency_dispatch(x, received=5)
        assert (received, hook().sum().item()) == (5, 6)

    (first, second) = record(run)
    assert (
        first
        == second
        == ("stepsplit::dispatch library=DeepEP group=7 tokens=3 bytes=24 dtype=float32")
    )


def test_the_methods_are_as_before_after_a_recording(library: type[Buffer]) -> None:
    before = dict(vars(library))
    record(lambda: library().dispatch(torch.ones(1)))
    assert dict(vars(library)) == before
    assert library.dispatch.__doc__ == "Sends tokens."


def test_without_the_library_nothing_is_imported() -> None:
    assert record(lambda: torch.ones(1)) == []
    assert "deep_ep" not in sys.modules


def test_an_error_of_the_library_is_its_own(library: type[Buffer]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        record(lambda: library().dispatch(torch.ones(1), missing=1))


EXPERTS = [("0", "default_pg", range(4)), ("5", "EXPERT_MODEL_PARALLEL_GROUP", [0, 1])]


def test_a_range_gives_kernels_without_arguments_their_group_and_size(tmp_path: Path) -> None:
    """Rank 1 is 30 us late at each dispatch; ranks 2 and 3 have a group of their own."""
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        groups = [EXPERTS[0], ("5", "EXPERT_MODEL_PARALLEL_GROUP", pair)]
        trace = GpuTrace(rank, 4, groups=groups)
        for step in (1, 2):
            at, late = 100 * step, 30 if rank == 1 else 0
            met = at + (40 if rank < 2 else 10)
            trace.step(step, at, at + 100).kernel("gemm", at, at + 10 + late)
            label = "stepsplit::dispatch library=DeepEP group=5 tokens=8 bytes=64 dtype=bfloat16"
            trace.annotation(label, at + 1, at + 5)
            for name, start, end in (
                ("notify_dispatch<2>", at + 10 + late, met + 2),
                ("dispatch<2, 768>", met + 2, met + 12),
            ):
                kernel = f"void deep_ep::intranode::{name}"
                trace.kernel(kernel, start, end, launched=at + 2, stream=20)
            trace.kernel("gemm", met + 12, at + 100)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    waits = {(row.rank, row.step): row.split.skew_ns // 1000 for row in report.steps}
    assert waits == {(r, s): 30 if r == 0 else 0 for r in range(4) for s in (1, 2)}
    rows = {row.ranks: row.id for row in report.groups if row.axis == "ep"}
    assert set(rows) == {(0, 1), (2, 3)}
    sizes = {row.message_bytes for row in report.collectives if row.group in rows.values()}
    assert sizes == {64}


@pytest.mark.slow
@pytest.mark.in_turn("collectors")
def test_a_late_rank_of_experts_is_named_in_a_recording_of_four_ranks(tmp_path: Path) -> None:
    folder, late = tmp_path / "run", 2
    command = [sys.executable, JOBS / "four_ranks.py", JOBS / "experts.py", folder, str(late)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with gzip.open(folder / "rank2_trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    ranges = [e["name"] for e in events if e.get("name", "").startswith("stepsplit::dispatch")]
    assert len(ranges) == 4 * 4
    report = analyze(folder)
    assert "ep 4 (DeepEP)" in {one.in_words for one in report.run.strategies}
    blamed: dict[int | None, int] = {}
    for row in report.blame:
        blamed[row.rank] = blamed.get(row.rank, 0) + row.caused_ns
    assert max(blamed, key=lambda rank: blamed[rank]) == late
    assert report.findings[0].ranks == (late,)

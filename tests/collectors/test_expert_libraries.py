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


class Tensor:
    """As much of nccl.ep.Tensor (nccl4py 0.3.1) as the recorder sees."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer


class Inputs:
    """nccl.ep.DispatchInputs and CombineInputs."""

    def __init__(self, tokens: Any, scales: Any = None) -> None:
        self.tokens, self.scales = Tensor(tokens), None if scales is None else Tensor(scales)


class Handle:
    """nccl.ep.Handle."""

    def dispatch(self, inputs: Inputs, outputs: Any, *, config: Any = None, stream: Any) -> None:
        del inputs, outputs, config, stream

    combine = dispatch

    def complete(self, *, config: int = 0, stream: Any) -> None:
        del config, stream


def test_calls_of_nccl_ep_have_the_tokens_of_their_bundle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = types.ModuleType("nccl.ep")
    module.Handle = type("Handle", (), dict(vars(Handle)))
    monkeypatch.setitem(sys.modules, "nccl.ep", module)
    tokens, scales = torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(6, 1)

    def run() -> None:
        handle, other = module.Handle(), module.Handle()
        handle.dispatch(Inputs(tokens), None, stream=0)
        handle.complete(stream=0)
        handle.combine(inputs=Inputs(tokens[:2], scales[:2]), outputs=None, stream=0)
        handle.complete(stream=0)
        other.complete(stream=0)
        other.dispatch(Inputs(1234), None, stream=0)

    start = "library=NCCL_EP group="
    first = f"stepsplit::dispatch {start} tokens=6 bytes=48 dtype=bfloat16"
    second = f"stepsplit::combine {start} tokens=2 bytes=24 dtype=bfloat16"
    assert record(run) == [first, first, second, second, f"stepsplit::dispatch {start}"]


@pytest.fixture
def symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch's ops of symmetric memory, which need a GPU: here those of torch itself with a kernel
    for the CPU that only adds."""
    pytest.importorskip("torch.distributed._symmetric_memory")
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("one_shot_all_reduce", lambda input, reduce_op, group_name: input + 1)
    library.impl(
        "fused_all_gather_matmul",
        lambda A, Bs, gather_dim, group_name, *, return_A=True: (A + 1, list(Bs)),
    )
    yield torch.ops.symm_mem
    library._destroy()


def test_ops_of_symmetric_memory_have_their_group(symmetric_memory: Any) -> None:
    x, y = torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(2)
    op = symmetric_memory.one_shot_all_reduce
    before, table = (hash(op), hash(op.default), op._op, op.default._op), {op.default: 5}

    def run() -> None:
        assert op(x, "sum", "7").sum() == 24
        assert op.default(y, reduce_op="sum", group_name="8").sum() == 4
        symmetric_memory.fused_all_gather_matmul(x, [x], 0, "7")
        assert (hash(op), hash(op.default), table[op.default]) == (*before[:2], 5)

    start = "stepsplit::symm_mem library=symmetric_memory"
    assert record(run) == [
        f"{start} group=7 tokens=3 bytes=24 dtype=bfloat16",
        f"{start} group=8 tokens=2 bytes=8 dtype=float32",
        f"{start} group=7",
    ]
    assert (hash(op), hash(op.default), op._op, op.default._op) == before


def test_what_is_compiled_in_a_recording_calls_the_op_itself(symmetric_memory: Any) -> None:
    from stepsplit.collectors.record.library_calls import annotate_library_calls

    def add(x: Any) -> Any:
        return symmetric_memory.one_shot_all_reduce(x, "sum", "7") * 2

    targets = []

    def compile_nothing(graph: Any, inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    with annotate_library_calls():
        compiled = torch.compile(add, backend=compile_nothing, fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [4, 4]
    op = symmetric_memory.one_shot_all_reduce
    assert op in targets or op.default in targets


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


def test_a_range_gives_ops_of_symmetric_memory_their_group_and_size(tmp_path: Path) -> None:
    """Two groups of two, no rank late: nothing but the range tells them apart."""
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        trace = GpuTrace(rank, 4, groups=[EXPERTS[0], ("5", "mesh_tp", pair)])
        for step in (1, 2):
            at = 100 * step
            trace.step(step, at, at + 100).kernel("gemm", at, at + 10)
            label = "stepsplit::symm_mem library=symmetric_memory group=5 tokens=8 bytes=64"
            trace.annotation(f"{label} dtype=bfloat16", at + 1, at + 5)
            trace.op("symm_mem::multimem_all_gather_out", at + 1.5, at + 4.5)
            name = "multimem_all_gather_kernel<16>"
            trace.kernel(name, at + 10, at + 30, launched=at + 2)
            trace.kernel("gemm", at + 30, at + 100)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    groups = {row.id: (row.ranks, row.axis) for row in report.groups}
    assert {groups[row.group] for row in report.collectives} == {((0, 1), "tp"), ((2, 3), "tp")}
    assert {(row.op, row.message_bytes, row.count) for row in report.collectives} == {
        ("all_gather", 128, 2)
    }


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

"""Runs -> the traces that torch.profiler writes of them with CUDA, one file a rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pipelined import AXES, WORLD, Mark, Ran, RankRun, job_of, members, play

_BASE_NS, _EPOCH_US = 1_719_853_884_000_000_000, 4_212_936_000_000
_HOST_LEAD_NS = 2_345_678  # how much the second host's clock is ahead
_STREAMS = {"": 7, "tp": 20, "dp": 24, "world": 28, "send": 32, "recv": 36}
_NELEMS = {"tp": 8_388_608, "dp": 12_582_912, "world": 1, "pp": 8_388_608}
_NAMES = {
    "all_reduce": ("AllReduce_Sum_bf16_RING_LL", "allreduce"),
    "send": ("SendRecv", "send"),
    "recv": ("SendRecv", "recv"),
}
_KERNELS = (
    ("aten::mm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1"),
    ("aten::_scaled_dot_product_flash_attention", "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"),
    ("aten::native_layer_norm", "void at::native::vectorized_layer_norm_kernel<c10::BFloat16>"),
    ("aten::gelu", "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernel>"),
    ("aten::add_", "void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add>"),
)
_SHAPE = {
    "registers per thread": 168, "shared memory": 213016, "blocks per SM": 1.0,
    "warps per SM": 12.0, "grid": [132, 1, 1], "block": [384, 1, 1],
    "est. achieved occupancy %": 19,
}  # fmt: skip
_Entry = dict[str, Any]


def recording_of(calls: int, folder: Path) -> Path:
    """The folder of a recording with so many calls; one that is there is not built again."""
    home = folder / f"calls{calls}"
    if not home.is_dir():
        draft = folder / f".calls{calls}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for rank, run in enumerate(play(job_of(calls))):
            _write(rank, run, draft / f"rank{rank}_trace.json")
        draft.rename(home)
    return home


def _write(rank: int, run: RankRun, path: Path) -> None:
    """Entry by entry, so that a large file needs no memory."""
    with path.open("w") as file:
        file.write(json.dumps(_header(rank))[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, _entries(rank, run))))
        file.write("\n]}\n")


def _header(rank: int) -> _Entry:
    groups = [
        {"pg_name": _group(rank, axis), "pg_desc": _description(axis),
         "backend_config": "cuda:nccl", "pg_size": len(members(rank, axis)),
         "ranks": list(members(rank, axis))}
        for axis in AXES
    ]  # fmt: skip
    fields = {"backend": "nccl", "rank": rank, "world_size": WORLD, "pg_count": len(groups)}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank % 4, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "distributedInfo": {**fields, "pg_config": groups, "nccl_version": "2.21.5"},
        "host_name": f"node{_node(rank)}",
        "baseTimeNanoseconds": _BASE_NS,
    }


def _node(rank: int) -> int:
    return rank // 4


def _group(rank: int, axis: str) -> str:
    """The group's name: the first rank in it tells groups along an axis apart."""
    return str(10 * list(AXES).index(axis) + members(rank, axis)[0])


def _description(axis: str) -> str:
    return "default_pg" if axis == "world" else f"mesh_{axis}"


def _entries(rank: int, run: RankRun) -> Iterator[_Entry]:
    lead = _node(rank) * _HOST_LEAD_NS
    for mark in run.marks:
        yield from _annotations(rank, mark, run, lead)
    for correlation, ran in enumerate(run.ran, start=1000):
        yield from (_called if ran.op else _computed)(rank, ran, lead, correlation)
    for step in run.marks:
        if step.name.startswith("ProfilerStep"):
            at = step.end_ns + lead - 5_000
            yield _host("cuda_runtime", "cudaDeviceSynchronize", rank, at, 4_000, {"cbid": 165})


def _annotations(rank: int, mark: Mark, run: RankRun, lead: int) -> Iterator[_Entry]:
    """On the host, and on each stream around the kernels that were launched in it."""
    at, dur = mark.start_ns + lead, mark.end_ns - mark.start_ns
    yield _host("user_annotation", mark.name, rank, at, dur, {})
    within = [ran for ran in run.ran[mark.first : mark.after] if ran.op != "send"]
    for stream in sorted(set(map(_stream, within))):
        here = [ran for ran in within if _stream(ran) == stream]
        start, end = min(ran.start_ns for ran in here), max(ran.end_ns for ran in here)
        where = (rank % 4, stream)
        yield _entry("gpu_user_annotation", mark.name, where, start + lead, end - start, {})


def _stream(ran: Ran) -> int:
    return _STREAMS[ran.op] if ran.op in _STREAMS else _STREAMS[ran.axis]


def _computed(rank: int, ran: Ran, lead: int, correlation: int) -> Iterator[_Entry]:
    """An op, its launch, its kernel."""
    (op, name), at, link = _KERNELS[ran.nth % len(_KERNELS)], ran.launch_ns + lead, correlation
    yield _host("cpu_op", op, rank, at, 7_000, _op_args(link), ran.backward)
    yield from _launch("cudaLaunchKernel", rank, at + 2_000, link, ran.backward)
    yield from _device(name, rank, ran, lead, link, {})


def _called(rank: int, ran: Ran, lead: int, correlation: int) -> Iterator[_Entry]:
    """The op of c10d, what it was called with, its events, its launch, its kernel."""
    kernel, called = _NAMES[ran.op]
    args, at, on = _described(rank, ran, called), ran.launch_ns + lead, ran.backward
    op, link = {"allreduce": "c10d::allreduce_", "recv": "c10d::recv_"}.get(called), correlation
    yield _host("cpu_op", op or "c10d::send", rank, at, 19_000, _op_args(link), on)
    yield _host("cpu_op", "record_param_comms", rank, at + 1_000, 17_000, _op_args(link) | args, on)
    beside = (("cudaEventRecord", 3_000, 135), ("cudaStreamWaitEvent", 5_000, 147))
    for name, later, cbid in beside:
        fields = {
            "External id": link,
            "cbid": cbid,
            "correlation": 10_000_000 + 2 * link + later % 2,
        }
        yield _host("cuda_runtime", name, rank, at + later, 1_000, fields, on)
    yield from _launch("cudaLaunchKernelExC", rank, at + 8_000, link, on)
    name = f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)"
    yield from _device(name, rank, ran, lead, link, args)


def _op_args(link: int) -> _Entry:
    return {"External id": link, "Record function id": link, "Ev Idx": link}


def _described(rank: int, ran: Ran, called: str) -> _Entry:
    sides = {"send": {"Dst Rank": ran.peer}, "recv": {"Src Rank": ran.peer}}
    return {
        "Collective name": called,
        "In msg nelems": _NELEMS[ran.axis],
        "Out msg nelems": _NELEMS[ran.axis],
        "Group size": len(members(rank, ran.axis)),
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": _group(rank, ran.axis),
        "Process Group Description": _description(ran.axis),
        "Process Group Ranks": str(list(members(rank, ran.axis))),
        "Seq": ran.nth,
    } | sides.get(ran.op, {})


def _launch(name: str, rank: int, at: int, link: int, backward: bool) -> Iterator[_Entry]:
    fields = {"External id": link, "cbid": 211, "correlation": link}
    call = _host("cuda_runtime", name, rank, at, 4_000, fields, backward)
    yield call
    yield _flow("s", call, link)


def _device(name: str, rank: int, ran: Ran, lead: int, link: int, args: _Entry) -> Iterator[_Entry]:
    stream = _stream(ran)
    place = {"device": rank % 4, "context": 1, "stream": stream, "correlation": link}
    fields = {"External id": link, "queued": 0, **place, **_SHAPE, **args}
    where = (rank % 4, stream)
    kernel = _entry("kernel", name, where, ran.start_ns + lead, ran.end_ns - ran.start_ns, fields)
    yield kernel
    yield _flow("f", kernel, link) | {"bp": "e"}


def _flow(phase: str, of: _Entry, link: int) -> _Entry:
    place = {key: of[key] for key in ("pid", "tid", "ts")}
    return {"ph": phase, "id": link, **place, "cat": "ac2g", "name": "ac2g"}


def _host(
    category: str, name: str, rank: int, at: int, dur: int, args: _Entry, backward: bool = False
) -> _Entry:
    """On the main thread, or on autograd's."""
    pid = 4000 + rank
    return _entry(category, name, (pid, pid + 1 if backward else pid), at, dur, args)


def _entry(
    category: str, name: str, where: tuple[int, int], at: int, dur: int, args: _Entry
) -> _Entry:
    """ts and dur in microseconds with three decimals, as they are written in a double."""
    ts = round(_EPOCH_US + at / 1000, 3)
    place = {"pid": where[0], "tid": where[1], "ts": ts, "dur": round(dur / 1000, 3)}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}

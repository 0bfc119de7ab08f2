"""Recordings of fleets of any size: python tests/benchmarks/fleet.py FOLDER --pp 16 --dp 8

A job of tensor, pipeline (1F1B) and data parallelism on hosts of eight GPUs, in which chosen ranks,
a host or a link are slower. Its times follow from a few recurrences over arrays of all ranks, and
its traces from one text per stage into which the times of each rank are filled: 1,024 ranks of
20,000 events take a few minutes. What a cause costs is the difference to the same fleet without it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ns = npt.NDArray[np.int64]

RANKS_PER_HOST = TP = 8
_BASE_NS = 1_763_600_000_000_000_000
_LAUNCH_NS, _OP_NS = 2_000, 4_000
"""How long a launch takes, and the op around it: the host is far quicker than the device."""
_HOST_GAP_NS = 50_000
"""From the end of a step on the device to the first kernel of the next."""
_COMPUTE, _SEND, _RECEIVE, _TP, _DP = 7, (24, 28), (25, 29), 20, 32
_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{}x64_cublas"
_KERNELS = (
    (_GEMM.format("128x192"), "aten::mm", 0.25),
    ("void flash_kernel<Flash_kernel_traits<128, 128, 64, 4>>", "flash_attn::run", 0.25),
    (_GEMM.format("64x256"), "aten::mm", 0.15),
    ("void at::native::vectorized_elementwise_kernel<4, gelu>", "aten::gelu", 0.05),
    (_GEMM.format("256x128"), "aten::mm", 0.12),
    ("void at::native::vectorized_layer_norm_kernel<bf16>", "aten::native_layer_norm", 0.03),
    (_GEMM.format("128x256"), "aten::mm", 0.10),
    ("void at::native::elementwise_kernel<add>", "aten::add_", 0.05),
)


@dataclass(frozen=True)
class Fleet:
    """A job; times in ns are those of one rank without causes and noise.

    slow_ranks, slow_hosts and slow_links map a rank, a host, or a rank of a tensor-parallel group,
    to how many times as long its compute or its transfers take.
    """

    pp: int = 16
    dp: int = 8
    microbatches: int = 16
    layers: int = 4
    steps: int = 3
    block_ns: int = 320_000
    """Compute between two reductions of a layer's forward; of its backward twice that."""
    tp_transfer_ns: int = 60_000
    message_ns: int = 40_000
    gradients_ns: int = 5_000_000
    optimizer_ns: int = 1_000_000
    noise: float = 0.01
    seed: int = 1
    slow_ranks: dict[int, float] = field(default_factory=dict)
    slow_hosts: dict[int, float] = field(default_factory=dict)
    slow_links: dict[int, float] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * TP

    @cached_property
    def ranks(self) -> Ns:
        """Shape (pp, dp, tp)."""
        return np.arange(self.world_size).reshape(self.pp, self.dp, TP)

    @cached_property
    def compute_times(self) -> npt.NDArray[np.float64]:
        """How many times as long compute takes, by (pp, dp, tp)."""
        times = np.ones(self.world_size)
        for rank, factor in self.slow_ranks.items():
            times[rank] *= factor
        for host, factor in self.slow_hosts.items():
            times[host * RANKS_PER_HOST : (host + 1) * RANKS_PER_HOST] *= factor
        return times.reshape(self.ranks.shape)

    @cached_property
    def transfer_times(self) -> npt.NDArray[np.float64]:
        """How many times as long a tensor-parallel transfer takes, by (pp, dp)."""
        times = np.ones((self.pp, self.dp))
        for rank, factor in self.slow_links.items():
            stage, rest = divmod(rank, self.dp * TP)
            times[stage, rest // TP] *= factor
        return times

    def order(self, stage: int) -> list[tuple[int, int]]:
        """(0 for forward or 1 for backward, microbatch) in the order of 1F1B."""
        warmup = min(self.pp - stage - 1, self.microbatches)
        steady = [
            part for at in range(self.microbatches - warmup) for part in ((0, warmup + at), (1, at))
        ]
        last = range(self.microbatches - warmup, self.microbatches)
        return [(0, at) for at in range(warmup)] + steady + [(1, at) for at in last]


class Piece(NamedTuple):
    """One device event of each rank of a stage: times have the shape (dp, tp)."""

    step: int
    name: str
    op: str
    stream: int
    call: str
    """"" for compute, else tp, dp, or the message: "send 0" to the next stage, "recv 1" from it."""
    start_ns: Ns
    end_ns: Ns


@dataclass(frozen=True)
class FleetRun:
    """What happened: the pieces of each stage in the order of their launches."""

    fleet: Fleet
    stages: tuple[tuple[Piece, ...], ...]
    begins_ns: tuple[Ns, ...]
    """The host's start of each step, and the end of the last, by (pp, dp, tp)."""

    @property
    def step_ns(self) -> float:
        """Mean step."""
        first, last = self.begins_ns[0], self.begins_ns[-1]
        return float((last - first).mean()) / self.fleet.steps


class _Steps:
    """Runs the steps one after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.random = np.random.default_rng(fleet.seed)
        self.pieces: list[list[Piece]] = [[] for _ in range(fleet.pp)]
        self.orders = [fleet.order(stage) for stage in range(fleet.pp)]

    def run(self) -> FleetRun:
        begins = [np.zeros(self.fleet.ranks.shape, dtype=np.int64)]
        for step in range(self.fleet.steps):
            begins.append(self._run_step(step, begins[-1]))
        stages = tuple(tuple(pieces) for pieces in self.pieces)
        return FleetRun(self.fleet, stages, tuple(begins))

    def _run_step(self, step: int, begin: Ns) -> Ns:
        """The end of the step on each rank."""
        fleet = self.fleet
        ready = [begin[stage] + _HOST_GAP_NS for stage in range(fleet.pp)]
        done = [0] * fleet.pp
        ended: dict[tuple[int, int, int], Ns] = {}
        arrived: dict[tuple[int, int], Ns] = {}
        while any(count < len(order) for count, order in zip(done, self.orders, strict=True)):
            for stage in range(fleet.pp):
                while done[stage] < len(self.orders[stage]):
                    way, batch = self.orders[stage][done[stage]]
                    source = stage - 1 if way == 0 else stage + 1
                    if 0 <= source < fleet.pp:
                        if (way, batch, source) not in ended:
                            break
                        ready[stage] = self._pass(
                            step, way, (source, stage), ended[way, batch, source],
                            ready[stage], arrived,
                        )  # fmt: skip
                    ready[stage] = self._compute(step, stage, way, ready[stage])
                    ended[way, batch, stage] = ready[stage]
                    done[stage] += 1
        return np.stack([self._finish(step, stage, ready[stage]) for stage in range(fleet.pp)])

    def _pass(
        self, step: int, way: int, ends: tuple[int, int], sent: Ns, free: Ns,
        arrived: dict[tuple[int, int], Ns],
    ) -> Ns:  # fmt: skip
        """A message between two stages: both ends wait for each other, and for the one before."""
        source, target = ends
        start = np.maximum(sent, arrived.get((way, source), sent))
        end = np.maximum(start, free) + self.fleet.message_ns
        arrived[way, source] = end
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        send = Piece(step, name, "nccl:send", _SEND[way], f"send {way}", start, end)
        self.pieces[source].append(send)
        receive = Piece(step, name, "nccl:recv", _RECEIVE[way], f"recv {way}", free, end)
        self.pieces[target].append(receive)
        return end

    def _compute(self, step: int, stage: int, way: int, at: Ns) -> Ns:
        """A chunk: after each block, all tensor-parallel ranks reduce."""
        fleet = self.fleet
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        transfer = np.round(fleet.tp_transfer_ns * fleet.transfer_times[stage]).astype(np.int64)
        for _ in range(2 * fleet.layers):
            at = self._run_kernels(step, stage, fleet.block_ns * (1 + way), at)
            end = at.max(axis=1, keepdims=True) + transfer[:, None] + np.zeros_like(at)
            self.pieces[stage].append(Piece(step, name, "nccl:all_reduce", _TP, "tp", at, end))
            at = end
        return at

    def _run_kernels(self, step: int, stage: int, block_ns: int, at: Ns) -> Ns:
        noise = 1 + self.fleet.noise * self.random.standard_normal(at.shape)
        took = block_ns * self.fleet.compute_times[stage] * np.maximum(noise, 0.5)
        shares = np.cumsum([0.0, *(share for _, _, share in _KERNELS)])
        edges = [at + np.round(took * share).astype(np.int64) for share in shares]
        for (name, op, _), start, end in zip(_KERNELS, edges, edges[1:], strict=False):
            self.pieces[stage].append(Piece(step, name, op, _COMPUTE, "", start, end))
        return edges[-1]

    def _finish(self, step: int, stage: int, at: Ns) -> Ns:
        """The gradients are reduced over the replicas, and the optimizer runs."""
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        end = at.max(axis=0, keepdims=True) + self.fleet.gradients_ns + np.zeros_like(at)
        self.pieces[stage].append(Piece(step, name, "nccl:all_reduce", _DP, "dp", at, end))
        last = end + self.fleet.optimizer_ns
        adam = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
        optimizer = Piece(step, adam, "aten::_fused_adam_", _COMPUTE, "", end, last)
        self.pieces[stage].append(optimizer)
        return last


def run_fleet(fleet: Fleet) -> FleetRun:
    """The times of all ranks."""
    return _Steps(fleet).run()


# Traces: the text of a stage, with a place for each time.


def write_fleet(run: FleetRun, folder: Path, workers: int = 2) -> None:
    """A trace of torch.profiler per rank, and run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fleet = run.fleet
    body = {
        "schema": "stepsplit.run/1", "name": folder.name, "world_size": fleet.world_size,
        "backend": "nccl",
        "mesh": [
            {"axis": "pp", "size": fleet.pp}, {"axis": "dp_replicate", "size": fleet.dp},
            {"axis": "tp", "size": TP},
        ],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(body))
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(partial(_write_stage, run, folder), range(fleet.pp)))


def _write_stage(run: FleetRun, folder: Path, stage: int) -> None:
    pieces = _order_launches(run.stages[stage])
    template = _build_template(run, stage, pieces)
    start = np.stack([piece.start_ns for piece in pieces], axis=-1)
    length = np.stack([piece.end_ns for piece in pieces], axis=-1) - start
    launch = _place_launches(run, stage, pieces)
    for replica, member in np.ndindex(run.fleet.dp, TP):
        rank = int(run.fleet.ranks[stage, replica, member])
        times = _list_times(
            run, (stage, replica, member), launch[replica, member], start[replica, member],
            length[replica, member],
        )  # fmt: skip
        text = _describe_rank(run.fleet, rank, template) % tuple(times.tolist())
        with gzip.open(folder / f"rank{rank}.json.gz", "wt", compresslevel=1) as file:
            file.write(f'{_build_header(run.fleet, rank)}, "traceEvents": [\n{text}\n]}}')


def _order_launches(pieces: Sequence[Piece]) -> list[Piece]:
    """In the order of the host: what a chunk needs is launched before it."""
    return sorted(pieces, key=lambda piece: (piece.step, int(piece.start_ns.min())))


def _place_launches(run: FleetRun, stage: int, pieces: Sequence[Piece]) -> Ns:
    """When the host launches each piece, by (dp, tp, piece): as early as it can."""
    steps = np.array([piece.step for piece in pieces])
    first = np.searchsorted(steps, steps)
    begins = np.stack(run.begins_ns)[steps, stage]
    after = (np.arange(len(pieces)) - first) * (_OP_NS + 500)
    placed: Ns = np.moveaxis(begins, 0, -1) + 10_000 + after
    return placed


def _list_times(
    run: FleetRun, place: tuple[int, int, int], launch: Ns, start: Ns, length: Ns
) -> npt.NDArray[np.float64]:
    """All times of a rank in µs, in the order of the template's places."""
    host = int(run.fleet.ranks[place]) // RANKS_PER_HOST
    clock = np.random.default_rng((run.fleet.seed, host)).integers(-5_000_000, 5_000_000)
    shift = int(clock) + 10_000_000
    begins = np.array([begin[place] for begin in run.begins_ns]) + shift
    marks = np.stack((begins[:-1], np.diff(begins) - 1_000), axis=-1)
    waits = np.stack((begins[1:] - 20_000, np.full(run.fleet.steps, 15_000)), axis=-1)
    columns = (
        launch + shift, np.full(len(launch), _OP_NS), launch + shift + 1_000,
        np.full(len(launch), _LAUNCH_NS), start + shift, length,
    )  # fmt: skip
    events = np.stack(columns, axis=-1)
    return np.concatenate((marks.ravel(), waits.ravel(), events.ravel())) / 1_000


def _build_template(run: FleetRun, stage: int, pieces: Sequence[Piece]) -> str:
    return ",\n".join(_write_template(run, stage, pieces))


_SPAN = '"ts": %.3f, "dur": %.3f'


def _write_template(run: FleetRun, stage: int, pieces: Sequence[Piece]) -> Iterator[str]:
    for step in range(run.fleet.steps):
        yield (
            f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{step + 5}", '
            f'"pid": @pid@, "tid": @pid@, {_SPAN}, "args": {{"External id": {step + 1}}}}}'
        )
    for step in range(run.fleet.steps):
        yield (
            '{"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": @pid@, '
            f'"tid": @pid@, {_SPAN}, "args": {{"cbid": 165, "correlation": {10 + step}}}}}'
        )
    counts: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        link, kind = 1_000 + number, piece.call.split(" ")[0]
        sequence = ""
        if kind in ("tp", "dp"):
            counts[kind] = counts.get(kind, 0) + 1
            sequence = f', "Seq": {1_000 + counts[kind]}'
        call = f"@{piece.call}@" if piece.call else ""
        yield (
            f'{{"ph": "X", "cat": "cpu_op", "name": "{piece.op}", "pid": @pid@, "tid": @pid@, '
            f'{_SPAN}, "args": {{"External id": {link}{call}{sequence}}}}}'
        )
        yield (
            '{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": @pid@, '
            f'"tid": @pid@, {_SPAN}, "args": {{"External id": {link}, "cbid": 430, '
            f'"correlation": {link}}}}}'
        )
        yield (
            f'{{"ph": "X", "cat": "kernel", "name": "{piece.name}", "pid": @device@, '
            f'"tid": {piece.stream}, {_SPAN}, "args": {{"External id": {link}, '
            f'"device": @device@, "stream": {piece.stream}, "correlation": {link}{call}}}}}'
        )


def _describe_rank(fleet: Fleet, rank: int, template: str) -> str:
    """The template with what is the rank's own: process, device, groups and peers."""
    text = template.replace("@pid@", str(4_000 + rank))
    text = text.replace("@device@", str(rank % RANKS_PER_HOST))
    lines, width = _list_groups(fleet, rank), fleet.dp * TP
    text = text.replace("@tp@", _describe_call("allreduce", *lines["tp"], 8_388_608))
    text = text.replace("@dp@", _describe_call("allreduce", *lines["dp"], 400_000_000))
    for way, towards in ((0, width), (1, -width)):
        for op, peer, key in (("send", rank + towards, "Dst"), ("recv", rank - towards, "Src")):
            call = _describe_call(op, *lines["pp"], 8_388_608) + f', "{key} Rank": {peer}'
            text = text.replace(f"@{op} {way}@", call)
    return text


def _list_groups(fleet: Fleet, rank: int) -> dict[str, tuple[str, str, list[int]]]:
    """The name, description and ranks of the rank's groups by axis."""
    stage, replica, member = (int(one) for one in np.unravel_index(rank, fleet.ranks.shape))
    ranks = fleet.ranks
    return {
        "tp": (f"tp{rank // TP}", "TENSOR_MODEL_PARALLEL_GROUP", ranks[stage, replica].tolist()),
        "dp": (
            f"dp{stage * TP + member}", "DATA_PARALLEL_GROUP", ranks[stage, :, member].tolist(),
        ),
        "pp": (
            f"pp{replica * TP + member}", "PIPELINE_MODEL_PARALLEL_GROUP",
            ranks[:, replica, member].tolist(),
        ),
    }  # fmt: skip


def _describe_call(op: str, name: str, description: str, ranks: list[int], nelems: int) -> str:
    return (
        f', "Collective name": "{op}", "In msg nelems": {nelems}, "Out msg nelems": {nelems}, '
        f'"Group size": {len(ranks)}, "dtype": "BFloat16", "Process Group Name": "{name}", '
        f'"Process Group Description": "{description}", "Process Group Ranks": "{ranks}"'
    )


def _build_header(fleet: Fleet, rank: int) -> str:
    """The header of the file, open at its end."""
    groups = [
        {"pg_name": name, "pg_desc": text, "backend_config": "cuda:nccl", "pg_size": len(ranks),
         "ranks": ranks}
        for name, text, ranks in _list_groups(fleet, rank).values()
    ]  # fmt: skip
    job = {
        "backend": "nccl", "rank": rank, "world_size": fleet.world_size, "pg_count": len(groups),
        "pg_config": groups,
    }  # fmt: skip
    device = {"id": rank % RANKS_PER_HOST, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}
    header = {
        "schemaVersion": 1, "deviceProperties": [device], "distributedInfo": job,
        "displayTimeUnit": "ms", "baseTimeNanoseconds": _BASE_NS,
        "host_name": f"node{rank // RANKS_PER_HOST:04d}",
    }  # fmt: skip
    return json.dumps(header)[:-1]


def main() -> None:
    """Writes a fleet with a slow rank, a slow host and a slow link, and prints what each costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pp", type=int, default=16)
    parser.add_argument("--dp", type=int, default=8)
    args = parser.parse_args()
    plain = Fleet(pp=args.pp, dp=args.dp)
    whole = plant(plain)
    run = run_fleet(whole)
    write_fleet(run, args.folder)
    for name, cured in (
        ("slow_ranks", replace(whole, slow_ranks={})),
        ("slow_hosts", replace(whole, slow_hosts={})),
        ("slow_links", replace(whole, slow_links={})),
    ):
        cost_ns = run.step_ns - run_fleet(cured).step_ns
        sys.stdout.write(
            f"{name} {getattr(whole, name)}: {cost_ns / 1e6:.2f} of {run.step_ns / 1e6:.2f} ms\n"
        )


def plant(fleet: Fleet) -> Fleet:
    """The fleet with a slow rank, a slow host and a slow link, on different stages."""
    first, second, third = (
        int(fleet.ranks[stage, fleet.dp // 2, 3]) for stage in (0, fleet.pp // 2, fleet.pp - 1)
    )
    return replace(
        fleet, slow_ranks={first: 1.2}, slow_hosts={second // RANKS_PER_HOST: 1.1},
        slow_links={third: 3.0},
    )  # fmt: skip


if __name__ == "__main__":
    main()

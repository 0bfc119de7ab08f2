"""Tiny traces by hand, as torch.profiler writes them; times in microseconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

MAIN = 100
COMPUTE_STREAM, COMM_STREAM = 7, 20
BASE_NS = 1_790_000_000_000_000_000
Event = dict[str, Any]


@dataclass
class GpuTrace:
    """One rank of a CUDA run. Every kernel gets a launch of its own, at its start by default."""

    rank: int = 0
    world_size: int = 1
    host: str = "host0"
    base_ns: int = BASE_NS
    groups: Sequence[tuple[str, str, Sequence[int]]] = ()
    events: list[Event] = field(default_factory=list)
    gpu: str = "Test GPU"
    gpus: int = 1

    def step(self, number: int, start: float, end: float) -> Self:
        return self._add(f"ProfilerStep#{number}", "user_annotation", start, end, tid=MAIN)

    def annotation(self, name: str, start: float, end: float) -> Self:
        return self._add(name, "user_annotation", start, end, tid=MAIN)

    def gpu_annotation(self, name: str, start: float, end: float) -> Self:
        return self._add(name, "gpu_user_annotation", start, end, tid=COMPUTE_STREAM)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launched: float | None = None,
        stream: int = COMPUTE_STREAM,
        category: str = "kernel",
        thread: int = MAIN,
        **args: Any,
    ) -> Self:
        correlation = len(self.events) + 1
        at = start if launched is None else launched
        self._add("cudaLaunchKernel", "cuda_runtime", at, at, tid=thread, correlation=correlation)
        args |= {"stream": stream, "device": 0, "correlation": correlation}
        return self._add(name, category, start, end, tid=stream, **args)

    def memcpy(self, start: float, end: float) -> Self:
        return self.kernel("Memcpy HtoD", start, end, stream=9, category="gpu_memcpy")

    def all_reduce(
        self, start: float, end: float, *, group: str = "0", nelems: int = 1000, **more: Any
    ) -> Self:
        """An all-reduce of so many floats; more are arguments of the kernel, or launched."""
        return self.collective(
            "AllReduce", "allreduce", start, end, group=group, nelems=nelems, **more
        )

    def message(
        self, op: str, peer: int, start: float, end: float, *, group: str = "0", **more: Any
    ) -> Self:
        """A send to, or a receive from, the peer."""
        side = {"send": "Dst Rank", "recv": "Src Rank"}[op]
        return self.collective("SendRecv", op, start, end, group=group, **{side: peer}, **more)

    def collective(
        self,
        kind: str,
        op: str,
        start: float,
        end: float,
        *,
        group: str = "0",
        nelems: int = 1000,
        stream: int = COMM_STREAM,
        **more: Any,
    ) -> Self:
        """An NCCL kernel of that kind, with the arguments that torch gives it."""
        args = self._described(op, group, nelems) | more
        return self.kernel(f"ncclDevKernel_{kind}", start, end, stream=stream, **args)

    def record_event(self, at: float) -> int:
        """An event that the host records on a stream; returns its correlation."""
        correlation = len(self.events) + 1
        self._add("cudaEventRecord", "cuda_runtime", at, at, tid=MAIN, correlation=correlation)
        return correlation

    def wait_for_event(
        self, at: float, recorded: int, *, stream: int = COMPUTE_STREAM, on_stream: int
    ) -> Self:
        """A wait of a stream for an event, with Kineto's event that says which."""
        correlation = len(self.events) + 1
        self._add("cudaStreamWaitEvent", "cuda_runtime", at, at, tid=MAIN, correlation=correlation)
        waits = {"stream": stream, "wait_on_stream": on_stream, "correlation": correlation}
        event = {"wait_on_cuda_event_record_corr_id": recorded, "wait_on_cuda_event_id": 1}
        return self._add(
            "Stream Wait Event", "cuda_sync", at, at, tid=stream, **waits, **event, device=0
        )

    def synchronize_device(self, start: float, end: float) -> Self:
        """The host waits for everything that it has launched, with Kineto's event of that."""
        correlation = len(self.events) + 1
        call = {"correlation": correlation}
        self._add("cudaDeviceSynchronize", "cuda_runtime", start, end, tid=MAIN, **call)
        return self._add("Context Sync", "cuda_sync", start, end, tid=-1, stream=-1, **call)

    def _add(
        self, name: str, category: str, start: float, end: float, *, tid: int, **args: Any
    ) -> Self:
        dur = round(end - start, 3)
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid,
                            "ts": start, "dur": dur, "args": args})  # fmt: skip
        return self

    def body(self) -> dict[str, Any]:
        """The file's JSON."""
        configs = [{"pg_name": n, "pg_desc": d, "ranks": list(r)} for n, d, r in self.groups]
        info = {"backend": "nccl", "rank": self.rank, "world_size": self.world_size}
        return {
            "distributedInfo": info | {"pg_config": configs},
            "deviceProperties": [{"name": self.gpu}] * self.gpus,
            "host_name": self.host,
            "baseTimeNanoseconds": self.base_ns,
            "traceEvents": self.events,
        }

    def write(self, folder: Path) -> Path:
        """Writes rank{rank}_trace.json.gz into the folder."""
        path = folder / f"rank{self.rank}_trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(self.body()).encode()))
        return path

    def post(self, op: str, peer: int, start: float, end: float, *, group: str = "0") -> Self:
        """A send or receive of a batch, described on the host; a later launch carries it out."""
        side = {"send": "Dst Rank", "recv": "Src Rank"}[op]
        args = self._described(op, group, 1000) | {side: peer}
        return self._add("record_param_comms", "cpu_op", start, end, tid=MAIN, **args)

    def _described(self, op: str, group: str, nelems: int) -> dict[str, Any]:
        """The arguments by which torch describes a call of so many floats."""
        ranks = next(list(ranks) for name, _, ranks in self.groups if name == group)
        return {
            "Collective name": op,
            "In msg nelems": nelems,
            "Out msg nelems": nelems,
            "Group size": len(ranks),
            "dtype": "Float",
            "Process Group Name": group,
            "Process Group Ranks": str(ranks),
        }

    def op(self, name: str, start: float, end: float, *, tid: int = MAIN, **args: Any) -> Self:
        """An op of the host; backward's have a thread of their own."""
        return self._add(name, "cpu_op", start, end, tid=tid, **args)

    def call(self, name: str, start: float, end: float, *, tid: int = MAIN) -> Self:
        """A call of the runtime that launches nothing."""
        return self._add(name, "cuda_runtime", start, end, tid=tid)

    def python(self, name: str, start: float, end: float) -> Self:
        """A Python function, as traces with stacks have them."""
        return self._add(name, "python_function", start, end, tid=MAIN)

    def launch(
        self,
        name: str,
        called: tuple[float, float],
        ran: tuple[float, float],
        *,
        tid: int = MAIN,
        call: str = "cudaLaunchKernel",
        category: str = "kernel",
    ) -> Self:
        """What a call that took a while launched, and when the device ran it."""
        correlation = len(self.events) + 1
        self._add(call, "cuda_runtime", *called, tid=tid, correlation=correlation)
        place = {"stream": COMPUTE_STREAM, "device": 0, "correlation": correlation}
        return self._add(name, category, *ran, tid=COMPUTE_STREAM, **place)

    def replay(
        self, name: str, called: tuple[float, float], ran: Sequence[tuple[float, float]]
    ) -> Self:
        """A CUDA graph that one call launches, and its kernels."""
        correlation = len(self.events) + 1
        self._add("cudaGraphLaunch", "cuda_runtime", *called, tid=MAIN, correlation=correlation)
        place = {"stream": COMPUTE_STREAM, "device": 0, "correlation": correlation}
        for start, end in ran:
            self._add(name, "kernel", start, end, tid=COMPUTE_STREAM, **place)
        return self

    def unlaunched(
        self, name: str, start: float, end: float, *, stream: int = COMPUTE_STREAM
    ) -> Self:
        """A kernel whose launch was not recorded; before all others: of a step before the
        recording."""
        place = {"stream": stream, "device": 0, "correlation": len(self.events) + 1}
        return self._add(name, "kernel", start, end, tid=stream, **place)


@dataclass
class CpuTrace:
    """One rank of a gloo run: ops on the main thread, collectives on gloo's worker threads."""

    rank: int = 0
    world_size: int = 1
    groups: Sequence[tuple[str, str, Sequence[int]]] = ()
    events: list[Event] = field(default_factory=list)
    flight: list[Event] = field(default_factory=list)

    def step(self, number: int, start: float, end: float) -> Self:
        return self.annotation(f"ProfilerStep#{number}", start, end)

    def annotation(self, name: str, start: float, end: float, tid: int = MAIN) -> Self:
        return self._add(name, "user_annotation", start, end, tid)

    def op(self, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> Self:
        return self._add(name, "cpu_op", start, end, tid, **args)

    def all_reduce(
        self,
        called: float,
        start: float,
        end: float,
        *,
        group: str,
        seq: int,
        tid: int,
        nelems: int = 1000,
        shapes: bool = False,
        op: str = "allreduce_",
    ) -> Self:
        """A call that the host makes, and its work on a worker thread from start to end; op is that
        of c10d, as gloo runs a reduce_scatter as an all_reduce, too."""
        dims = {"Input Dims": [[nelems]], "Input type": ["float"]} if shapes else {}
        self._add("gloo:all_reduce", "user_annotation", start, end, tid, **dims)
        return self.all_reduce_unended(called, group=group, seq=seq, nelems=nelems, op=op)

    def all_reduce_unended(
        self, called: float, *, group: str, seq: int, nelems: int = 1000, op: str = "allreduce_"
    ) -> Self:
        """A call that the host makes, whose work has not ended when the recording does."""
        self.op(f"c10d::{op}", called, called + 1)
        number = [name for name, _, _ in self.groups].index(group)
        self.flight.append({
            "process_group": [group, self.groups[number][1]], "pg_id": number,
            "collective_seq_id": seq, "is_p2p": False, "profiling_name": "gloo:all_reduce",
            "time_created_ns": BASE_NS + round((called + 0.5) * 1000),
            "input_sizes": [[nelems]], "output_sizes": [[nelems]], "input_dtypes": ["Float"],
        })  # fmt: skip
        return self

    def message(self, op: str, peer: int, posted: float, end: float, *, n: int = 0) -> Self:
        """A send or recv from its call to the return of its wait, annotated by the collector."""
        src, dst = (self.rank, peer) if op == "send" else (peer, self.rank)
        name = f"stepsplit::{op} group=0 src={src} dst={dst} tag=0 n={n} bytes=4000 dtype=float32"
        self.annotation(name, posted, posted + 1)
        return self.annotation(f"gloo:{op}", posted + 0.5, end)

    def _add(
        self, name: str, category: str, start: float, end: float, tid: int, **args: Any
    ) -> Self:
        dur = round(end - start, 3)
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid,
                            "ts": start, "dur": dur, "args": args})  # fmt: skip
        return self

    def write(self, folder: Path) -> Path:
        """Writes the trace and, where there were collectives, the Flight Recorder's dump."""
        configs = [{"pg_name": n, "pg_desc": d, "ranks": list(r)} for n, d, r in self.groups]
        info = {"backend": "gloo", "rank": self.rank, "world_size": self.world_size}
        body = {
            "distributedInfo": info | {"pg_config": configs},
            "host_name": "host0",
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": self.events,
        }
        path = folder / f"rank{self.rank}_trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(body).encode()))
        if self.flight:
            dump = json.dumps({"version": "2.10", "entries": self.flight}).encode()
            (folder / f"rank{self.rank}_flight.json.gz").write_bytes(gzip.compress(dump))
        return path

"""Writes what ranks did as Chrome traces, as torch.profiler does for CUDA."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .jobs import COMPUTE_STREAM, Job
from .machine import HostCall, KernelRun, RankTimeline
from .program import Call, Group, RecordEvent, Synchronize, WaitEvent

_BASE_NS = 1_763_600_000_000_000_000
_FIRST_SEQUENCE = 1_000
"""The recording is not the job's start."""


@dataclass(frozen=True)
class TraceStyle:
    """What a version of PyTorch and Kineto records."""

    events: str = "runtime"
    """Waits between streams: none, runtime (calls without streams), cuda_sync (with streams)."""
    sequence: bool = True
    whole_microseconds: bool = False
    late_ends_ns: int = 0
    """How much later than they end communication kernels are recorded to end."""
    largest_clock_offset_ns: int = 5_000_000
    lists_groups: str = "all"
    """The groups in pg_config: all, the world's alone (world), or none."""
    graph: bool = False
    """Each step is the replay of one CUDA graph: its kernels have the launch of the graph."""
    captures: bool = False
    """The capture of the graph is part of the recording."""
    annotates: bool = False
    """The recorder annotates calls of libraries of expert parallelism."""
    names_groups: bool = True
    """Groups have descriptions; torch calls those without one undefined."""

    def describe(self, group: Group) -> str:
        """The description of a group."""
        named = self.names_groups or group.axis == "world"
        return group.description if named else "undefined"


class _Writer:
    """The trace of one rank, from start_ns to end_ns of the common clock."""

    def __init__(self, job: Job, rank: int, timeline: RankTimeline, style: TraceStyle):
        self.job = job
        self.rank = rank
        self.timeline = timeline
        self.style = style
        self.device = rank % job.ranks_per_host
        self.pid = 4000 + rank
        host = rank // job.ranks_per_host
        clock = random.Random(f"{job.seed}/clock {host}")
        largest_ns = style.largest_clock_offset_ns
        self.offset_ns = clock.randint(-largest_ns, largest_ns) if host else 0
        self.steps = timeline.steps[job.warmup :]
        self.start_ns = self.steps[0][1]
        self.end_ns = max([timeline.end_ns, *(run.end_ns for run in timeline.kernels)])
        self.comm_arguments: dict[tuple[str, str, int, int], str] = {}
        self.recorded_ends_ns = self._delay_ends() if style.late_ends_ns else {}

    def _delay_ends(self) -> dict[KernelRun, int]:
        """Recorded ends of communication, none after the start of the next on its stream."""
        ends_ns: dict[KernelRun, int] = {}
        next_start_ns: dict[int, int] = {}
        for run in reversed(self.timeline.kernels):
            stream = run.kernel.stream
            if run.kernel.call:
                late_ns = run.end_ns + self.style.late_ends_ns
                ends_ns[run] = min(late_ns, next_start_ns.get(stream, late_ns))
            next_start_ns[stream] = run.start_ns
        return ends_ns

    def format_time(self, ns: int) -> str:
        """Microseconds since the base, on the clock of the rank's host."""
        ns += self.offset_ns + 10_000_000_000
        if self.style.whole_microseconds:
            return str(ns // 1000)
        return f"{ns // 1000}.{ns % 1000:03d}"

    def format_span(self, start_ns: int, end_ns: int) -> str:
        if self.style.whole_microseconds:
            return f'"ts": {self.format_time(start_ns)}, "dur": {end_ns // 1000 - start_ns // 1000}'
        length_ns = end_ns - start_ns
        return (
            f'"ts": {self.format_time(start_ns)}, "dur": {length_ns // 1000}.{length_ns % 1000:03d}'
        )

    def write_events(self) -> Iterator[str]:
        yield from self._write_names()
        yield from self._write_steps()
        for number, run in enumerate(self.timeline.kernels):
            if run.start_ns >= self.start_ns and run.kernel.name:
                yield from self._write_kernel(number, run)
                for copy in range(1, run.kernel.copies):
                    yield from self._write_copy(number, run, copy)
        if self.style.graph:
            yield from self._write_graphs()
        yield from self._write_calls()
        yield (
            '{"ph": "i", "name": "Record Window End", "pid": "", "tid": "", '
            f'"ts": {self.format_time(self.end_ns)}, "s": "g"}}'
        )

    def _write_names(self) -> Iterator[str]:
        at = self.format_time(self.start_ns)
        yield (
            f'{{"ph": "M", "name": "process_name", "pid": {self.pid}, "tid": 0, "ts": {at}, '
            '"args": {"name": "python"}}'
        )
        yield (
            f'{{"ph": "M", "name": "process_labels", "pid": {self.device}, "tid": 0, "ts": {at}, '
            f'"args": {{"labels": "GPU {self.device}"}}}}'
        )

    def _write_steps(self) -> Iterator[str]:
        for (number, start_ns), (_, end_ns) in pairwise(self.steps):
            name = f'"name": "ProfilerStep#{number}"'
            yield (
                f'{{"ph": "X", "cat": "user_annotation", {name}, "pid": {self.pid}, '
                f'"tid": {self.pid}, {self.format_span(start_ns, end_ns - 1_000)}, '
                f'"args": {{"External id": {10 + number}, "Record function id": 0}}}}'
            )
            runs = [
                run
                for run in self.timeline.kernels
                if run.step == number and run.kernel.stream == COMPUTE_STREAM
            ]
            yield (
                f'{{"ph": "X", "cat": "gpu_user_annotation", {name}, "pid": {self.device}, '
                f'"tid": {COMPUTE_STREAM}, {self.format_span(runs[0].start_ns, runs[-1].end_ns)}, '
                f'"args": {{"External id": {10 + number}}}}}'
            )

    def _thread(self, thread: int) -> int:
        return self.pid + 1_000 * thread

    def _write_kernel(self, number: int, run: KernelRun) -> Iterator[str]:
        kernel, call = run.kernel, run.kernel.call
        kernels = self.timeline.kernels
        op_end_ns = kernels[min(number + kernel.launches, len(kernels)) - 1].launched_ns
        while kernels[number].kernel.batched:
            number -= 1
        correlation = 100_000 + number
        tid = self._thread(kernel.thread)
        copies = kernel.name.startswith("Memcpy")
        arguments = ""
        replayed = self.style.graph and not kernel.name.startswith("Memcpy DtoH")
        if replayed:
            correlation = self.graph_correlation(run.step)
        elif run.call_ns >= self.start_ns:  # what was launched earlier has no op to describe it
            described = call is not None and call.described
            extra = arguments = self._describe_call(call) if described else ""
            if described and call.sequence is not None and self.style.sequence:
                extra += f', "Seq": {_FIRST_SEQUENCE + call.sequence}'
            op_ns = run.launched_ns - kernel.host_ns
            runtime, cbid = ("cudaMemcpyAsync", 41) if copies else ("cudaLaunchKernelExC", 430)
            if kernel.label and self.style.annotates:
                yield (
                    f'{{"ph": "X", "cat": "user_annotation", "name": "{kernel.label}", '
                    f'"pid": {self.pid}, "tid": {tid}, '
                    f"{self.format_span(op_ns, run.launched_ns)}, "
                    f'"args": {{"External id": {correlation}}}}}'
                )
            if kernel.op:
                yield (
                    f'{{"ph": "X", "cat": "cpu_op", "name": "{kernel.op}", "pid": {self.pid}, '
                    f'"tid": {tid}, {self.format_span(op_ns, op_end_ns)}, '
                    f'"args": {{"External id": {correlation}{extra}}}}}'
                )
            if not kernel.batched:
                yield (
                    f'{{"ph": "X", "cat": "cuda_runtime", "name": "{runtime}", "pid": {self.pid}, '
                    f'"tid": {tid}, {self.format_span(run.call_ns, run.launched_ns)}, '
                    f'"args": {{"External id": {correlation}, "cbid": {cbid}, '
                    f'"correlation": {correlation}}}}}'
                )
            yield (
                f'{{"ph": "s", "id": {correlation}, "pid": {self.pid}, "tid": {tid}, '
                f'"ts": {self.format_time(run.call_ns)}, "cat": "ac2g", "name": "ac2g"}}'
            )
        category = "gpu_memcpy" if copies else "kernel"
        end_ns = self.recorded_ends_ns.get(run, run.end_ns)
        if copies:
            arguments = ""
            end_ns = run.start_ns + (end_ns - run.start_ns) // kernel.copies
        grid = f', "grid": [{kernel.blocks}, 1, 1], "block": [384, 1, 1]'
        size = f', "bytes": {kernel.copied_bytes}' if copies else grid
        yield (
            f'{{"ph": "X", "cat": "{category}", "name": "{kernel.name}", "pid": {self.device}, '
            f'"tid": {kernel.stream}, {self.format_span(run.start_ns, end_ns)}, '
            f'"args": {{"External id": {correlation}, "queued": 0, "device": {self.device}, '
            f'"context": 1, "stream": {kernel.stream}, "correlation": {correlation}'
            f"{size}{arguments}}}}}"
        )
        if run.call_ns >= self.start_ns and not replayed:
            yield (
                f'{{"ph": "f", "id": {correlation}, "pid": {self.device}, '
                f'"tid": {kernel.stream}, "ts": {self.format_time(run.start_ns)}, "cat": "ac2g", '
                '"name": "ac2g", "bp": "e"}'
            )

    def _write_copy(self, number: int, run: KernelRun, copy: int) -> Iterator[str]:
        """A further copy of a row of them, with its launch right after those before it."""
        kernel, correlation = run.kernel, 10_000_000 + 100 * number + copy
        tid, length_ns = self._thread(kernel.thread), (run.end_ns - run.start_ns) // kernel.copies
        if run.call_ns >= self.start_ns:
            call_ns = run.call_ns + (run.launched_ns - run.call_ns) * copy // kernel.copies
            yield (
                f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": {self.pid},'
                f' "tid": {tid}, {self.format_span(call_ns, call_ns + 300)}, '
                f'"args": {{"cbid": 41, "correlation": {correlation}}}}}'
            )
        start_ns = run.start_ns + copy * length_ns
        yield (
            f'{{"ph": "X", "cat": "gpu_memcpy", "name": "{kernel.name}", "pid": {self.device}, '
            f'"tid": {kernel.stream}, {self.format_span(start_ns, start_ns + length_ns)}, '
            f'"args": {{"device": {self.device}, "context": 1, "stream": {kernel.stream}, '
            f'"correlation": {correlation}, "bytes": {kernel.copied_bytes}}}}}'
        )

    def graph_correlation(self, step: int) -> int:
        return 9_000_000 + step

    def _write_graphs(self) -> Iterator[str]:
        """The launch of each step's graph, at the first of its kernels' launches; before the first
        one the capture, in which the ops of c10d have their arguments and launch nothing."""
        for number, _ in self.steps[:-1]:
            runs = [run for run in self.timeline.kernels if run.step == number]
            at_ns = max(min(run.call_ns for run in runs), self.start_ns + 1_000)
            yield (
                '{"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", '
                f'"pid": {self.pid}, "tid": {self.pid}, {self.format_span(at_ns, at_ns + 500)}, '
                f'"args": {{"cbid": 311, "correlation": {self.graph_correlation(number)}}}}}'
            )
        if not self.style.captures:
            return
        first = self.steps[0][0]
        runs = [run for run in self.timeline.kernels if run.step == first and run.kernel.call]
        at_ns = self.start_ns - 2_000 * (len(runs) + 2)
        edges = (("cudaStreamBeginCapture", at_ns),
                 ("cudaStreamEndCapture", self.start_ns - 1_000))  # fmt: skip
        for name, edge_ns in edges:
            yield (
                f'{{"ph": "X", "cat": "cuda_runtime", "name": "{name}", "pid": {self.pid}, '
                f'"tid": {self.pid}, {self.format_span(edge_ns, edge_ns + 300)}, '
                f'"args": {{"cbid": 300, "correlation": {8_000_000 + edge_ns % 1000}}}}}'
            )
        for number, run in enumerate(runs):
            op_ns = at_ns + 1_000 + 2_000 * number
            assert run.kernel.call is not None
            yield (
                f'{{"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": {self.pid}, '
                f'"tid": {self.pid}, {self.format_span(op_ns, op_ns + 900)}, '
                f'"args": {{"External id": {7_000_000 + number}'
                f"{self._describe_call(run.kernel.call)}}}}}"
            )

    def _describe_call(self, call: Call) -> str:
        peer = -1 if call.peer is None else call.peer
        key = (call.op, call.group.name, call.in_nelems, call.out_nelems, peer)
        if key not in self.comm_arguments:
            ranks = ", ".join(map(str, call.group.ranks))
            text = (
                f', "Collective name": "{call.op}", "In msg nelems": {call.in_nelems}, '
                f'"Out msg nelems": {call.out_nelems}, "Group size": {len(call.group.ranks)}, '
                '"dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
                f'"Process Group Name": "{call.group.name}", '
                f'"Process Group Description": "{self.style.describe(call.group)}", '
                f'"Process Group Ranks": "[{ranks}]"'
            )
            if call.peer is not None:
                text += f', "{"Dst" if call.op == "send" else "Src"} Rank": {call.peer}'
            self.comm_arguments[key] = text
        return self.comm_arguments[key]

    def _write_calls(self) -> Iterator[str]:
        recorded: dict[int, int] = {}
        for number, call in enumerate(self.timeline.calls):
            correlation = 5_000_000 + number
            if isinstance(call.instruction, RecordEvent):
                recorded[call.instruction.event] = number
            if call.start_ns < self.start_ns:
                continue
            instruction = call.instruction
            if isinstance(instruction, Synchronize) and instruction.silent:
                continue
            if isinstance(instruction, Synchronize):
                yield self._write_runtime(call, correlation)
            elif self.style.events != "none" and not self.style.graph:
                yield self._write_runtime(call, correlation)
                if self.style.events == "cuda_sync" and isinstance(instruction, WaitEvent):
                    before = recorded[instruction.event]
                    yield self._write_stream_wait(call, correlation, before)

    def _write_runtime(self, call: HostCall, correlation: int) -> str:
        name, cbid = _runtime_name(call)
        return (
            f'{{"ph": "X", "cat": "cuda_runtime", "name": "{name}", "pid": {self.pid}, '
            f'"tid": {self._thread(call.instruction.thread)}, '
            f"{self.format_span(call.start_ns, call.end_ns)}, "
            f'"args": {{"cbid": {cbid}, "correlation": {correlation}}}}}'
        )

    def _write_stream_wait(self, call: HostCall, correlation: int, before: int) -> str:
        waiting, recorded = call.instruction, self.timeline.calls[before].instruction
        assert isinstance(waiting, WaitEvent) and isinstance(recorded, RecordEvent)
        return (
            f'{{"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": {self.device}, '
            f'"tid": {waiting.stream}, {self.format_span(call.start_ns, call.end_ns)}, '
            '"args": {"cuda_sync_kind": "Stream Wait Event", '
            f'"wait_on_stream": {recorded.stream}, '
            f'"wait_on_cuda_event_record_corr_id": {5_000_000 + before}, '
            f'"wait_on_cuda_event_id": {recorded.event}, "stream": {waiting.stream}, '
            f'"correlation": {correlation}, "device": {self.device}, "context": 1}}}}'
        )

    def write(self, folder: Path) -> None:
        header = _describe_job(self.job, self.rank, self.style)
        text = ",\n".join(self.write_events())
        path = folder / f"rank{self.rank}.json.gz"
        with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
            file.write(f'{header}, "traceEvents": [\n{text}\n]}}')


def _runtime_name(call: HostCall) -> tuple[str, int]:
    instruction = call.instruction
    if isinstance(instruction, RecordEvent):
        return "cudaEventRecord", 135
    if isinstance(instruction, WaitEvent):
        return "cudaStreamWaitEvent", 147
    if instruction.stream is None:
        return "cudaDeviceSynchronize", 165
    return "cudaStreamSynchronize", 131


def _describe_job(job: Job, rank: int, style: TraceStyle) -> str:
    """The header of the file, open at its end."""
    groups = [
        {
            "pg_name": group.name,
            "pg_desc": style.describe(group),
            "backend_config": "cuda:nccl",
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for axis, parts in job.groups.items()
        for group in parts
        if rank in group.ranks
        and len(group.ranks) > 1
        and (style.lists_groups == "all" or (style.lists_groups, axis) == ("world", "world"))
    ]
    header = {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": rank % job.ranks_per_host,
                "name": "NVIDIA H100 80GB HBM3",
                "totalGlobalMem": 85045084160,
                "computeMajor": 9,
                "computeMinor": 0,
                "numSms": 132,
            }
        ],
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": job.world_size,
            "pg_count": len(groups),
            "pg_config": groups,
            "nccl_version": "2.21.5",
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _BASE_NS,
    }
    return json.dumps(header)[:-1]


def write_traces(
    job: Job, timelines: Sequence[RankTimeline], folder: Path, style: TraceStyle | None = None
) -> None:
    """One trace per rank; profiling starts with the first recorded step of each host thread."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, timeline in enumerate(timelines):
        _Writer(job, rank, timeline, style or TraceStyle()).write(folder)

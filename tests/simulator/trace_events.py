"""The events of one rank's trace, as torch.profiler would write them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from simulator.clocks import clock_of
from simulator.nccl_names import collective_args, kernel_name, message_args
from simulator.program import (
    Collective,
    Compute,
    Copy,
    Graph,
    Host,
    Messages,
    Scenario,
    Synchronize,
)
from simulator.ran import DeviceWork, HostCall, Mark, Ran, RankRun
from simulator.style import Nccl, Style

START_NS = 1_000_000_000
"""True time 0 is so long after a trace's base: no host's clock may be farther behind."""
_FIRST_STREAM = {"compute": 7}
_LAUNCH = "cudaLaunchKernel"
_Entry = dict[str, Any]


class TraceEvents:
    """One rank's events. Streams are numbered as they come; the host is one thread."""

    def __init__(self, scenario: Scenario, rank: int, ran: RankRun, style: Style) -> None:
        self._ran, self._style = ran, style
        self._clock = clock_of(scenario, rank)
        self._groups = {group.name: group for group in scenario.job.groups}
        self._streams = dict(_FIRST_STREAM)
        self._pid = 1000 + rank

    def all(self) -> list[_Entry]:
        """The entries of annotations, then of the host, then of the device."""
        entries: list[_Entry] = []
        for mark in self._marks():
            entries += self._mark(mark)
        for correlation, call in enumerate(self._ran.host, start=1):
            entries += self._host(correlation, call)
        return entries + [self._device(ran) for ran in self._ran.device]

    def _marks(self) -> list[Mark]:
        steps = self._style.missing != "no_steps"
        return [mark for mark in self._ran.marks if steps or mark.step is None]

    def _mark(self, mark: Mark) -> list[_Entry]:
        """The annotation on the host, and one on each stream around what was launched in it."""
        found = [self._on_host(mark.name, "user_annotation", mark.start_ns, mark.end_ns)]
        within = [r for r in self._ran.device if mark.first_call <= r.launch < mark.after_call]
        for stream in dict.fromkeys(ran.work.stream for ran in within):
            here = [ran for ran in within if ran.work.stream == stream]
            start_ns, end_ns = min(r.start_ns for r in here), max(r.end_ns for r in here)
            place = (0, self._stream(stream))
            found.append(self._entry(mark.name, "gpu_user_annotation", start_ns, end_ns, place))
        return found

    def _host(self, correlation: int, call: HostCall) -> list[_Entry]:
        match call.work:
            case Host(name=name):
                return [self._on_host(name, _category(name), call.start_ns, call.end_ns)]
            case Synchronize(call=name, op=op):
                around = [self._spanning(op, call)] if op else []
                return [*around, self._runtime(name, correlation, call)]
            case Collective(op=op) as work:
                args = collective_args(work, self._groups[work.group], -1)
                return [*self._params(call, args), self._runtime(_LAUNCH, correlation, call)]
            case Messages(messages=(message,)) as work:
                args = message_args(message, self._groups[work.group])
                return [*self._params(call, args), self._runtime(_LAUNCH, correlation, call)]
            case Messages() as work:
                posts, launch = _batch(call, len(work.messages))
                args_of = [message_args(m, self._groups[work.group]) for m in work.messages]
                batches = map(self._params, posts, args_of)
                return [
                    *(one for each in batches for one in each),
                    self._runtime(_LAUNCH, correlation, launch),
                ]
            case Copy(kind=kind):
                name = "cudaMemsetAsync" if kind.startswith("Memset") else "cudaMemcpyAsync"
                return [self._runtime(name, correlation, call)]
            case Compute():
                return [self._runtime(_LAUNCH, correlation, call)]
            case Graph():
                return [self._runtime("cudaGraphLaunch", correlation, call)]

    def _device(self, ran: Ran) -> _Entry:
        stream = self._stream(ran.work.stream)
        correlation = ran.launch + 1 if ran.launch >= 0 else len(self._ran.host) - ran.launch
        args: _Entry = {"device": 0, "stream": stream, "correlation": correlation}
        name, category = _named(ran.work, self._style.nccl)
        if self._style.kernels_have_args:
            args |= self._call_args(ran)
        return self._entry(name, category, ran.start_ns, ran.end_ns, (0, stream), **args)

    def _call_args(self, ran: Ran) -> _Entry:
        match ran.work:
            case Collective(group=group) as work:
                seq = ran.seq if self._style.states_seq else -1
                return collective_args(work, self._groups[group], seq)
            case Messages(group=group, messages=(message,)):
                return message_args(message, self._groups[group])
        return {}

    def _params(self, call: HostCall, args: _Entry) -> list[_Entry]:
        if self._style.missing == "no_args":
            return []
        where = (call.start_ns, call.end_ns)
        return [self._on_host("record_param_comms", "cpu_op", *where, **args)]

    def _spanning(self, op: str, call: HostCall) -> _Entry:
        return self._on_host(op, "cpu_op", call.start_ns, call.end_ns)

    def _runtime(self, name: str, correlation: int, call: HostCall) -> _Entry:
        where = (call.start_ns, call.end_ns)
        return self._on_host(name, "cuda_runtime", *where, correlation=correlation)

    def _on_host(self, name: str, category: str, start: int, end: int, **args: Any) -> _Entry:
        return self._entry(name, category, start, end, (self._pid, self._pid), **args)

    def _entry(
        self, name: str, category: str, start: int, end: int, place: tuple[int, int], **args: Any
    ) -> _Entry:
        """ts and dur in microseconds: with three decimals they say whole nanoseconds."""
        start_ns, end_ns = self._clock.shows_ns(start), self._clock.shows_ns(end)
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": place[0],
            "tid": place[1],
            "ts": (START_NS + start_ns) / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }

    def _stream(self, name: str) -> int:
        return self._streams.setdefault(name, 16 + 4 * len(self._streams))


def _named(work: DeviceWork, nccl: Nccl) -> tuple[str, str]:
    """The device event's name and category."""
    match work:
        case Compute(name=name):
            return name, "kernel"
        case Copy(kind=kind):
            return kind, "gpu_memset" if kind.startswith("Memset") else "gpu_memcpy"
        case Collective(op=op):
            return kernel_name(op, nccl), "kernel"
        case Messages():
            return kernel_name("send", nccl), "kernel"


def _category(name: str) -> str:
    """A host's call of the runtime, an annotation of the data loader, else an op."""
    if name.startswith("cuda"):
        return "cuda_runtime"
    return "user_annotation" if name.startswith("enumerate(DataLoader)") else "cpu_op"


def _batch(call: HostCall, count: int) -> tuple[list[HostCall], HostCall]:
    """The first half of a launch cut into the posting of each message; the kernel comes after."""
    each_ns = (call.end_ns - call.start_ns) // (2 * count + 1)
    edges = [call.start_ns + i * each_ns for i in range(count + 1)]
    posts = [HostCall(call.work, *edge) for edge in pairwise(edges)]
    return posts, HostCall(call.work, edges[-1] + 1, call.end_ns)

"""A recording carried to other hardware: its kernels and its step there, and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
from msgspec import Struct, structs

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import collect_intervals, is_inside
from stepsplit.analyzer.diagnose.device_timeline import DurationFactors, measure_changed_work
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext, replay, scale_transfers
from stepsplit.analyzer.diagnose.graph.topological_order import Levels
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import (
    AttentionKernel,
    Dtype,
    HardwareConfig,
    JobConfig,
    Link,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_decode import Mistakes, read_table
from stepsplit.analyzer.model.device_speed import DeviceSpeed, compute_device_speed
from stepsplit.analyzer.model.hardware_config import (
    decode_hardware,
    list_link_names,
    load_attention_rate,
    load_hardware,
    load_link,
)
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.preset_names import find_preset, list_hardware_names
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.split.kernel_shapes import (
    ATTENTION_FAMILY,
    GEMM_FAMILIES,
    MEMORY_FAMILIES,
    find_attention_kernel,
    find_dtype,
    is_backward,
    parse_attention,
    parse_gemm,
)
from stepsplit.analyzer.split.kernels import KernelWork, compute_self_ns, find_kernel_work
from stepsplit.analyzer.trace import OPS, EventKind, Float, Int64, RankTrace
from stepsplit.collectors.formats.run_spec import SHORTHAND

# The result.


@dataclass(frozen=True, slots=True)
class CarriedKernels:
    """Kernels of one kind on both devices.

    Attributes:
        kind: "gemm", "attention", "memory" (limited by memory bandwidth) or "unknown".
        count: number of kernels per step and rank.
        recorded_ns: their summed time per step and rank, in ns.
        carried_ns: the same on the other device.
        by_shape: share of recorded_ns whose rate is that of the recorded shapes, 0..1.
    """

    kind: str
    count: int
    recorded_ns: int
    carried_ns: int
    by_shape: float


@dataclass(frozen=True, slots=True)
class CarriedCalls:
    """The collectives and messages of one axis on both networks.

    Attributes:
        axis: axis of the mesh, or the name of the groups as in GroupRow; "" if unknown.
        count: number of calls per step and rank.
        recorded_ns: their summed transfer time per step and rank, without waits, in ns.
        carried_ns: the same on the other network.
    """

    axis: str
    count: int
    recorded_ns: int
    carried_ns: int


@dataclass(frozen=True, slots=True)
class CarriedRun:
    """The mean step of a recording on other hardware.

    Attributes:
        source: name of the hardware that was recorded.
        target: name of the other hardware.
        step_ns: mean step there, in ns.
        low_ns: lower end of its band: kernels, links and host as fast as their errors allow.
        high_ns: upper end of its band.
        host_ns: the step if device and network took no time: no hardware makes it shorter while
            the host needs the recorded time.
        compute_ns: its compute, mean over steps and ranks.
        communication_ns: its exposed communication with waits and bubbles.
        copy_ns: its copies.
        idle_ns: its idle time: the device waits for the host.
        kernels: the kernels by kind.
        calls: the communication by axis.
        limits: what bounds the step, and what the estimate does not know, as sentences.
    """

    source: str
    target: str
    step_ns: int
    low_ns: int
    high_ns: int
    host_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    idle_ns: int
    kernels: tuple[CarriedKernels, ...]
    calls: tuple[CarriedCalls, ...]
    limits: tuple[str, ...]


# Recorded and other hardware.


class HardwareChange(Struct, frozen=True):
    """The hardware of a recording and the one that it is carried to.

    links replaces the links of single axes ("all": of every axis) on the target.
    """

    source: HardwareConfig
    target: HardwareConfig
    links: Mapping[str, Link]

    @property
    def label(self) -> str:
        links = [f"{axis} over {link.name}" for axis, link in self.links.items()]
        return ", ".join((self.target.name, *links))


def choose_hardware(
    device: str,
    hardware: str | None,
    recorded_on: str | None,
    links: Sequence[str],
    gpus_per_node: int | None,
) -> HardwareChange:
    """The change of hardware that a user asks for; device is the recorded device's name.

    Raises UsageError for unknown names, and if the recorded device is unknown; DataError for an
    invalid hardware file.
    """
    other = None if hardware is None else read_hardware(hardware)
    named = find_preset(device)
    preset = recorded_on or named
    if preset is None:
        raise UsageError(
            f"the recorded device {device or 'is not named'!r} has no hardware preset; say what it "
            "is with --recorded-on PRESET"
        )
    source = read_hardware(preset)
    if named == "cpu" and source.family != "cpu":
        raise UsageError(f"the steps were recorded on a CPU, not on {source.name}")
    target = other or source
    if (source.family == "cpu") != (target.family == "cpu"):
        raise UsageError(
            f"a recording on {source.name} cannot be carried to {target.name}: on a CPU the host's "
            "own work is part of its compute; record a step on any GPU"
        )
    if gpus_per_node is not None:
        if gpus_per_node < 1:
            raise UsageError(f"--gpus-per-node ({gpus_per_node}) must be at least 1")
        target = replace(target, gpus_per_node=gpus_per_node)
    by_axis = {}
    for text in links:
        axis, equals, name = text.partition("=")
        if not axis or not equals or not name:
            raise UsageError(f"--link {text!r} is not AXIS=PRESET, such as tp=nvlink-5")
        # "nvlink5" is understood as well.
        plain = {known.replace("-", ""): known for known in list_link_names()}
        by_axis[SHORTHAND.get(axis, axis)] = load_link(plain.get(name.replace("-", ""), name))
    return HardwareChange(source, target, by_axis)


def read_hardware(name: str) -> HardwareConfig:
    """A hardware preset, or a file that `stepsplit calibrate` wrote (a name that ends in .toml)."""
    if not name.endswith(".toml"):
        return load_hardware(name)
    if not Path(name).is_file():
        known = ", ".join(list_hardware_names())
        raise UsageError(f"no file {name}; give one of calibrate, or one of {known}")
    mistakes = Mistakes()
    hardware = decode_hardware(read_table(name), None, mistakes, {})
    mistakes.raise_all()
    return hardware


# The recording on the other hardware.

SMALL_SHARE = 0.02
"""Kinds of kernels below this share of the kernel time are not mentioned among the limits."""

HOST_SHARE = 0.1
"""Idle time from this share of the step on is mentioned among the limits."""

HOST_ERROR = 0.15
"""Error (a ratio) of the host's time on another machine: the hosts of the public pair of recordings
that is host-bound differ by 14 %."""

_NO_TIME = 1e-6
"""The ratio for a device or a network that takes no time."""


def carry_run(context: ReplayContext, change: HardwareChange) -> CarriedRun:
    """Replay the recording with the durations of the other hardware.

    Raises UsageError if the model has no rate for a kernel, or an axis of a link is not in the
    recording.
    """
    scalings = [
        scale_kernels(rank.trace, change.source, change.target) for rank in context.split.ranks
    ]
    transfers = _compare_transfers(context, change)
    # Let each step end after the communication that ended in it, also where no kernel waited for
    # it as recorded: it may be what the optimizer waits for once the compute is faster.
    graph = context.graph
    step_ends, of_end = graph.steps.end, dict[int, list[int]]()
    for node, step in zip(graph.kernels.end.tolist(), graph.kernels.step.tolist(), strict=True):
        if step >= 0 and graph.at_ns[node] <= graph.at_ns[step_ends[step]]:
            end = int(step_ends[step])
            of_end.setdefault(end, graph.needs.of_node(end)).append(node)
    needs = graph.needs.with_changed(of_end)
    levels = Levels.build(graph.before, needs, graph.at_ns)
    every = context.replay_with(structs.replace(graph, needs=needs, levels=levels))
    middle, low, high, nothing = (
        _change_graph(every, scalings, transfers, edge, change)
        for edge in ("ns", "low_ns", "high_ns", "")
    )
    step_ns = round(replay(middle).mean_ns)
    work_ns, least_ns, most_ns = (_average_work(context, graph) for graph in (middle, low, high))
    host_error = 0.0 if change.source == change.target else HOST_ERROR
    faster_ns = least_ns["idle"] * host_error / (1 + host_error)
    slower_ns = most_ns["idle"] * host_error
    kernels = _list_kernels(context, scalings)
    host_ns = round(replay(nothing).mean_ns)
    carried = CarriedRun(
        source=change.source.name,
        target=change.label,
        step_ns=step_ns,
        low_ns=min(step_ns, round(replay(low).mean_ns - faster_ns)),
        high_ns=max(step_ns, round(replay(high).mean_ns + slower_ns)),
        host_ns=min(host_ns, step_ns),
        compute_ns=work_ns["compute"],
        communication_ns=max(0, step_ns - sum(work_ns.values())),
        copy_ns=work_ns["copy"],
        idle_ns=work_ns["idle"],
        kernels=kernels,
        calls=_list_calls(context, transfers),
        limits=(),
    )
    return replace(carried, limits=tuple(_list_limits(context, carried)))


def _change_graph(
    context: ReplayContext,
    scalings: Sequence[KernelScaling],
    transfers: _Transfers,
    edge: str,
    change: HardwareChange,
) -> DependencyGraph:
    """The graph with the durations of the other hardware, at this edge of their band; without an
    edge device and network take no time."""
    ratio = _select_edge(edge, transfers.middle, transfers.low, transfers.high)
    recorded, other = (
        one.host.bytes_per_s * one.host.ring for one in (change.source, change.target)
    )
    graph = scale_transfers(context.graph, np.arange(len(ratio)), ratio)
    work, spent_ns = graph.work_ns.copy(order="K"), transfers.spent_ns
    for index, rank in enumerate(context.split.ranks):
        nodes = graph.timelines.slice_rank(index)
        if nodes.start == nodes.stop:
            continue
        own = context.graph.kernels.rank == index
        scaling = scalings[index]
        factors = DurationFactors(
            row=scaling.row,
            compute=_select_edge(edge, scaling.factor, scaling.low, scaling.high),
            copy=recorded / other if edge else _NO_TIME,
            transfer=float((ratio[own] @ spent_ns[own]) / max(spent_ns[own].sum(), 1)),
        )
        cuts_ns = rank.clock.map_to_own_ns(graph.timelines.cut_ns[nodes])
        work[nodes] = np.maximum(work[nodes] + measure_changed_work(rank, factors, cuts_ns), 0)
    return structs.replace(graph, work_ns=work)


def _select_edge(edge: str, middle: Float, low: Float, high: Float) -> Float:
    """The ratios at this edge of their band; without an edge they are of a device of no time."""
    bands = {"ns": middle, "low_ns": low, "high_ns": high}
    return bands[edge] if edge else np.full(len(middle), _NO_TIME)


def _average_work(context: ReplayContext, graph: DependencyGraph) -> dict[str, int]:
    """The local work per kind of WORK, mean over the steps that enter the mean."""
    counted = context.replay_with(graph)
    return {name: round(float(counted.sum_work_ns(name)[context.counted].mean())) for name in WORK}


# Transfers of collectives and messages.


class _Transfers(Struct, frozen=True):
    """Per collective or message event: recorded transfer time, and its ratio with a band."""

    spent_ns: Int64
    middle: Float
    low: Float
    high: Float
    name: tuple[str, ...]


def _compare_transfers(context: ReplayContext, change: HardwareChange) -> _Transfers:
    graph, matched = context.graph, context.split.matched
    kernels = graph.kernels
    layout = context.split.layout
    order, axes = layout.mesh.axes if layout.mesh else (), []
    for members in matched.groups:
        # A group of several axes is on the links of the outermost one.
        own = layout.find_axes(members)
        axes.append(next((axis for axis in order if axis in own), next(iter(sorted(own)), "")))
    for axis in change.links:
        if axis != "all" and axis not in axes:
            known = ", ".join(sorted(filter(None, set(axes)))) or "no axis"
            raise UsageError(f"the recording has no communication on {axis!r}; it has {known}")
    # Group -1, of a call whose group is unknown, has no name.
    names = (*(layout.name_group(members) or "" for members in matched.groups), "")
    cache: dict[tuple[int, int, int], Band] = {}
    ratios = []
    for row in kernels.row.tolist():
        key = (int(matched.group[row]), int(matched.op[row]), int(matched.message_bytes[row]))
        if key not in cache:
            cache[key] = _compare_call(context, change, axes, *key)
        ratios.append(cache[key])
    return _Transfers(
        np.maximum(graph.rest_ns[kernels.end], 0),
        np.array([one.ns for one in ratios]),
        np.array([one.low_ns for one in ratios]),
        np.array([one.high_ns for one in ratios]),
        tuple(names[group] for group in matched.group[kernels.row].tolist()),
    )


def _compare_call(
    context: ReplayContext,
    change: HardwareChange,
    axes: Sequence[str],
    group: int,
    op: int,
    message_bytes: int,
) -> Band:
    """The time of a call on the target over that on the source, with the band of the model."""
    ranks = context.split.matched.groups[group].ranks if group >= 0 else ()
    axis = axes[group] if group >= 0 else ""
    link = change.links.get(axis) or change.links.get("all")
    name = OPS[op] if OPS[op] in TIMED_OPS else "all_reduce"
    if OPS[op] == "send_recv":
        name = "send"
    size = message_bytes if message_bytes > 0 else _USUAL_BYTES
    hosts = {rank.trace.rank: rank.trace.host for rank in context.split.ranks}
    target = change.target
    if link is not None:
        target = replace(target, intra=link, inter=link)
    # By the recorded hosts; if some are unknown, by how many GPUs a node of this hardware has.
    named = [hosts.get(rank, "") for rank in ranks]
    here = _place_group(ranks, change.source.gpus_per_node)
    if all(named):
        here = _even_placement(len(ranks), len(set(named)))
    there = _place_group(ranks, target.gpus_per_node)
    if (here, _list_links(change.source)) == (there, _list_links(target)):
        return Band(1.0, 1.0, 1.0)
    before, after = time_of(name, size, here, change.source), time_of(name, size, there, target)
    ratio = after.ns / before.ns
    return Band(ratio, ratio * after.low_ns / after.ns, ratio * after.high_ns / after.ns)


def _list_links(hardware: HardwareConfig) -> tuple[Link, Link, float, int]:
    """What decides the time of a call on a placement."""
    return hardware.intra, hardware.inter, hardware.nvls, hardware.gpus_per_node


_USUAL_BYTES = 1 << 24
"""Message size assumed for a call without a recorded one."""


def _place_group(ranks: tuple[int, ...], gpus_per_node: int) -> GroupPlacement:
    return _even_placement(len(ranks), len({rank // gpus_per_node for rank in ranks}))


def _even_placement(ranks: int, nodes: int) -> GroupPlacement:
    count = max(ranks, 2)
    return GroupPlacement(count, max(1, count // max(nodes, 1)))


# What the result says.


def _list_kernels(
    context: ReplayContext, scalings: Sequence[KernelScaling]
) -> tuple[CarriedKernels, ...]:
    """The kernels by kind, per counted step and rank."""
    rows, steps = [], max(int(context.counted.sum()), 1)
    for kind, name in enumerate(KINDS):
        count, recorded, carried, known = 0, 0.0, 0.0, 0.0
        for rank, scaling in zip(context.split.ranks, scalings, strict=True):
            at = rank.trace.events.start_ns[scaling.row]
            inside = is_inside(collect_intervals(rank.windows.counted), at)
            own = inside & (scaling.kind == kind)
            count += int(own.sum())
            recorded += float(scaling.took_ns[own].sum())
            carried += float((scaling.took_ns * scaling.factor)[own].sum())
            known += float(scaling.took_ns[own & scaling.by_shape].sum())
        if count:
            per_step = [round(each / steps) for each in (count, recorded, carried)]
            by_shape = known / recorded if recorded else 0.0
            rows.append(CarriedKernels(name, per_step[0], per_step[1], per_step[2], by_shape))
    return tuple(rows)


def _list_calls(context: ReplayContext, transfers: _Transfers) -> tuple[CarriedCalls, ...]:
    kernels, steps = context.graph.kernels, max(int(context.counted.sum()), 1)
    inside = (kernels.step >= 0) & context.counted[kernels.step] if len(kernels) else None
    names, rows = np.array(transfers.name), []
    for name in dict.fromkeys(transfers.name):
        own = (names == name) & inside
        spent = transfers.spent_ns[own]
        carried = float(spent @ transfers.middle[own])
        rows.append(
            CarriedCalls(
                name, round(own.sum() / steps), round(spent.sum() / steps), round(carried / steps)
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.recorded_ns))


def _list_limits(context: ReplayContext, run: CarriedRun) -> Iterable[str]:
    """What bounds the step there, the largest part first, then what is not known."""
    shares = (
        (run.idle_ns, "the device idles {} of the step: the host launches no faster there"),
        (run.communication_ns, "exposed communication and waits are {} of the step"),
    )
    for ns, text in sorted(shares, reverse=True):
        if ns >= HOST_SHARE * run.step_ns:
            yield text.format(units.format_percent(ns / run.step_ns))
    total = sum(row.recorded_ns for row in run.kernels) or 1
    for row in run.kernels:
        if row.recorded_ns < SMALL_SHARE * total:
            continue
        share = units.format_percent(row.recorded_ns / total)
        if row.kind == "unknown":
            yield f"{share} of the kernel time is of unknown kind, scaled as memory-bound"
        elif row.kind != "memory" and row.by_shape < 0.5:
            yield f"{row.kind} kernels ({share}) have no recorded shapes: typical ones are assumed"
    if not all(rank.trace.on_device for rank in context.split.ranks):
        yield "a CPU run: the host's own work is not distinguished from compute"


# How the kernels of a rank scale.

KINDS = ("gemm", "attention", "memory", "unknown")
"""Kinds of kernels by what limits them."""

_KIND_OF_FAMILY = {
    **dict.fromkeys(MEMORY_FAMILIES, "memory"),
    ATTENTION_FAMILY: "attention",
    **dict.fromkeys(GEMM_FAMILIES, "gemm"),
}

ERRORS = {"gemm": 0.45, "attention": 0.5, "memory": 0.35, "unknown": 0.6}
"""Error (a ratio) of the duration of all kernels of a kind on another device. On the public pair of
recordings with long kernels (docs/causes.md) the largest are 0.42 for GEMMs, 0.29 for attention and
0.14 for memory-bound kernels; no pair has unknown ones."""

SHORTEST_NS = {"gemm": 5_000, "attention": 5_000, "memory": 2_000, "unknown": 2_000}
"""Duration of a GPU kernel of little work, which no rate shortens: the small kernels of BERT in the
public recordings take 5.0 to 5.8 us (GEMM) and 1.6 to 2.2 us (elementwise) on H100 and MI300X."""

LARGE_GEMM = 8_192
"""Rows, columns and inner size assumed for a GEMM without recorded shapes."""

LONG_SEQUENCE = 4_096
"""Tokens assumed for attention without recorded shapes."""


class KernelScaling(Struct, frozen=True):
    """The compute events of a rank and how their durations change; columns of equal length.

    row indexes the events and kind KINDS; took_ns is the duration (of an op on a CPU without the
    ops inside it); factor, low and high are the ratio of the new duration to the old and its band;
    by_shape marks kernels whose shapes are known.
    """

    row: Int64
    kind: Int64
    took_ns: Int64
    factor: Float
    low: Float
    high: Float
    by_shape: np.ndarray[tuple[int], np.dtype[np.bool_]]


def scale_kernels(
    trace: RankTrace, source: HardwareConfig, target: HardwareConfig
) -> KernelScaling:
    """Scale the compute events of a rank recorded on source to target."""
    rows = np.flatnonzero(trace.kinds.computes)
    took = trace.events.dur_ns[rows] if trace.on_device else compute_self_ns(trace.events, rows)
    work, work_id = find_kernel_work(trace, rows)
    family_of = {
        trace.events.names[name]: trace.kinds.find_family(name)
        for name in np.unique(trace.events.name_id[rows]).tolist()
    }
    rates = _Rates(source, target)
    kinds = np.array(
        [KINDS.index(_KIND_OF_FAMILY.get(family_of[one.name], "unknown")) for one in work],
        dtype=np.int64,
    )
    ratios = [
        rates.find_ratio(KINDS[kind], one) for kind, one in zip(kinds.tolist(), work, strict=True)
    ]
    ratio = np.array([one.value for one in ratios])[work_id]
    by_shape = np.array([one.by_shape for one in ratios], dtype=np.bool_)[work_id]
    kind = kinds[work_id]
    fused = trace.kinds.kind[rows] == EventKind.FUSED
    kind[fused] = KINDS.index("unknown")
    shortest = np.array([SHORTEST_NS[one] for one in KINDS])[kind] * trace.on_device
    kept = np.minimum(took, shortest) / np.maximum(took, 1)
    factor = np.where(fused, 1.0, kept + (1 - kept) * ratio)
    error = 1 + np.array([ERRORS[one] for one in KINDS])[kind] * (source != target)
    return KernelScaling(rows, kind, took, factor, factor / error, factor * error, by_shape)


class _Ratio(Struct, frozen=True):
    value: float
    by_shape: bool


class _Rates(Struct, frozen=True):
    """The rates of the model on two devices."""

    source: HardwareConfig
    target: HardwareConfig

    def find_ratio(self, kind: str, work: KernelWork) -> _Ratio:
        """The time on target over that on source, for work of this kind."""
        devices = (self.source, self.target)
        match kind:
            case "gemm":
                gemm, dtype = parse_gemm(work.shapes), find_dtype(work)
                size = (LARGE_GEMM,) * 3
                if gemm is not None:
                    size = (gemm.rows, gemm.columns, gemm.inner)
                before, after = (
                    _time_gemm(build_device_speed(one, dtype), *size) for one in devices
                )
                return _Ratio(after / before, gemm is not None)
            case "attention":
                shape, dtype = parse_attention(work.shapes), find_dtype(work)
                # Fused attention has no fp32 on GPUs: a name without a dtype is of 16 bits.
                dtype = "bf16" if shape is None and dtype == "fp32" else dtype
                tokens = LONG_SEQUENCE if shape is None else shape.tokens
                # An implementation that has a measured rate on one device only says nothing about
                # the ratio: both at the rate of torch's SDPA.
                kernel = find_attention_kernel(work.name)
                known = (
                    load_attention_rate(cast(AttentionKernel, kernel), one.family)
                    for one in devices
                )
                kernel = kernel if all(known) else ""
                rates = []
                for one in devices:
                    speed = build_device_speed(one, dtype, tokens, kernel)
                    forward, backward = (
                        speed.attention_flops_per_ns,
                        speed.attention_backward_flops_per_ns,
                    )
                    rates.append(backward if is_backward(work.name) else forward)
                return _Ratio(rates[0] / rates[1], shape is not None)
        speeds = [build_device_speed(one, "fp32") for one in devices]
        return _Ratio(speeds[0].bytes_per_ns / speeds[1].bytes_per_ns, kind == "memory")


def _time_gemm(speed: DeviceSpeed, rows: int, columns: int, inner: int) -> float:
    """Time of a GEMM without its launch; one that does not fill the device with tiles of the
    model's size runs in smaller ones, unless measured rates include that."""
    tiles = math.ceil(rows / max(speed.tile, 1)) * math.ceil(columns / max(speed.tile, 1))
    fills = tiles >= speed.multiprocessors or speed.gemm_ratios
    tile = speed.tile if fills else 0
    return replace(speed, launch_ns=0.0, tile=tile).compute_gemm_ns(rows, columns, inner)


_DTYPES: dict[str, Sequence[str]] = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "bf16", "fp32"),
    "fp32": ("fp32", "bf16"),
}
"""The dtype at which a device computes: the first one of which it has a peak."""


@lru_cache(maxsize=1024)
def build_device_speed(
    hardware: HardwareConfig, dtype: str, tokens: int = LONG_SEQUENCE, kernel: str = ""
) -> DeviceSpeed:
    """The rates of the model on a device for one dtype, and for attention of these tokens.

    kernel is the implementation of attention; "" that of torch's SDPA. Raises UsageError without a
    peak.
    """
    peaks = dict(hardware.peaks_flops_per_s)
    known = next((one for one in _DTYPES[dtype] if one in peaks), None)
    if known is None:
        raise UsageError(f"{hardware.name} has no peak FLOP/s at {dtype}; give one in its file")
    if known == "tf32":
        # The model has no tf32: fp32 at the peak of its matrix units.
        peaks["fp32"], known = peaks["tf32"], "fp32"
        hardware = replace(hardware, peaks_flops_per_s=tuple(peaks.items()))
    training = TrainingConfig(
        seq_len=tokens, micro_batch=1, global_batch=1, dtype=cast(Dtype, known), framework="ddp",
        attention_kernel=cast(AttentionKernel, kernel),
    )  # fmt: skip
    return compute_device_speed(JobConfig(_ONE_LAYER, ParallelConfig(), training, hardware))


_ONE_LAYER = ModelConfig(
    layers=1, hidden=4_096, heads=32, kv_heads=32, head_size=128, ffn=16_384, vocab=32_000
)

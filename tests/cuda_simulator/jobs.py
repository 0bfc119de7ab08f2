"""Training jobs with planted causes, and the program of each of their ranks.

Megatron's order of ranks: tp changes fastest, then cp, then dp, then pp.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from simulator.schedules import Action, actions

from .program import (
    AUTOGRAD_THREAD,
    MAIN_THREAD,
    BeginStep,
    Call,
    Group,
    HostWork,
    Instruction,
    Kernel,
    Message,
    RecordEvent,
    Synchronize,
    WaitEvent,
)
from .protocols import BARRIER, EXPERT_PROTOCOLS, LIBRARY_NAMES, ProtocolKernel, sum_by_kernel

COMPUTE_STREAM = 7
COMM_STREAMS = {
    "tp": 20, "dp": 32, "ep": 36, "cp": 40, "expert_dp": 52, "world": 56, "replicas": 60,
}  # fmt: skip
ACTIVATION_STREAM, GRADIENT_STREAM = 24, 28
SENDS_APART = 40
PAIRS_APART = 100
FOLDED = ("zb-v", "dualpipe-v", "dualpipe")
RING_SEND_STREAM, RING_RECEIVE_STREAM = 44, 48
_NCCL_COPY, _FLAG_NS = "Memcpy DtoD (Device -> Device)", 1_500
RANKS_PER_HOST = 8

_KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    ),
    "all_to_allv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
_GEMM = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_{}_n_tilesize{}x64_warpgroupsize2x1x1_execute_segment_k_"
    "off_kernel__5x_cublas"
)
_ATTENTION_FORWARD = (
    (_GEMM.format("tn", "128x192"), "aten::mm", 0.18),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "flash_attn::fwd", 0.22),
    (_GEMM.format("tn", "64x256"), "aten::mm", 0.10),
)
_MLP_FORWARD = (
    (_GEMM.format("tn", "256x128"), "aten::mm", 0.22),
    ("void at::native::vectorized_elementwise_kernel<4, gelu>", "aten::gelu", 0.06),
    (_GEMM.format("tn", "128x256"), "aten::mm", 0.22),
)
_MLP_BACKWARD = (
    (_GEMM.format("nn", "256x128"), "aten::mm", 0.22),
    (_GEMM.format("nt", "128x256"), "aten::mm", 0.22),
    ("void at::native::vectorized_elementwise_kernel<4, gelu_backward>", "aten::gelu", 0.12),
    (_GEMM.format("nn", "128x256"), "aten::mm", 0.22),
    (_GEMM.format("nt", "256x128"), "aten::mm", 0.22),
)
_ATTENTION_BACKWARD = (
    (_GEMM.format("nn", "64x256"), "aten::mm", 0.10),
    (_GEMM.format("nt", "64x256"), "aten::mm", 0.10),
    ("void flash_bwd_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>", "flash_attn::bwd", 0.44),
    (_GEMM.format("nn", "128x192"), "aten::mm", 0.18),
    (_GEMM.format("nt", "128x192"), "aten::mm", 0.18),
)
_ADAM = (
    "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>, "
    "at::native::FusedAdamMathFunctor<float, 4> >"
)


@dataclass(frozen=True)
class SlowRank:
    """All compute kernels of a rank take longer."""

    rank: int
    times: float


@dataclass(frozen=True)
class HostStall:
    """The host of a rank sleeps before each microbatch."""

    rank: int
    stall_ns: int = 400_000


@dataclass(frozen=True)
class SlowLink:
    """Every transfer of the group of this axis that contains the rank takes longer.

    With a peer: only the messages between the two.
    """

    axis: str
    rank: int
    times: float = 3.0
    peer: int | None = None


@dataclass(frozen=True)
class ExpertLoad:
    """The experts of a rank receive more tokens, those of the others of its ep group fewer.

    Their kernels take as much longer, and the exchanges of tokens as long as the rank with most.
    """

    rank: int
    times: float


@dataclass(frozen=True)
class Throttling:
    """All compute kernels of a rank take longer, and longer still from step to step."""

    rank: int
    first: float
    last: float
    """By how much in the first and in the last recorded step."""


@dataclass(frozen=True)
class ExtraKernels:
    """A rank runs kernels that the others do not run, such as those of an evaluation."""

    rank: int
    extra_ns: int
    place: str = "middle"
    """Where in the step: begin, middle or end, before the optimizer."""
    step: int | None = None
    """The recorded step that has them, from 0; None for all."""
    count: int = 6


@dataclass(frozen=True)
class SlowKernel:
    """One kernel of a rank takes longer in one recorded step."""

    rank: int
    extra_ns: int
    step: int
    place: str = "middle"


@dataclass(frozen=True)
class MoreWork:
    """Kernels of a rank have more to do, and larger grids."""

    rank: int
    times: float
    part: str = "all"
    """Of the step's passes through layers: first or second half, or all."""


@dataclass(frozen=True)
class CausalBlocks:
    """A ring of causal attention whose ranks have the blocks of the sequence in order: of its own
    block a rank computes half, of those before it all, and of those behind it nothing."""


Cause = (
    SlowRank
    | HostStall
    | SlowLink
    | ExpertLoad
    | Throttling
    | ExtraKernels
    | SlowKernel
    | MoreWork
    | CausalBlocks
)


@dataclass(frozen=True)
class Job:
    """A training job; times are those of one rank without causes and without noise."""

    name: str
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    fsdp: bool = False
    shards: int = 0
    """HSDP: so many data parallel ranks share the parameters, which the others replicate."""
    persistent: bool = False
    """Experts run kernels whose grid does not depend on their tokens."""
    cp_ring: bool = True
    microbatches: int = 16
    layers: int = 2
    """Layers per stage."""
    layer_ns: int = 450_000
    """Compute of one layer's forward; its backward takes twice that."""
    buckets: int = 2
    bucket_ns: int = 3_000_000
    """Transfer of all gradient buckets together, without latencies."""
    bucket_latency_ns: int = 25_000
    late_buckets: bool = False
    """Gradients are reduced when the whole backward is launched, as without overlap."""
    first_bucket: float = 1.0
    """The size of the first bucket over that of each other one; torch's is small."""
    tp_transfer_ns: int = 60_000
    message_ns: int = 40_000
    gather_ns: int = 210_000
    """FSDP: all_gather of a layer; its reduce_scatter takes twice that."""
    experts_transfer_ns: int = 90_000
    context_transfer_ns: int = 120_000
    optimizer_ns: int = 500_000
    schedule: str = "1f1b"
    """Of the pipeline: 1f1b, or another one of simulator.schedules."""
    chunks: int = 1
    """Stages on each rank: interleaved has several."""
    early_receives: bool = False
    """A receive is posted one pass before it is needed, as Megatron's overlap of messages does."""
    one_thread: bool = False
    """Autograd launches from the thread of the script, as a CPU's would."""
    messages_on_world: bool = False
    """Stages send over the default group instead of their pipeline's."""
    whole_kernels: bool = False
    """Attention and mlp are one kernel each, to keep large jobs small."""
    end_of_step: str = "item"
    """item: the loss is copied to the host; device: cudaDeviceSynchronize; none: runs ahead."""
    reduce_norm: bool = False
    """All ranks reduce the gradients' norm before the optimizer: a barrier once a step."""
    touching: bool = False
    """A kernel starts in the nanosecond in which the one that it waits for ends."""
    synchronize_microbatches: bool = False
    """The host reads each microbatch's loss."""
    noise: float = 0.005
    step_noise: float = 0.0
    """Of all compute of a rank in a step: a straggler by chance."""
    seed: int = 1
    launch_queue: int = 160
    """CUDA's holds 1024 launches of kernels ten times shorter: it too is less than a step."""
    one_queue: bool = False
    """CUDA_DEVICE_MAX_CONNECTIONS=1."""
    warmup: int = 2
    steps: int = 3
    causes: tuple[Cause, ...] = ()
    experts_by: str = "nccl"
    """What moves the tokens of experts: nccl, or one of protocols.EXPERT_PROTOCOLS."""
    tensor_by: str = "nccl"
    """What sums activations: nccl, or one of protocols.SUM_LIBRARIES."""
    weights_by: str = "nccl"
    """What gathers FSDP's parameters: nccl, copy_engine (torch's symmetric memory), or nccl_copies:
    NCCL's own use of copy engines."""
    described: bool = True
    """NCCL's kernels have arguments; those that a replayed graph launches have none."""
    ranks_per_host: int = RANKS_PER_HOST
    jitter_ns: int = 1_200
    """By how much the members of a call end one after another."""
    link_speeds: tuple[tuple[str, float], ...] = ()
    """Axis and by how much all its transfers are faster."""

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def groups(self) -> dict[str, list[Group]]:
        """The process groups of each axis."""
        return _build_groups(self)

    def group(self, axis: str, rank: int) -> Group:
        """The rank's group on an axis."""
        return next(group for group in self.groups[axis] if rank in group.ranks)

    def without(self, *causes: Cause) -> Job:
        """The same job with these causes cured, noise included."""
        return replace(self, causes=tuple(each for each in self.causes if each not in causes))

    def compute_times(self, rank: int, step: int) -> float:
        """By how much the rank's compute kernels take longer in a step."""
        times = 1.0
        for cause in self.causes:
            if isinstance(cause, SlowRank) and cause.rank == rank:
                times *= cause.times
            if isinstance(cause, Throttling) and cause.rank == rank:
                part = max(step - self.warmup, 0) / max(self.steps - 1, 1)
                times *= cause.first + (cause.last - cause.first) * part
        if self.step_noise:
            chance = random.Random(f"{self.seed}/step {rank} {step}").gauss(0, 1)
            times *= max(0.5, 1 + self.step_noise * chance)
        return times

    def expert_load(self, rank: int) -> float:
        """The tokens that the rank's experts receive, over those of balanced experts."""
        load = 1.0
        for cause in self.causes:
            if isinstance(cause, ExpertLoad) and cause.rank in self.group("ep", rank).ranks:
                more = cause.times - 1
                load += more if rank == cause.rank else -more / (self.ep - 1)
        return load

    def transfer_times(self, axis: str, group: Sequence[int], pair: Sequence[int] = ()) -> float:
        """By how much the transfers of a group, or the messages of a pair in it, take longer."""
        times = 1.0
        for cause in self.causes:
            if not isinstance(cause, SlowLink) or (cause.axis, cause.rank in group) != (axis, True):
                continue
            if cause.peer is None or {cause.rank, cause.peer} == set(pair):
                times *= cause.times
        for faster, speed in self.link_speeds:
            if faster == axis:
                times /= speed
        return times

    def stall_ns(self, rank: int) -> int:
        """How long the rank's host sleeps before each microbatch."""
        return sum(
            cause.stall_ns
            for cause in self.causes
            if isinstance(cause, HostStall) and cause.rank == rank
        )


def _build_groups(job: Job) -> dict[str, list[Group]]:
    shape = (("tp", job.tp), ("cp", job.cp), ("dp", job.dp), ("pp", job.pp))
    stride, strides = 1, {}
    for axis, size in shape:
        strides[axis] = stride
        stride *= size
    world = tuple(range(job.world_size))

    def split(axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Ranks that agree on all other axes."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in world:
            key = tuple(rank // strides[axis] % size for axis, size in shape if axis not in axes)
            found.setdefault(key, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    members = {
        "world": ("default_pg", [world]),
        "tp": ("TENSOR_MODEL_PARALLEL_GROUP", split(["tp"])),
        "cp": ("CONTEXT_PARALLEL_GROUP", split(["cp"])),
        "dp": ("DATA_PARALLEL_GROUP_WITH_CP", split(["dp", "cp"])),
        "pp": ("PIPELINE_MODEL_PARALLEL_GROUP", split(["pp"])),
    }
    if job.ep > 1:
        replicas = split(["dp"])
        members["ep"] = (
            "EXPERT_MODEL_PARALLEL_GROUP",
            [r[i : i + job.ep] for r in replicas for i in range(0, len(r), job.ep)],
        )
        members["expert_dp"] = (
            "EXPERT_DATA_PARALLEL_GROUP",
            [r[i :: job.ep] for r in replicas for i in range(job.ep)],
        )
    if job.shards:
        replicas = split(["dp"])
        members["dp"] = (
            "mesh_dp_shard",
            [r[i : i + job.shards] for r in replicas for i in range(0, len(r), job.shards)],
        )
        members["replicas"] = (
            "mesh_dp_replicate",
            [r[i :: job.shards] for r in replicas for i in range(job.shards)],
        )
    groups: dict[str, list[Group]] = {}
    count = 0
    for axis, (description, parts) in members.items():
        groups[axis] = []
        for ranks in parts:
            groups[axis].append(Group(str(count), description, axis, ranks))
            count += 1
    return groups


class _Noise:
    """Factors around 1, the same for the same key with and without a cause."""

    def __init__(self, job: Job, key: str):
        self.random = random.Random(f"{job.seed}/{key}")
        self.sigma = job.noise

    def factor(self) -> float:
        return max(0.5, 1 + self.sigma * self.random.gauss(0, 1))


@dataclass(frozen=True, slots=True)
class _Work:
    """A communication in flight: an event at its end."""

    event: int


class _Process:
    """One rank's training script; communication as torch.distributed does it with NCCL."""

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.rank = rank
        self.stage = rank // (job.tp * job.cp * job.dp)
        self.program: list[Instruction] = []
        self.thread = MAIN_THREAD
        self.events = 0
        self.times = 1.0
        self.step = 0
        self.passes = 0
        self.load = 1.0
        self.late_ns = 0
        self.compute_noise = _Noise(job, f"compute {rank}")
        self.jitter = random.Random(f"{job.seed}/jitter {rank}")
        self.noises: dict[str, _Noise] = {}
        self.sequences: dict[str, int] = {}
        self.my_groups: dict[str, Group] = {}

    # communication

    def group(self, axis: str) -> Group:
        if axis not in self.my_groups:
            self.my_groups[axis] = self.job.group(axis, self.rank)
        return self.my_groups[axis]

    def noise(self, key: str) -> _Noise:
        """The same sequence of factors on all members of a group."""
        if key not in self.noises:
            self.noises[key] = _Noise(self.job, key)
        return self.noises[key]

    def draw_jitter_ns(self) -> int:
        return round(abs(self.jitter.gauss(0, self.job.jitter_ns)))

    def launch_compute(self, name: str, op: str, duration_ns: float, load: float = 1.0) -> None:
        """load: the kernel's work over the usual one."""
        load *= self.load
        factor = self.times * self.compute_noise.factor() * load
        took_ns, self.late_ns = duration_ns * factor + self.late_ns, 0
        blocks = 132 if self.job.persistent else round(132 * load)
        self.program.append(
            Kernel(name, op, COMPUTE_STREAM, round(took_ns), thread=self.thread, blocks=blocks)
        )

    def collective(
        self, axis: str, op: str, transfer_ns: float, nelems: int, returned: int | None = None
    ) -> _Work:
        """Launches a collective behind what the compute stream has been given so far.

        returned: what the rank gets back, if the op does not say.
        """
        group = self.group(axis)
        size = len(group.ranks)
        noise = self.noise(f"group {group.name}")
        sequence = self.sequences.get(group.name, 0)
        self.sequences[group.name] = sequence + 1
        times = self.job.transfer_times(axis, group.ranks) * noise.factor()
        gathers, scatters = op == "_allgather_base", op == "_reduce_scatter_base"
        call = Call(
            op,
            group,
            in_nelems=nelems // size if gathers else nelems,
            out_nelems=nelems // size if scatters else nelems if returned is None else returned,
            transfer_ns=round(transfer_ns * times),
            sequence=sequence,
            described=self.job.described,
        )
        return self._communicate(COMM_STREAMS[axis], call)

    def run_protocol(
        self,
        axis: str,
        kernels: Sequence[ProtocolKernel],
        own_ns: float,
        most_ns: float,
        stream: int,
        label: str = "",
    ) -> None:
        """Launches the kernels of one call behind what the compute stream has been given so far;
        the compute stream waits for them.

        own_ns: the transfer of this rank, most_ns: that of the rank that has most to receive.
        label: the recorder's range around the call.
        """
        group = self.group(axis)
        times = self.job.transfer_times(axis, group.ranks)
        times *= self.noise(f"group {group.name}").factor()
        if stream != COMPUTE_STREAM:
            self.program += [
                RecordEvent(self._new_event(), COMPUTE_STREAM, self.thread),
                WaitEvent(self.events, stream, self.thread),
            ]
        for one in kernels:
            transfer_ns = most_ns if one.together else own_ns
            took_ns = round(one.fixed_ns + one.share * transfer_ns * times)
            jitter_ns = self.draw_jitter_ns()
            if one.role == "local":
                self.program.append(Kernel(one.name, one.op, stream, took_ns, thread=self.thread))
                continue
            call = Call("", group, 0, 0, took_ns, phase=f"{axis}/{one.phase}", role=one.role,
                        described=False)  # fmt: skip
            self.program.append(
                Kernel(one.name, one.op, stream, call=call, host_ns=15_000, thread=self.thread,
                       end_jitter_ns=jitter_ns, label=label)
            )  # fmt: skip
            if one.host_reads:
                self.program.append(Synchronize(stream, self.thread, silent=True))
            if one.computes_ns:
                self.launch_compute(_MLP_FORWARD[0][0], "aten::mm", one.computes_ns)
        if stream != COMPUTE_STREAM:
            self.program.append(RecordEvent(self._new_event(), stream, self.thread))
            self.wait(_Work(self.events))

    def message(
        self, op: str, axis: str, peer: int, channel: str, stream: int, nelems: int, ns: float
    ) -> _Work:
        """isend or irecv."""
        src, dst = (self.rank, peer) if op == "send" else (peer, self.rank)
        noise = self.noise(f"{channel} {src} {dst}")
        times = self.job.transfer_times(axis, self.group(axis).ranks, (src, dst)) * noise.factor()
        group = self.group("world" if axis == "pp" and self.job.messages_on_world else axis)
        message = Message(src, dst, channel, round(ns * times))
        call = Call(op, group, nelems, nelems, messages=(message,), peer=peer)
        return self._communicate(stream, call)

    def _communicate(self, stream: int, call: Call) -> _Work:
        self.program += [
            RecordEvent(self._new_event(), COMPUTE_STREAM, self.thread),
            WaitEvent(self.events, stream, self.thread),
            Kernel(
                _KERNELS[call.op], "record_param_comms", stream, call=call, host_ns=15_000,
                thread=self.thread, end_jitter_ns=self.draw_jitter_ns(),
            ),
            RecordEvent(self._new_event(), stream, self.thread),
        ]  # fmt: skip
        return _Work(self.events)

    def _new_event(self) -> int:
        self.events += 1
        return self.events

    def wait(self, work: _Work) -> None:
        """The compute stream waits; the host goes on."""
        self.program.append(WaitEvent(work.event, COMPUTE_STREAM, self.thread))

    # the model

    def launch_all(
        self, kernels: Sequence[tuple[str, str, float]], layer_ns: float, load: float = 1.0
    ) -> None:
        """Kernels of shares of a layer's forward; load: their work over the usual one."""
        if self.job.whole_kernels:
            name, op, _ = max(kernels, key=lambda each: each[2])
            kernels = [(name, op, sum(share for _, _, share in kernels))]
        for name, op, share in kernels:
            self.launch_compute(name, op, layer_ns * share, load)

    def reduce_tensor_parallel(self) -> None:
        if self.job.tp > 1 and self.job.tensor_by != "nccl":
            took_ns = self.job.tp_transfer_ns
            kernels = sum_by_kernel(self.job.tensor_by, self.job.tp)
            self.run_protocol("tp", kernels, took_ns, took_ns, COMPUTE_STREAM)
        elif self.job.tp > 1:
            self.wait(self.collective("tp", "allreduce", self.job.tp_transfer_ns, 16_777_216))

    def run_experts(self, kernels: Sequence[tuple[str, str, float]]) -> None:
        """The mlp; with experts, of the tokens that all ranks send to this one's."""
        job, sent = self.job, 8_388_608
        if job.ep == 1:
            self.launch_all(kernels, job.layer_ns)
            return
        load = job.expert_load(self.rank)
        received = round(sent * load)
        most = max(job.expert_load(rank) for rank in self.group("ep").ranks)
        transfer_ns = job.experts_transfer_ns * most
        if job.experts_by != "nccl":
            backward = kernels is _MLP_BACKWARD
            dispatch, combine = EXPERT_PROTOCOLS[job.experts_by](backward, job.ep)
            stream = COMM_STREAMS["ep"]
            # Each rank's dispatch ends when its own tokens have come.
            own_ns = job.experts_transfer_ns * load
            label = "stepsplit::{} library={} group={} tokens={} bytes={} dtype=bfloat16"
            library, group = LIBRARY_NAMES[job.experts_by], self.group("ep").name
            sends, returns = (
                label.format(kind, library, group, count // 1024, 2 * count)
                for kind, count in (("dispatch", sent), ("combine", received))
            )
            self.run_protocol("ep", dispatch, own_ns, transfer_ns, stream, sends)
            self.launch_all(kernels, job.layer_ns, load)
            self.run_protocol("ep", combine, transfer_ns, transfer_ns, stream, returns)
            return
        self.wait(self.collective("ep", "all_to_allv", transfer_ns, sent, received))
        self.launch_all(kernels, job.layer_ns, load)
        self.wait(self.collective("ep", "all_to_allv", transfer_ns, received, sent))

    def begin_pass(self) -> None:
        """Plants what the passes through layers have of the causes."""
        job, here = self.job, self.passes
        passes = 2 * job.layers * job.microbatches
        places = {"begin": 0, "middle": passes // 2, "end": passes - 1}
        self.passes += 1
        self.load = 1.0
        for cause in job.causes:
            if isinstance(cause, MoreWork) and cause.rank == self.rank:
                half = "first" if here < passes // 2 else "second"
                self.load *= cause.times if cause.part in ("all", half) else 1.0
            if not isinstance(cause, ExtraKernels | SlowKernel) or cause.rank != self.rank:
                continue
            if places[cause.place] != here or cause.step not in (None, self.step - job.warmup):
                continue
            if isinstance(cause, SlowKernel):
                self.late_ns = cause.extra_ns
                continue
            self.program += [
                Kernel(
                    "evaluate_kernel", "aten::topk", COMPUTE_STREAM,
                    cause.extra_ns // cause.count, thread=self.thread,
                )
            ] * cause.count  # fmt: skip

    def run_forward_layer(self) -> None:
        self.begin_pass()
        job = self.job
        if job.cp > 1:
            self._attend_over_context(_ATTENTION_FORWARD, 1)
        else:
            self.launch_all(_ATTENTION_FORWARD, job.layer_ns)
        self.reduce_tensor_parallel()
        self.run_experts(_MLP_FORWARD)
        self.reduce_tensor_parallel()

    def run_backward_layer(self, part: str = "B") -> None:
        """part: B all of it, I without the products that weight gradients need, W those alone."""
        if part != "B":
            kernels = (*_MLP_BACKWARD, *_ATTENTION_BACKWARD)
            weights = [each for each in kernels if "_nt_" in each[0]]
            inputs = [each for each in kernels if "_nt_" not in each[0]]
            self.launch_all(inputs if part == "I" else weights, self.job.layer_ns)
            return
        self.begin_pass()
        job = self.job
        self.run_experts(_MLP_BACKWARD)
        self.reduce_tensor_parallel()
        if job.cp > 1:
            self._attend_over_context(_ATTENTION_BACKWARD, 2)
        else:
            self.launch_all(_ATTENTION_BACKWARD, job.layer_ns)
        self.reduce_tensor_parallel()

    def _attend_over_context(
        self, kernels: Sequence[tuple[str, str, float]], messages: int
    ) -> None:
        """Attention of the own queries over the keys and values of all ranks of the cp group."""
        job, layer_ns = self.job, self.job.layer_ns
        middle = next(i for i, (name, _, _) in enumerate(kernels) if "flash" in name)
        name, op, share = kernels[middle]
        self.launch_all(kernels[:middle], layer_ns)
        if not job.cp_ring:
            transfer_ns = job.context_transfer_ns * messages
            self.wait(self.collective("cp", "_allgather_base", transfer_ns, 8_388_608))
            self.launch_compute(name, op, layer_ns * share)
            if messages > 1:
                self.wait(self.collective("cp", "_reduce_scatter_base", transfer_ns, 8_388_608))
        else:
            for step in range(job.cp):
                works = self._pass_around_ring(messages) if step < job.cp - 1 else []
                blocks = 1.0
                if CausalBlocks() in job.causes and step:
                    place = self.group("cp").ranks.index(self.rank)
                    blocks = 2.0 if step <= place else 0.0
                if blocks:
                    self.launch_compute(name, op, layer_ns * share / job.cp * blocks)
                for work in works:
                    self.wait(work)
        self.launch_all(kernels[middle + 1 :], layer_ns)

    def _pass_around_ring(self, messages: int) -> list[_Work]:
        ranks = self.group("cp").ranks
        place = ranks.index(self.rank)
        after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        ns = self.job.context_transfer_ns * messages / self.job.cp
        nelems = 2_097_152 * messages
        send = ("send", "cp", after, "ring", RING_SEND_STREAM, nelems, ns)
        receive = ("recv", "cp", before, "ring", RING_RECEIVE_STREAM, nelems, ns)
        order = (send, receive) if place % 2 == 0 else (receive, send)
        return [self.message(*each) for each in order]

    # the step

    def run_microbatch_forward(self) -> None:
        for _ in range(self.job.layers):
            self.run_forward_layer()

    def run_microbatch_backward(self, last: bool, part: str = "B") -> list[_Work]:
        """The reductions that the last microbatch's backward starts."""
        job = self.job
        self.thread = MAIN_THREAD if job.one_thread else AUTOGRAD_THREAD
        works: list[_Work] = []
        reduced = 0
        for layer in range(job.layers):
            self.run_backward_layer(part)
            if not last or job.fsdp:
                continue
            due = (layer + 1) * job.buckets // job.layers
            if job.late_buckets:
                due = job.buckets if layer == job.layers - 1 else 0
            for number in range(reduced, due):
                works += self._reduce_bucket(number)
            reduced = due
        self.thread = MAIN_THREAD
        return works

    def _reduce_bucket(self, number: int) -> list[_Work]:
        job = self.job
        part = (1.0 if number else job.first_bucket) / (job.buckets - 1 + job.first_bucket)
        nelems = round(67_108_864 * part)
        transfer_ns = job.bucket_latency_ns + job.bucket_ns * part
        if len(self.group("dp").ranks) == 1:
            return []
        has_replicas = job.ep > 1 and len(self.group("expert_dp").ranks) > 1
        axes = ("expert_dp", "dp") if has_replicas else ("dp",)
        return [self.collective(axis, "allreduce", transfer_ns, nelems) for axis in axes]

    def run_step(self, number: int) -> None:
        job = self.job
        self.program += [BeginStep(number), HostWork(150_000)]
        self.step, self.passes = number, 0
        self.times = job.compute_times(self.rank, number)
        works = self._run_sharded_microbatches() if job.fsdp else self._run_pipeline()
        for work in works:
            self.wait(work)
        if job.reduce_norm:
            self.wait(self.collective("world", "allreduce", 20_000, 1))
        self.load = 1.0
        for _ in range(3):
            self.launch_compute(_ADAM, "aten::_fused_adamw_", job.optimizer_ns / 3)
        if job.end_of_step == "item":
            self._read_loss()
        elif job.end_of_step == "device":
            self.program.append(Synchronize())

    def _read_loss(self) -> None:
        self.program += [
            Kernel("Memcpy DtoH (Device -> Pinned)", "aten::item", COMPUTE_STREAM, 1_500),
            Synchronize(COMPUTE_STREAM),
        ]

    def _begin_microbatch(self, number: int) -> None:
        if self.job.synchronize_microbatches and number:
            self._read_loss()
        stall_ns = self.job.stall_ns(self.rank)
        if stall_ns:
            self.program.append(HostWork(stall_ns))

    def _run_actions(self) -> list[_Work]:
        """Any schedule: receives, the passes in its order, and sends right after them."""
        job = self.job
        order = actions(job.schedule, job.pp, job.microbatches, job.chunks)[self.stage]
        works: list[_Work] = []
        posted: dict[Action, _Work] = {}
        for number, action in enumerate(order):
            for needed in order[number : number + 1 + job.early_receives]:
                if needed not in posted and (work := self._receive(needed)) is not None:
                    posted[needed] = work
            if action in posted:
                self.wait(posted.pop(action))
            if action.kind == "F":
                self.run_microbatch_forward()
            else:
                last = number == len(order) - 1
                works += self.run_microbatch_backward(last, action.kind)
            self._send(action)
        return works

    def _receive(self, action: Action) -> _Work | None:
        """Posts the receive of what a pass takes from another rank."""
        if action.kind == "W":
            return None
        forward = action.kind == "F"
        source = action.stage + (-1 if forward else 1)
        return self._exchange("recv", source, "activation" if forward else "gradient")

    def _send(self, action: Action) -> None:
        if action.kind != "W":
            forward = action.kind == "F"
            target = action.stage + (1 if forward else -1)
            self._exchange("send", target, "activation" if forward else "gradient")

    def _exchange(self, op: str, stage: int, channel: str) -> _Work | None:
        """A message from or to another stage; None beyond the ends and within the rank."""
        job = self.job
        # In a V, and of two models that run in opposite directions, the second stages lie in
        # reverse order.
        is_folded = job.schedule in FOLDED
        rank = 2 * job.pp - 1 - stage if is_folded and stage >= job.pp else stage % job.pp
        if not 0 <= stage < job.pp * (2 if is_folded else job.chunks) or rank == self.stage:
            return None
        peer = self.rank + (rank - self.stage) * job.tp * job.cp * job.dp
        stream = ACTIVATION_STREAM if channel == "activation" else GRADIENT_STREAM
        # Around a ring of stages a send must not wait behind a receive.
        stream += SENDS_APART if op == "send" else 0
        # Both ends of a rank's two chunks meet each neighbor: torch has a communicator per pair.
        stream += PAIRS_APART if is_folded and rank > self.stage else 0
        return self.message(op, "pp", peer, channel, stream, 8_388_608, job.message_ns)

    def _run_pipeline(self) -> list[_Work]:
        """1F1B, as Megatron's forward_backward_pipelining_without_interleaving."""
        job = self.job
        if job.schedule != "1f1b" or job.early_receives:
            return self._run_actions()
        ahead = min(job.pp - 1 - self.stage, job.microbatches)
        works: list[_Work] = []
        for number in range(ahead):
            self._begin_microbatch(number)
            self._run_stage_forward()
        for number in range(ahead, job.microbatches):
            self._begin_microbatch(number)
            self._run_stage_forward()
            works += self._run_stage_backward(number - ahead)
        for number in range(job.microbatches - ahead, job.microbatches):
            works += self._run_stage_backward(number)
        return works

    def _run_stage_forward(self) -> None:
        if self.stage > 0:
            self.wait(self._pass_message("recv", -1, "activation"))
        self.run_microbatch_forward()
        if self.stage < self.job.pp - 1:
            self._pass_message("send", 1, "activation")

    def _run_stage_backward(self, number: int) -> list[_Work]:
        if self.stage < self.job.pp - 1:
            self.wait(self._pass_message("recv", 1, "gradient"))
        works = self.run_microbatch_backward(number == self.job.microbatches - 1)
        if self.stage > 0:
            self._pass_message("send", -1, "gradient")
        return works

    def _pass_message(self, op: str, toward: int, channel: str) -> _Work:
        peer = self.rank + toward * self.job.tp * self.job.cp * self.job.dp
        stream = ACTIVATION_STREAM if channel == "activation" else GRADIENT_STREAM
        return self.message(op, "pp", peer, channel, stream, 8_388_608, self.job.message_ns)

    def _run_sharded_microbatches(self) -> list[_Work]:
        """FSDP: each layer is gathered two layers ahead, in forward and again in backward."""
        works: list[_Work] = []
        for number in range(self.job.microbatches):
            self._begin_microbatch(number)
            for _ in self._gather_layers():
                self.run_forward_layer()
            self.thread = AUTOGRAD_THREAD
            for _ in self._gather_layers():
                self.run_backward_layer()
                transfer_ns = 2 * self.job.gather_ns
                reduced = self.collective("dp", "_reduce_scatter_base", transfer_ns, 16_777_216)
                works.append(self._reduce_replicas(reduced) if self.job.shards else reduced)
            self.thread = MAIN_THREAD
        return works

    def _reduce_replicas(self, reduced: _Work) -> _Work:
        """The shards of a layer's gradients over their replicas, once they are reduced."""
        self.program.append(WaitEvent(reduced.event, COMM_STREAMS["replicas"], self.thread))
        part_ns = self.job.gather_ns // self.job.shards
        return self.collective("replicas", "allreduce", part_ns, 16_777_216 // self.job.shards)

    def _gather_layers(self) -> Iterator[int]:
        """Each layer once its parameters are gathered, with the gathers of the next two begun."""
        layers = self.job.layers
        gathers = [self._gather_layer() for _ in range(min(2, layers))]
        for layer in range(layers):
            if layer + 2 < layers:
                gathers.append(self._gather_layer())
            self.wait(gathers[layer])
            yield layer

    def _gather_layer(self) -> _Work:
        if self.job.weights_by == "copy_engine":
            return self._gather_by_copies()
        if self.job.weights_by == "nccl_copies":
            return self._gather_by_nccl_copies()
        return self.collective("dp", "_allgather_base", self.job.gather_ns, 16_777_216)

    def _gather_by_copies(self) -> _Work:
        """Each rank copies the others' shards, between two barriers."""
        job, ranks = self.job, self.group("dp").ranks
        stream = COMM_STREAMS["dp"] + 1
        self.program += [
            RecordEvent(self._new_event(), COMPUTE_STREAM, self.thread),
            WaitEvent(self.events, stream, self.thread),
        ]
        times = job.transfer_times("dp", ranks) * self.noise("copies").factor()
        op = "symm_mem::_low_contention_all_gather"
        for phase in ("before", "copies", "after"):
            if phase == "copies":
                took_ns = round(job.gather_ns * times / (len(ranks) - 1))
                self.program += [
                    Kernel(
                        "Memcpy PtoP (Device -> Device)", op, stream, took_ns,
                        host_ns=6_000, thread=self.thread, copied_bytes=2_097_152,
                    )
                ] * (len(ranks) - 1)  # fmt: skip
                continue
            call = Call("", self.group("dp"), 0, 0, 4_000, phase=f"dp/{phase}", described=False)
            self.program.append(
                Kernel(BARRIER, op, stream, call=call, thread=self.thread,
                       end_jitter_ns=round(abs(self.jitter.gauss(0, 800))))
            )  # fmt: skip
        self.program.append(RecordEvent(self._new_event(), stream, self.thread))
        return _Work(self.events)

    def _gather_by_nccl_copies(self) -> _Work:
        """As src/ce_coll.cc of NCCL: a flag to each peer and a wait for theirs, a batch of copies,
        its own part first, and flags and a wait once more."""
        job, group = self.job, self.group("dp")
        peers, stream, copy = len(group.ranks) - 1, COMM_STREAMS["dp"], _NCCL_COPY
        sequence = self.sequences.get(group.name, 0)
        self.sequences[group.name] = sequence + 1
        flags_ns = peers * _FLAG_NS
        gathered = Call(
            "_allgather_base", group, 16_777_216 // (peers + 1), 16_777_216, flags_ns, sequence,
        )  # fmt: skip
        self.program += [
            RecordEvent(self._new_event(), COMPUTE_STREAM, self.thread),
            WaitEvent(self.events, stream, self.thread),
        ]
        times = job.transfer_times("dp", group.ranks)
        took_ns = job.gather_ns * times / peers
        for phase in ("ready", "done"):
            first = phase == "ready"
            call = replace(gathered, phase=f"copies {phase}", role="flag")
            self.program += [
                Kernel(
                    copy, "record_param_comms" if first else "", stream, thread=self.thread,
                    call=call, copies=peers, launches=peers + 5 if first else 1, host_ns=12_000,
                ),
                Kernel(
                    "", "", stream, thread=self.thread, host_ns=3_000,
                    end_jitter_ns=round(abs(self.jitter.gauss(0, 800))),
                    call=replace(call, role="receive", transfer_ns=1_000),
                ),
            ]  # fmt: skip
            if not first:
                break
            for number in range(peers + 1):
                own_ns = 8_000 if number == 0 else took_ns * self.noise("copies").factor()
                self.program.append(
                    Kernel(copy, "", stream, round(own_ns), host_ns=4_000, thread=self.thread,
                           copied_bytes=4_194_304, batched=number > 0)
                )  # fmt: skip
        self.program.append(RecordEvent(self._new_event(), stream, self.thread))
        return _Work(self.events)


def build_programs(job: Job) -> list[list[Instruction]]:
    """The program of each rank: the steps before the recording and the recorded ones.

    At the last BeginStep the profiler stops, which synchronizes.
    """
    programs = []
    for rank in range(job.world_size):
        process = _Process(job, rank)
        for number in range(job.warmup + job.steps):
            process.run_step(number)
        process.program += [BeginStep(job.warmup + job.steps), Synchronize()]
        programs.append(process.program)
    return programs

"""Launch time of a model stage on the host, and how long the device waits for it."""

from __future__ import annotations

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.layer_time import LayerPass
from stepsplit.analyzer.model.memory_states import has_fp32_experts
from stepsplit.analyzer.model.parameters import divide_ceil, list_adapters

HOST = Formula(
    "step.host",
    "idle = max(0, launches of a pass - its compute and exposed communication); the backward"
    " launches as much as the forward, plus the recomputation; a CPU cannot launch while it"
    " computes, so all its launches are idle",
    "own; the launches of a layer as in step.host_calls, or calibrated",
)

HOST_CALLS = Formula(
    "step.host_calls",
    "a layer's forward takes the host host_call_ns (c + 2 per tp collective + 3 per further piece"
    " of a ring + 15 in 8 or 4 bits); a call is as long as torch's Linear, one of Transformer"
    " Engine's modules 2.7 of them",
    "NVIDIA/TransformerEngine, issues 2053 and 761; counts of calls: own",
)

TP_CALLS = 2
"""Calls of one collective: its launch, and the events between its stream and that of compute."""

RING_CALLS = 3
"""Calls of each further piece of a ring: send and receive, attention, and the merge."""

CAST_CALLS = 15
"""Calls more in 8 or 4 bits: each of four modules takes another 2.7, and the scales' updates."""

EXPERT_CALLS = 40
"""Calls of a layer with experts over those of a dense one: router, sorting, permutation, dispatch,
grouped GEMMs and combination, about 20 operations and their views."""

ADAPTER_CALLS = 0.08
"""Calls of an adapter over those of a layer: seven adapters add 28 to the 36 operations of
transformers' Llama forward, and 31 to the 69 backward."""


def compute_layer_host_ns(job: JobConfig) -> float:
    """Host time to launch the forward of a dense layer: measured, or HOST_CALLS.

    Two to seven times as long has been measured: by Megatron-Bridge on one cluster of H100 2.15 ms,
    by transformers on a virtual machine 2 ms.
    """
    return job.hardware.efficiency.host_ns or count_layer_calls(job) * job.hardware.host_call_ns


def count_layer_calls(job: JobConfig) -> int:
    """Calls of the host to launch the forward of a dense layer without adapters (HOST_CALLS)."""
    times, layout, training = job.profile.times, job.parallel, job.training
    calls = times.host_calls
    if job.runs_transformers and not training.compile:
        calls = times.eager_host_calls or calls
    if layout.tp > 1:
        # One collective at the end of attention and MLP, with sequence parallelism one before, too.
        calls += TP_CALLS * (4 if layout.sequence_parallel else 2)
    calls += RING_CALLS * (layout.ring - 1)
    if training.is_quantized:
        calls += CAST_CALLS
    return calls


def compute_launch_time(job: JobConfig, layers: int, expert_layers: int = 0) -> LayerPass:
    """Host time to launch one microbatch of a number of layers, some of them with experts.

    CUDA graphs of layers leave the experts to the host, one graph of the step leaves nothing.
    """
    graph = job.training.cuda_graph
    if graph == "step":
        return LayerPass(0.0, 0.0, 0.0)
    layer_ns = compute_layer_host_ns(job)
    # Calls of experts take as long as those of a layer whose time was measured.
    launch_ns = EXPERT_CALLS * layer_ns / count_layer_calls(job) * expert_layers
    if graph == "none":
        dense = sum(one.count for one in list_adapters(job)) * (layers - expert_layers)
        mixture = sum(one.count for one in list_adapters(job, expert=True)) * expert_layers
        launch_ns += layer_ns * (layers + ADAPTER_CALLS * (dense + mixture))
    recompute_ns = 0.0 if job.training.recompute in ("none", "selective") else launch_ns
    return LayerPass(launch_ns, launch_ns + recompute_ns, 0.0)


HOST_BOUND_RATIO = 0.7
"""Launch time over compute time from which a pass counts as host-bound."""


def is_host_bound(device: LayerPass, host: LayerPass) -> bool:
    """Whether launching takes about as long as computing."""
    compute_ns = device.forward_ns + device.input_ns + device.weight_ns
    return host.forward_ns + host.input_ns > HOST_BOUND_RATIO * compute_ns


def compute_host_wait(device: LayerPass, host: LayerPass, is_cpu: bool = False) -> LayerPass:
    """Device idle time of a pass because the host launches more slowly.

    is_cpu: one processor is both, and does not compute while it launches.
    """
    if is_cpu:
        return host
    backward_ns = device.input_ns + device.weight_ns
    return LayerPass(
        max(0.0, host.forward_ns - device.forward_ns), max(0.0, host.input_ns - backward_ns), 0.0
    )


EXPERT_LAUNCH = Formula(
    "step.expert_launches",
    "w (1 + n/32) per layer with n experts on the rank forward, twice that backward, in fp8 n/16:"
    " its many small kernels are launched after the host has read the counts of tokens; with CUDA"
    " graphs of layers w n/32, in fp8 n/16; 0 if one CUDA graph replays the step",
    "NVIDIA, Megatron-Core MoE report, arXiv:2603.07685, section 6 (host-bound experts); w: fitted",
)

DOUBLING_EXPERTS = 32
"""Experts of a rank whose own launches take as long as all others of a layer, in 16 bits."""


def compute_expert_wait(job: JobConfig, expert_layers: int) -> LayerPass:
    """Time that one microbatch waits for the launches of experts (EXPERT_LAUNCH)."""
    if job.model.experts is None or job.training.cuda_graph == "step":
        return LayerPass(0.0, 0.0, 0.0)
    if job.runs_transformers and not has_fp32_experts(job):
        # One grouped_mm of torch, which reads the counts of tokens on the device.
        return LayerPass(0.0, 0.0, 0.0)
    local = divide_ceil(job.model.experts.count, job.parallel.ep)
    casts = 2 if job.training.is_quantized else 1
    launches = local * casts / DOUBLING_EXPERTS
    if job.training.cuda_graph != "layers":
        launches += 1
    wait_ns = job.hardware.efficiency.expert_ns * expert_layers * launches
    formulas = (EXPERT_LAUNCH,) if wait_ns else ()
    return LayerPass(wait_ns, 2 * wait_ns, 0.0, formulas=formulas)

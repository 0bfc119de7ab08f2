"""Time of a layer's memory-bound operations: norms, residuals, rotary embedding, activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepsplit.analyzer.model.config import UNFUSED_PARTS, JobConfig, UnfusedPart
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import (
    count_hidden,
    find_known_unfused,
    is_autocast,
    is_clamped,
)
from stepsplit.analyzer.model.parameters import divide_ceil

# Operations that are fused, or cost a multiple of fused ones.

EAGER_TRAFFIC = 1.75
"""Memory traffic of unfused operations over fused ones (fitted on Megatron-LM of 2020)."""

SHARDED_TRAFFIC = 2.4
"""The same for models under FSDP, which also cast each gathered weight (fitted on llm-foundry)."""

COMPILED_TRAFFIC = 1.3
"""The same with torch.compile: its norms read and write at 0.8 of the rate of fused kernels
forward, 0.4 backward (cudnn-frontend's norm benchmark on H200 and GB200)."""


@dataclass(frozen=True, slots=True)
class ElementwiseTime:
    """Time of a layer's memory-bound operations in ns."""

    forward_ns: float
    backward_ns: float


def find_traffic(job: JobConfig) -> float:
    """Memory traffic of the framework's operations over that of fused ones."""
    training, model = job.training, job.profile.model
    if training.unfused is not None:
        return COMPILED_TRAFFIC if training.compile else 1.0
    if not model.eager:
        return 1.0
    if training.compile:
        return COMPILED_TRAFFIC
    return SHARDED_TRAFFIC if model.casts == "fsdp" and job.is_fsdp else EAGER_TRAFFIC


def time_elementwise(
    job: JobConfig, speed: DeviceSpeed, activations: float, routed_activations: float = 0.0
) -> ElementwiseTime:
    """Time of a layer with so many elements between the GEMMs of its MLP and of its experts."""
    counted = find_moved_bytes(job)
    if counted is not None:
        return _time_eager(job, speed, counted, activations, routed_activations)
    activations += routed_activations
    unfused = find_unfused_parts(job)
    fused = _time_fused(job, speed, activations, unfused)
    if not unfused:
        return fused
    sizes: dict[UnfusedPart, float] = {
        "norms": 2 * count_hidden(job),
        "rotary": count_rotated(job),
        "activation": activations,
    }
    parts = [part for part in sizes if part in unfused]
    moved, launches = dict(UNFUSED_MOVED), dict(UNFUSED_LAUNCHES)
    if is_clamped(job):
        moved["activation"], launches["activation"] = CLAMPED_MOVED, CLAMPED_LAUNCHES
    kernels = Moved(
        sum(launches[part].forward for part in parts),
        sum(launches[part].backward for part in parts),
    )
    moved_parts = [(moved[part], sizes[part]) for part in parts]
    apart = _sum_moved(speed, moved_parts, kernels, EAGER_RATE)
    return ElementwiseTime(
        fused.forward_ns + apart.forward_ns, fused.backward_ns + apart.backward_ns
    )


def _time_fused(
    job: JobConfig, speed: DeviceSpeed, activations: float, unfused: frozenset[UnfusedPart]
) -> ElementwiseTime:
    """Time of the operations of a layer that are fused, without those that are not."""
    model, size, traffic = job.model, job.training.activation_bytes, find_traffic(job)
    hidden, gates = count_hidden(job), 2 if model.gated else 1
    # A residual of each half; in a parallel block one sum of three for both halves.
    forward = backward = (4.0 if model.parallel_block else 6.0) * hidden
    kernels = 2
    if "norms" not in unfused:
        forward, backward, kernels = forward + 4 * hidden, backward + 6 * hidden, kernels + 2
    if "activation" not in unfused:
        forward += (gates + 1) * activations
        backward += (2 * gates + 1) * activations
        kernels += 1
    if "rotary" not in unfused:
        rotated = 0 if model.positions else 2 * count_rotated(job)
        forward, backward, kernels = forward + rotated, backward + rotated, kernels + 1
    if model.qk_norm:
        normed = count_rotated(job)
        forward, backward, kernels = forward + 2 * normed, backward + 3 * normed, kernels + 2
    masks = 2 * hidden * job.training.dropout
    return ElementwiseTime(
        speed.compute_memory_ns((forward * size + masks) * traffic, kernels),
        speed.compute_memory_ns((backward * size + masks) * traffic, kernels + 2),
    )


def time_activation(job: JobConfig, speed: DeviceSpeed, activations: float) -> float:
    """Time of the activation function's forward."""
    moved = find_moved_bytes(job)
    if moved is not None:
        return speed.compute_memory_ns(moved.ffn.forward * activations / moved.rate, 1)
    if "activation" in find_unfused_parts(job):
        unfused = CLAMPED_MOVED if is_clamped(job) else UNFUSED_MOVED["activation"]
        moved_bytes = unfused.forward * activations
        return speed.compute_memory_ns(moved_bytes / EAGER_RATE, 1)
    gates = 2 if job.model.gated else 1
    moved_bytes = (gates + 1) * activations * job.training.activation_bytes
    return speed.compute_memory_ns(moved_bytes * find_traffic(job), 1)


def count_rotated(job: JobConfig) -> float:
    """Elements of queries and keys with rotary embedding."""
    model, heads = job.model, divide_ceil(job.model.heads, job.parallel.tp)
    if model.latent is not None:
        return job.tokens * (heads + 1) * model.latent.rope
    return job.tokens * (heads + divide_ceil(model.kv_heads, job.parallel.tp)) * model.head_size


# Operations that run one by one: the bytes of the tensors that each of them reads and writes.

EAGER = Formula(
    "step.eager",
    "bytes that torch's operations read and write, one kernel each, counted as they run: with RMS"
    " norms under autocast 392 h + 28 f + 96 (a + k) d per layer and token, in bf16"
    " 298 h + 28 f + 53 (a + k) d; at 0.79 of the memory rate of fused kernels, GPT-2's at 0.94",
    "transformers 5, modeling_llama.py, modeling_gpt2.py, modeling_mixtral.py; rates: three Llama"
    " runs and one of GPT-2 on an H200",
)

EAGER_RATE = 0.79
"""Rate of unfused kernels, which cast and read in strides, over that of fused ones: 2.84 of
4.8 TB/s."""


EAGER_LAUNCH = 0.6
"""Time between two such kernels over the launch time of the family's kernels, which includes what a
kernel loses at its begin and end: 2.7 of 4.5 us, the median of seven recordings."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one element costs, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Bytes that a layer's unfused operations move, by what they move.

    hidden: an element of the hidden states; ffn: one between the MLP's GEMMs; heads: of queries and
    keys, for their rotary embedding; head_norm: the same, for their norms; expert_ffn: as ffn, in
    an expert; routed: an element that one expert gets and returns; mixed: of the hidden states that
    experts add up; router: a logit of the router. kernels: those of a layer. rate: that of the
    kernels over that of fused ones.
    """

    hidden: Moved
    ffn: Moved
    heads: Moved
    head_norm: Moved
    expert_ffn: Moved
    routed: Moved
    mixed: Moved
    router: Moved
    kernels: Moved
    rate: float = EAGER_RATE


AUTOCAST_MOVED = MovedBytes(
    Moved(106, 286), Moved(10, 18), Moved(36, 60), Moved(48, 116), Moved(20, 52), Moved(24, 56),
    Moved(4, 4), Moved(164, 124), Moved(45, 95),
)  # fmt: skip
"""Llama, Qwen3 and Mixtral with fp32 weights under autocast: hidden states have 32 bits, and so
have operations in experts (tests/model/test_eager_layers.py counts both tables)."""

HALF_MOVED = MovedBytes(
    Moved(84, 214), Moved(10, 18), Moved(20, 33), Moved(36, 92), Moved(10, 26), Moved(20, 56),
    Moved(12, 16), Moved(164, 124), Moved(40, 85),
)  # fmt: skip
"""The same with 16-bit weights, or as FSDP2 casts them: only norms compute in fp32."""

GPT_MOVED = MovedBytes(
    Moved(47, 128), Moved(76, 122), Moved(0, 0), Moved(0, 0), Moved(76, 122), Moved(24, 56),
    Moved(4, 4), Moved(164, 124), Moved(34, 58), rate=0.94,
)  # fmt: skip
"""GPT-2 with fp32 weights under autocast, whose tanh form of GELU runs in nine operations, all of
them fp32 (counted in a recording of an H200)."""

SCORES_MOVED = Moved(28, 28)
"""Bytes per score of attention that is scaled, masked, cast to fp32, normalized and cast back."""

DROPOUT_MOVED = Moved(10, 10)
"""Bytes per element of the hidden states that dropout after attention and MLP moves."""


ROUTING_KERNELS = Moved(20, 20)
"""Kernels that choose experts and sort tokens by them."""


def find_moved_bytes(job: JobConfig) -> MovedBytes | None:
    """What the framework's operations move if they run one by one and have been counted."""
    training, is_rms = job.training, job.model.norm == "rms"
    if training.unfused is not None and training.unfused != frozenset(UNFUSED_PARTS):
        return None
    if job.model.latent is not None or training.compile or training.activation_dtype == "fp32":
        return None
    if job.runs_transformers and is_autocast(job):
        return AUTOCAST_MOVED if is_rms else GPT_MOVED
    is_cast_by_fsdp = job.profile.model.casts == "fsdp" and job.is_fsdp
    if is_rms and (job.runs_transformers or is_cast_by_fsdp):
        return HALF_MOVED
    return None


# Parts that run one by one in a program that fuses the others.

UNFUSED = Formula(
    "step.unfused",
    "bytes that torch's operations read and write, forward and backward, one kernel each: 36 and 92"
    " of each element of an RMS norm, 20 and 28 of queries and keys rotated, 10 and 18 of a gated"
    " activation, 28 and 28 of a score; at 0.79 of the memory rate of fused kernels",
    "transformers 5, modeling_llama.py with 16-bit weights; checked on 401 runs of Hagemann et al.,"
    " arXiv:2311.05610",
)

UNFUSED_MOVED: Mapping[UnfusedPart, Moved] = {
    "norms": Moved(36, 92),
    "rotary": Moved(20, 28),
    "activation": Moved(10, 18),
    "softmax": SCORES_MOVED,
}
"""Bytes that an element of each part moves (tests/model/test_eager_layers.py counts them)."""

CLAMPED = Formula(
    "step.clamped_activation",
    "SwiGLU with clamps (gpt-oss) moves 44 bytes of an element forward and 104 backward as torch"
    " operations, weighted by the router's probabilities, and biases of experts 28 and 40 of each"
    " element that an expert returns; in Megatron-LM neither is taken as fused, except in its"
    " grouped MLP of 2026",
    "OpenAI, openai/gpt-oss, torch/model.py; counted as torch runs them"
    " (tests/model/test_eager_layers.py); runs of Megatron-Bridge on four devices take as long,"
    " although its bias_activation_fusion leaves only the clamps outside of a kernel",
)

CLAMPED_MOVED, CLAMPED_LAUNCHES = Moved(44, 104), Moved(11, 18)

EXPERT_BIASES_MOVED, EXPERT_BIAS_LAUNCHES = Moved(28, 40), Moved(6, 9)
"""Bytes of an element (CLAMPED), which tests/model/test_eager_layers.py counts, and kernels of a
layer, which no test counts."""

UNFUSED_LAUNCHES: Mapping[UnfusedPart, Moved] = {
    "norms": Moved(16, 32),
    "rotary": Moved(10, 14),
    "activation": Moved(2, 3),
    "softmax": Moved(5, 6),
}
"""Kernels of each part in a layer."""


def find_unfused_parts(job: JobConfig) -> frozenset[UnfusedPart]:
    """The parts that are not fused, if the model has them: torch runs a layer norm, and an
    activation that is not gated, in one kernel anyhow."""
    model, absent = job.model, set[UnfusedPart]()
    if model.norm == "layer":
        absent.add("norms")
    if model.positions:
        absent.add("rotary")
    if not model.gated:
        absent.add("activation")
    return (find_known_unfused(job) or frozenset()) - absent


def _time_eager(
    job: JobConfig,
    speed: DeviceSpeed,
    moved: MovedBytes,
    activations: float,
    routed_activations: float,
) -> ElementwiseTime:
    """Time of a layer whose operations run one by one (EAGER)."""
    parts = [(moved.hidden, count_hidden(job)), (moved.ffn, activations)]
    parts.append((moved.expert_ffn, routed_activations))
    if not job.model.positions:
        parts.append((moved.heads, count_rotated(job)))
    if job.model.qk_norm:
        parts.append((moved.head_norm, count_rotated(job)))
    if job.training.dropout:
        parts.append((DROPOUT_MOVED, count_hidden(job)))
    return _sum_moved(speed, parts, moved.kernels, moved.rate)


def time_softmax(job: JobConfig, speed: DeviceSpeed, scores: float) -> ElementwiseTime:
    """Time of the softmax of unfused attention."""
    eager = find_moved_bytes(job)
    if eager is not None or "softmax" in find_unfused_parts(job):
        rate = EAGER_RATE if eager is None else eager.rate
        return _sum_moved(speed, [(SCORES_MOVED, scores)], UNFUSED_LAUNCHES["softmax"], rate)
    training, size = job.training, job.training.activation_bytes
    moved = find_traffic(job) * ((5 if training.dropout else 4) * size + training.dropout)
    return ElementwiseTime(
        speed.compute_memory_ns(scores * moved, 5),
        speed.compute_memory_ns(scores * (moved + 2 * size), 6),
    )


def time_routing(job: JobConfig, speed: DeviceSpeed, routed: float) -> ElementwiseTime:
    """Time to hand so many tokens to experts and their results back."""
    elements, moved, experts = routed * job.model.hidden, find_moved_bytes(job), job.model.experts
    if moved is not None and experts is not None:
        logits = job.tokens * experts.count / job.parallel.sequence_split
        parts = [(moved.routed, elements), (moved.mixed, count_hidden(job)), (moved.router, logits)]
        return _sum_moved(speed, parts, ROUTING_KERNELS, moved.rate)
    routing_ns = speed.compute_memory_ns(4 * elements * job.training.activation_bytes, 4)
    if not job.model.biases or "activation" not in find_unfused_parts(job):
        return ElementwiseTime(routing_ns, routing_ns)
    biases = [(EXPERT_BIASES_MOVED, elements)]
    added = _sum_moved(speed, biases, EXPERT_BIAS_LAUNCHES, EAGER_RATE)
    return ElementwiseTime(routing_ns + added.forward_ns, routing_ns + added.backward_ns)


def _sum_moved(
    speed: DeviceSpeed, parts: list[tuple[Moved, float]], kernels: Moved, rate: float
) -> ElementwiseTime:
    forward_bytes = sum(each.forward * elements for each, elements in parts)
    backward_bytes = sum(each.backward * elements for each, elements in parts)
    return ElementwiseTime(
        speed.compute_memory_ns(forward_bytes / rate, round(EAGER_LAUNCH * kernels.forward)),
        speed.compute_memory_ns(backward_bytes / rate, round(EAGER_LAUNCH * kernels.backward)),
    )

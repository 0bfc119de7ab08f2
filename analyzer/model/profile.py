"""What frameworks and GPU families do, as data: the entries of presets/frameworks.toml and
efficiency.toml, decoded once into records that costs, messages and memory read.

Only the loaders here look a name up. Whatever else needs to know what a framework does reads a
field of its profile, so that a new framework is one entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, TypeVar

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    collect_kinds,
    decode_keys,
    decode_section,
    find_nearest_words,
    join_choices,
    list_required_keys,
    read_table,
)
from stepsplit.analyzer.model.config_limits import Natural, NonNegative
from stepsplit.analyzer.model.preset_names import PRESETS

_T = TypeVar("_T")

FRAMEWORKS_FILE = PRESETS / "frameworks.toml"

FAMILIES_FILE = PRESETS / "efficiency.toml"


# Where the value of a feature comes from.


class Origin(Enum):
    """Where a feature's value comes from, from the surest to the least sure."""

    STATED = "stated in job.toml"
    FITTED = "fitted on published runs"
    ASSUMED = "assumed"


# A framework: one entry of frameworks.toml, whose tables are the records below.


@dataclass(frozen=True, slots=True)
class FrameworkDefaults:
    """Values of the keys that a job.toml leaves out.

    Args:
        zero: ZeRO stage, unless the job states replicas.
        overlap: Whether gradient reduction overlaps the backward pass.
        expert_tp: Whether tp shards experts like the other weights.
        fused_loss: Whether the loss is fused, but with GPT's stored scores.
        fused_optimizer: Whether Adam is one kernel on a GPU.
        early_stop: Whether recomputation is torch's checkpoint, which stops early; other
            frameworks refuse the key.
        fp32_gradients: When gradients are reduced in fp32; else in the weights' dtype.
        stores_scores: Whether GPT on devices of the time before fused attention
            (DeviceBehavior.stores_scores) has the setup of the papers of then: stored scores,
            dropout, and a loss that is not fused.
    """

    zero: Natural = 0
    overlap: bool = False
    expert_tp: bool = False
    fused_loss: bool = False
    fused_optimizer: bool = True
    early_stop: bool = False
    fp32_gradients: Literal["always", "except-fp16", "never"] = "never"
    stores_scores: bool = False


@dataclass(frozen=True, slots=True)
class FrameworkModel:
    """How the model's code runs.

    Args:
        casts: What makes 16 bits of fp32 weights: the optimizer, which keeps both ("weights"),
            torch.autocast, or FSDP as it gathers, without which activations stay in fp32 ("fsdp").
        eager: Whether a model of plain PyTorch runs operation by operation, unless compiled.
        transformers: Whether the model is one of transformers: always, if it is plain (RMS norms,
            and the job states no kernels), or never.
        splits_transformers: Whether one that a config.json describes runs operation by operation,
            unlike the framework's own layers.
        vocabulary_multiple: The vocabulary is padded to a multiple of this times tp; 0: not.
        odd_vocabulary: Whether the head's rows may be no multiples of 16 bytes.
        adapters: Adapters of each linear layer by itself ("peft"), or, with collectives of their
            own, of those that are computed together ("parallel").
        cudnn: Whether attention calls cuDNN on devices where that is the fastest kernel.
        selective_ops: Whether selective recomputation saves every second GEMM (torchtitan), not
            all but attention's scores.
        cuda_graphs: Whether it can replay layers as CUDA graphs.
        row_scales: Whether its fp8 may have a scale per row, as torchao's; Transformer Engine has
            scales per tensor and per block alone.
    """

    casts: Literal["weights", "autocast", "fsdp"] = "weights"
    eager: bool = False
    transformers: Literal["always", "plain", "never"] = "never"
    splits_transformers: bool = False
    vocabulary_multiple: Natural = 0
    odd_vocabulary: bool = False
    adapters: Literal["parallel", "peft"] = "parallel"
    cudnn: bool = False
    selective_ops: bool = False
    cuda_graphs: bool = False
    row_scales: bool = False


@dataclass(frozen=True, slots=True)
class GradientBuckets:
    """Gradient buckets: in bytes (the first apart, for an early start), or in parameters, at least
    so many for each rank of the reduction. overlapped: only if the reduction overlaps the backward;
    else all gradients are one bucket."""

    first_bytes: Natural = 0
    each_bytes: Natural = 0
    parameters: Natural = 0
    parameters_per_rank: Natural = 0
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class FrameworkMessages:
    """The framework's collectives.

    Args:
        gathers_again: Whether sequence parallelism gathers the layers' inputs again in the
            backward; else they are kept as gathered.
        fp8_gather: When fp8 training gathers in 8 bits: always, with a scale per tensor, or never.
        whole_positions: Whether learned positions are added before the sequence is split, which
            leaves their gradients complete.
        torch_ring: Whether context parallelism is torch's context_parallel.
        copies_sequence: Whether tensor parallelism is torch's, which copies gathered sequences into
            the order of the batch.
        weights_sharded_from: The ZeRO stage from which weights are sharded.
        frees_units: Whether each gathered unit is freed after its forward, whatever a job states.
        gathers_modules: Whether positions and the final norm are gathered by themselves.
        buckets_shards: Whether sharded gradients are reduced in buckets of several units.
        every_microbatch: Whether ZeRO-2 reduces the gradients of every microbatch.
        all_reduces: Whether ZeRO-1 and 2 all_reduce whole gradients.
        broadcasts: Whether ZeRO-1 is torch's ZeroRedundancyOptimizer: all_reduces of gradients, and
            broadcasts of updated weights.
        wraps_replicas: When DistributedDataParallel wraps a model whose gradients are not sharded:
            always, if it has replicas, or never.
        shards_in_groups: Whether ZeRO-1 may shard over groups of ranks.
        max_zero: The highest ZeRO stage; zero_problem and zero_hint are the error above it.
        equal_stages: Whether a pipeline's stages must have equally many layers.
    """

    gathers_again: bool = False
    fp8_gather: Literal["always", "tensor-scaled", "never"] = "never"
    whole_positions: bool = False
    torch_ring: bool = False
    copies_sequence: bool = False
    weights_sharded_from: int = 3
    frees_units: bool = False
    gathers_modules: bool = False
    buckets_shards: bool = False
    every_microbatch: bool = False
    all_reduces: bool = False
    broadcasts: bool = False
    wraps_replicas: Literal["always", "replicated", "never"] = "never"
    shards_in_groups: bool = False
    max_zero: Natural = 3
    zero_problem: str = ""
    zero_hint: str = ""
    equal_stages: bool = False


@dataclass(frozen=True, slots=True)
class FrameworkMemory:
    """What the framework allocates besides saved activations.

    Args:
        low: Error band of a measured peak over the predicted one, before any calibration.
        high: Its upper end.
        states: Name of the formula of weights, gradients and optimizer states.
        copies_weights: Whether the optimizer updates fp32 copies of 16-bit weights.
        gradient_bytes: Bytes of the gradient of a 16-bit weight; 0: those of the reduction.
        gradient_copy: fp32 copies of such gradients in the optimizer: none, always there, or made
            for its step alone ("step"), of gradients in 16 bits and unless moments have them too.
        shards_gradients: Whether ZeRO-2 shards gradients; else they are whole, and with ZeRO-3
            counted with the optimizer states.
        frees_gradients: Whether gradients are freed after each step, as torch's zero_grad does.
        sums_unreduced: Whether a pipeline with ZeRO-3 adds up whole gradients, and reduces them
            once.
        reduces_copy: Whether a reduce_scatter reads a copy of the gradients in its dtype.
        gathered_bytes: Bytes of each weight and each gradient of the largest unit with ZeRO-3 by
            the framework's documents; 0: of the unit in use and the next, and what is reduced.
        logits_saved: Bytes of a logit kept with an unfused loss.
        logits_working: Bytes of a logit beside those during the loss's backward.
        logits_working_split: The same if tensor parallelism splits the vocabulary.
        logits_native: Bytes of a logit over those of a fused loss if torch's compiler fuses it,
            not a kernel that works in place; 0 if there is no such choice.
        logits_native_split: The same if tensor parallelism splits the vocabulary.
        logits_compiled: Both if torch.compile compiles the loss too; none: as without.
        logits_uncompiled: Bytes of a logit that a compiled loss does without, where only some
            releases of the framework compile it.
        experts_high: Upper end of the band of a model with experts whose job is no recipe; 0: high.
        pipeline_output: Bytes of each element of a stage's output that stays in flight.
        layer_gradient: Bytes for each weight of one layer that stay for gradients.
        workspace_bytes: Buffers of the GEMMs.
        reserved_gathering: Reserved over allocated bytes (low, expected, high) where FSDP gathers
            units; none: as without.
        nearly_full: Share of the memory from which on the allocator may free and retry; 0: none.
        input_of_activation: Whether what an MLP's activation saves depends on which one it is.
    """

    low: float
    high: float
    logits_saved: float
    logits_working: float
    logits_working_split: float
    states: Literal[
        "memory.states",
        "memory.states_megatron",
        "memory.states_deepspeed",
        "memory.states_fsdp",
    ] = "memory.states"
    copies_weights: bool = True
    gradient_bytes: Natural = 0
    gradient_copy: Literal["none", "kept", "step"] = "none"
    shards_gradients: bool = True
    frees_gradients: bool = False
    sums_unreduced: bool = False
    reduces_copy: bool = False
    gathered_bytes: Natural = 0
    logits_native: NonNegative = 0.0
    logits_native_split: NonNegative = 0.0
    logits_compiled: tuple[float, ...] = ()
    logits_uncompiled: NonNegative = 0.0
    experts_high: NonNegative = 0.0
    pipeline_output: NonNegative = 0.0
    layer_gradient: NonNegative = 0.0
    workspace_bytes: Natural = 0
    reserved_gathering: tuple[float, ...] = ()
    nearly_full: NonNegative = 0.0
    input_of_activation: bool = False


@dataclass(frozen=True, slots=True)
class FrameworkOffload:
    """What offloading does in the framework.

    Args:
        gradients: The offloaded state that takes the gradients along.
        keeps_master: Whether the fp32 weights of an offloaded optimizer stay on the device.
        each_backward: Whether gradients are copied in every backward, and weights return in 16
            bits.
        blocks: Whether copies of gradients that are accumulated overlap nothing.
    """

    gradients: Literal["", "optimizer", "parameters"] = ""
    keeps_master: bool = False
    each_backward: bool = False
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class FrameworkTimes:
    """What the framework's own operations cost.

    Args:
        host_calls: Calls of the host to launch the forward of a dense layer in 16 bits, each as
            long as one of torch's Linear (step.host_calls).
        eager_host_calls: The same where a model of transformers runs operation by operation; 0: as
            host_calls.
        accumulation: What adds up the gradients of microbatches: the GEMM itself ("gemm"), nothing
            that takes time ("free"), FSDP's reduction ("reduction"), or a kernel.
        accumulate_bytes: Bytes of such a kernel per parameter; 0: three times the gradient.
        unit_copy_bytes: Bytes per parameter of the copies around FSDP's collectives.
        cast_bytes: The same of autocast in a model of transformers.
        upcasts_loss: Whether the loss casts logits to fp32 by itself: in a model of transformers
            ("transformers") or unless it is fused ("unfused"), in both cases if not compiled.
        zeroes_gradients: Whether the optimizer step writes zeros to all gradients.
        least_error: Error that 9 of 10 runs stay below, where no band of published runs tells.
    """

    host_calls: Natural
    eager_host_calls: Natural = 0
    accumulation: Literal["gemm", "free", "reduction", "kernel"] = "kernel"
    accumulate_bytes: NonNegative = 0.0
    unit_copy_bytes: NonNegative = 0.0
    cast_bytes: NonNegative = 0.0
    upcasts_loss: Literal["never", "unfused", "transformers"] = "never"
    zeroes_gradients: bool = False
    least_error: NonNegative = 0.0


@dataclass(frozen=True, slots=True)
class FrameworkSearch:
    """What a search for layouts tries.

    Args:
        zero: ZeRO stages.
        pipeline_zero: The highest of them with a pipeline.
        schedules: Pipeline schedules; without those that are never faster or smaller.
        sequence_parallel: Whether to try sequence parallelism.
    """

    zero: tuple[Natural, ...] = (0,)
    pipeline_zero: Natural = 3
    schedules: tuple[str, ...] = ("1f1b",)
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes saved per element of a layer with 16-bit activations.

    norm_input and norm_output count for each of two norms, head_norm for queries and keys if their
    heads are normalized, mlp_first for each of the MLP's first GEMMs, scores for each score of
    unfused attention. Flags: expand_kv, keys and values copied to every query head; routed_output,
    the output of the experts; fp8_inputs, GEMMs in 8 or 4 bits save their inputs so.
    """

    norm_input: NonNegative
    norm_output: NonNegative
    head_norm: NonNegative
    residual: NonNegative
    query: NonNegative
    key: NonNegative
    value: NonNegative
    attention_output: NonNegative
    projection: NonNegative
    mlp_first: NonNegative
    mlp_gate: NonNegative
    mlp_second: NonNegative
    mlp_output: NonNegative
    scores: NonNegative
    expand_kv: bool
    routed_output: bool
    fp8_inputs: bool


VARIANTS = (
    "layer_norm", "half_layer_norm", "eager", "half", "single", "compiled", "half_compiled",
)  # fmt: skip
"""Tables of what differs of saved, by what the job has."""


Unnamed = Literal["sharded", "replicated", "torch", "torch-replicas"]
"""Kinds of jobs that name no framework."""


@dataclass(frozen=True, slots=True)
class FrameworkProfile:
    """What one framework does (an entry of frameworks.toml, which names the sources).

    rows names the published runs on which numbers were fitted. inferred: what is taken to run this
    framework if it names none (see infer_framework). variants is what differs of saved, by the name
    of its table. An entry also says which features ("times.host_calls") depend on the framework's
    release and which no document states (by_release, assumed): for who reads it.
    """

    name: str
    source: str
    aliases: tuple[str, ...]
    rows: tuple[str, ...]
    inferred: tuple[Unnamed, ...]
    defaults: FrameworkDefaults
    model: FrameworkModel
    buckets: GradientBuckets
    messages: FrameworkMessages
    memory: FrameworkMemory
    offload: FrameworkOffload
    times: FrameworkTimes
    search: FrameworkSearch
    saved: SavedBytes
    selective: SavedBytes
    variants: Mapping[str, Mapping[str, float | bool]]


_SECTIONS: Mapping[str, type] = {
    "defaults": FrameworkDefaults,
    "model": FrameworkModel,
    "buckets": GradientBuckets,
    "messages": FrameworkMessages,
    "memory": FrameworkMemory,
    "offload": FrameworkOffload,
    "times": FrameworkTimes,
    "search": FrameworkSearch,
}
"""The tables of an entry whose keys are features."""

_ENTRY_KINDS: Mapping[str, Any] = {
    "source": str,
    "same_layers_as": str,
    "inferred": tuple[Unnamed, ...],
    **dict.fromkeys(("aliases", "rows", "by_release", "assumed"), tuple[str, ...]),
    **dict.fromkeys((*_SECTIONS, "saved", "selective", *VARIANTS), dict[str, object]),
}


@lru_cache(maxsize=1)
def load_frameworks() -> Mapping[str, FrameworkProfile]:
    """The frameworks of frameworks.toml, by name. Raises DataError: one line with all typos."""
    presets, mistakes = read_table(FRAMEWORKS_FILE), Mistakes()
    profiles = {name: _decode_framework(presets, name, mistakes) for name in presets.values}
    mistakes.raise_all()
    return {name: profile for name, profile in profiles.items() if profile is not None}


def load_framework(name: str) -> FrameworkProfile:
    """The profile of a framework. Raises UsageError, which suggests similar names."""
    known = load_frameworks()
    if name not in known:
        near = join_choices(find_nearest_words(name, list_frameworks()))
        raise UsageError(f"unknown framework {name!r}; write {near}")
    return known[name]


def list_frameworks() -> tuple[str, ...]:
    """The names of the frameworks."""
    return tuple(load_frameworks())


def list_framework_aliases() -> dict[str, str]:
    """Other names of frameworks that are modelled alike, and theirs."""
    return {alias: name for name, one in load_frameworks().items() for alias in one.aliases}


def infer_framework(kind: Unnamed) -> str:
    """The framework of a job.toml that names none, with ZeRO-3 ("sharded") or not ("replicated"),
    or of a recording of a loop of one's own in torch, with replicas only ("torch-replicas") or
    not ("torch")."""
    return next(name for name, one in load_frameworks().items() if kind in one.inferred)


def _decode_framework(presets: TomlTable, name: str, mistakes: Mistakes) -> FrameworkProfile | None:
    """Decodes one entry; None if it has mistakes."""
    before, table = len(mistakes), presets.get_subtable(name)
    entry = decode_keys(table, _ENTRY_KINDS, mistakes, ("source", "memory", "times"))
    layers = presets.get_subtable(entry.get("same_layers_as", name))
    parts: dict[str, Any] = {
        key: decode_section(table, key, kind, None, mistakes)
        if key in table.values or list_required_keys(kind)
        else kind()
        for key, kind in _SECTIONS.items()
    }
    saved = decode_section(layers, "saved", SavedBytes, None, mistakes)
    if "saved" not in layers.values:
        hint = "give saved, or the framework of which it has the layers in same_layers_as"
        mistakes.append(table.build_error("saved", "missing", hint))
    variants = {}
    kinds = collect_kinds(SavedBytes)
    for variant in VARIANTS:
        # An entry's own table comes before that of the framework whose layers it has.
        own = table if variant in table.values else layers
        if variant in own.values:
            variants[variant] = decode_keys(own.get_subtable(variant), kinds, mistakes)
    features = {f"{key}.{each.name}" for key, kind in _SECTIONS.items() for each in fields(kind)}
    for key in ("by_release", "assumed"):
        for feature in entry.get(key, ()):
            if feature not in features:
                near = join_choices(find_nearest_words(feature, sorted(features)))
                problem = f"{feature!r} is not a feature"
                mistakes.append(table.build_error(key, problem, f"write {near}"))
    if len(mistakes) > before or saved is None:
        return None
    # Recomputation that is selective drops the scores alone, unless the entry says otherwise.
    without_scores = TomlTable(
        layers.where, layers.name, {"selective": layers.values["saved"] | {"scores": 0.0}}
    )
    own = layers if "selective" in layers.values else without_scores
    selective = decode_section(own, "selective", SavedBytes, None, mistakes)
    if selective is None:
        return None
    return FrameworkProfile(
        name=name,
        source=entry["source"],
        aliases=entry.get("aliases", ()),
        rows=entry.get("rows", ()),
        inferred=entry.get("inferred", ()),
        saved=saved,
        selective=selective,
        variants=variants,
        **parts,
    )


# A GPU family: the table "behavior" of its entry in efficiency.toml.


@dataclass(frozen=True, slots=True)
class DeviceBehavior:
    """What devices of one family do, besides what they reach of their peaks.

    Args:
        processor: Whether the device is a host's processor, which computes and launches in turn,
            has no memory besides the host's, and whose constants are guesses until calibrated.
        attention_kernel: Kernel of fused attention.
        cudnn: Whether cuDNN's is faster, for frameworks that call it.
        stores_scores: Whether attention was not fused yet in the time of the family
            (FrameworkDefaults.stores_scores).
        clocked_gemm: Fraction of the peak at their clock that large GEMMs reach; 0: not known.
        multiprocessor_bytes_per_ns: What a multiprocessor asks for with torch's own kernels; 0: not
            measured.
    """

    processor: bool = False
    attention_kernel: str = "flash-2"
    cudnn: bool = False
    stores_scores: bool = False
    clocked_gemm: NonNegative = 0.0
    multiprocessor_bytes_per_ns: NonNegative = 0.0


BEHAVIOR = "behavior"


@lru_cache(maxsize=1)
def _load_devices() -> Mapping[str, DeviceBehavior]:
    presets, mistakes = read_table(FAMILIES_FILE), Mistakes()
    tables = {name: presets.get_subtable(name) for name in presets.values}
    devices = {
        name: decode_section(table, BEHAVIOR, DeviceBehavior, DeviceBehavior(), mistakes)
        or DeviceBehavior()
        for name, table in tables.items()
    }
    mistakes.raise_all()
    return devices


def load_device(family: str) -> DeviceBehavior:
    """What devices of a family do; one without an entry does nothing of its own."""
    return _load_devices().get(family, DeviceBehavior())

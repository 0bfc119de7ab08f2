"""The features of a job: what its framework and its device do, each with the origin of its value
and the key of job.toml that would state it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from stepsplit.analyzer.model.config import (
    ContextKind,
    Dispatcher,
    JobConfig,
    ParallelConfig,
    Recompute,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_decode import collect_kinds
from stepsplit.analyzer.model.device_speed import choose_attention_kernel, is_attention_stated
from stepsplit.analyzer.model.hardware_config import (
    find_efficiency_origins,
    list_attention_kernels,
    load_attention_rate,
)
from stepsplit.analyzer.model.host_time import compute_layer_host_ns
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.profile import Origin

# Features with a key of their own, and what else is plausible where a job does not state it.

Section = Literal["training", "parallel", "hardware.efficiency"]

Change = Mapping[str, Any]
"""Fields of a section and their values."""


@dataclass(frozen=True, slots=True)
class KeyFeature:
    """A feature with a key of its own: the section and the field that hold its value.

    list_alternatives: the other plausible values in a job that does not state it, each as a change
    of the section. Without any, nothing in use differs from the value that is taken. moves is what
    another value can move: launches alone, launches and kernels, or messages too.
    """

    section: Section
    name: str
    list_alternatives: Callable[[JobConfig], Iterable[Change]] = lambda job: ()
    key_name: str = ""
    moves: Literal["launches", "kernels", "messages"] = "messages"

    @property
    def key(self) -> str:
        return f"{self.section}.{self.key_name or self.name}"

    def describe_value(self, job: JobConfig) -> str:
        """What is taken for it, in a word; "" for what the framework or the device decides."""
        value: object = getattr(_get_section(job, self.section), self.name)
        if isinstance(value, frozenset):
            return ", ".join(sorted(value)) or "none"
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value) if value else ""

    def list_choices(self) -> tuple[str, ...]:
        """The words that the key may have in job.toml; none of numbers, lists and names."""
        if self.section == "hardware.efficiency":
            return ()
        kinds = collect_kinds(TrainingConfig if self.section == "training" else ParallelConfig)
        kind: object = kinds[self.key_name or self.name]
        if kind is bool:
            return ("true", "false")
        return tuple(filter(None, get_args(kind))) if get_origin(kind) is Literal else ()

    def is_stated(self, job: JobConfig) -> bool:
        if self.section == "hardware.efficiency":
            efficiency = job.hardware.efficiency
            origins = find_efficiency_origins(job.hardware.family, efficiency)
            return job.stated is None or origins[self.name] is Origin.STATED
        return job.stated is None or self.key in job.stated


def change_job(job: JobConfig, section: Section, change: Change) -> JobConfig:
    """The job with other values of some fields of a section."""
    changed = replace(_get_section(job, section), **change)
    if section == "hardware.efficiency":
        return replace(job, hardware=replace(job.hardware, efficiency=changed))
    return replace(job, **{section: changed})


def _get_section(job: JobConfig, section: Section) -> Any:
    return job.hardware.efficiency if section == "hardware.efficiency" else getattr(job, section)


def _list_attention_kernels(job: JobConfig) -> Iterable[Change]:
    """The other kernels with a rate on the device, by the release of the framework or of torch.

    Not one that is more than twice as slow, unless torch may call it on its own: who calls
    kernels by choice chooses another.
    """
    family = job.hardware.family
    if not job.training.flash_attention or is_attention_stated(job):
        return
    chosen, known = choose_attention_kernel(job), list_attention_kernels(family)
    rate = load_attention_rate(chosen, family)
    for kernel in ("flash-2", "flash-3", "flash-4", "cudnn"):
        if kernel == chosen or kernel not in known:
            continue
        other = load_attention_rate(kernel, family)
        if other is None or rate is None:
            continue
        is_slow = 2 * other.rate.forward_flops_per_s < rate.rate.forward_flops_per_s
        if job.profile.model.eager or not is_slow:
            yield {"attention_kernel": kernel}


def _list_fused_loss(job: JobConfig) -> Iterable[Change]:
    """Where the loss takes longer for it; elsewhere it takes memory alone."""
    is_upcast = job.profile.times.upcasts_loss == "unfused" and not job.training.compile
    return ({"fused_loss": not job.training.fused_loss},) if is_upcast else ()


def _list_fused_optimizer(job: JobConfig) -> Iterable[Change]:
    return () if job.training.fused_optimizer else ({"fused_optimizer": True},)


def _list_unfused(job: JobConfig) -> Iterable[Change]:
    """The kernels of a library such as Liger or Transformer Engine in an eager model."""
    is_eager = job.profile.model.eager and not job.training.compile
    return ({"unfused": frozenset()},) if is_eager else ()


def _list_compile(job: JobConfig) -> Iterable[Change]:
    training = job.training
    is_eager = job.profile.model.eager and training.unfused is None and not training.compile
    return ({"compile": True},) if is_eager else ()


def _list_cuda_graphs(job: JobConfig) -> Iterable[Change]:
    if job.training.cuda_graph != "none":
        return ({"cuda_graph": "none"},)
    return ({"cuda_graph": "layers"},) if job.profile.model.cuda_graphs else ()


FULL = 0.9
"""Share of the memory from which on a job is likely to recompute what it can."""


def _list_recomputation(job: JobConfig) -> Iterable[Change]:
    training = job.training
    if training.recompute != "none" or training.recompute_parts:
        # A guess of whoever wrote the job: with less than that it may have run as well.
        usual: tuple[Recompute, ...] = ("none", "selective", "full")
        others = (one for one in usual if one != training.recompute)
        return [{"recompute": one, "recompute_parts": frozenset()} for one in others]
    peak_bytes = max(stage.total_bytes for stage in compute_memory(job))
    # Files that have no word for it say nothing of it, however much memory is left.
    if peak_bytes < FULL * job.hardware.memory_bytes and "training.recompute" not in job.unsaid:
        return ()
    return ({"recompute": "selective"}, {"recompute": "full"})


def _list_gradient_dtypes(job: JobConfig) -> Iterable[Change]:
    """Recipes reduce gradients in bf16 where the framework's default is fp32."""
    training = job.training
    is_fp32 = training.gradient_dtype == "fp32" and training.dtype not in ("fp32", "fp16")
    return ({"gradient_dtype": "bf16"},) if is_fp32 and job.parallel.gradient_ranks > 1 else ()


def _list_scalings(job: JobConfig) -> Iterable[Change]:
    training = job.training
    is_one = training.dtype == "fp8" and training.fp8_scaling == "tensor"
    return ({"fp8_scaling": "row"},) if is_one and job.profile.model.row_scales else ()


PACKED_TOKENS = 32768
"""Sequences of as many tokens are rarely one document."""

PACKED_DOCUMENTS = 8
"""Into so many equal ones a long sequence is cut where it is not stated: a guess, for lack of a
published distribution; with twice as many the attention of a step is halved."""


def _list_documents(job: JobConfig) -> Iterable[Change]:
    tokens = job.training.seq_len
    if tokens < PACKED_TOKENS or job.training.document_tokens:
        return ()
    return ({"document_tokens": tokens // PACKED_DOCUMENTS},)


def _list_overlaps(job: JobConfig) -> Iterable[Change]:
    """With the communication of one more axis overlapped, or without what the framework overlaps
    if asked to."""
    layout = job.parallel
    ranks = {"dp": layout.dp, "tp": layout.tp if layout.sequence_parallel else 1, "ep": layout.ep}
    others = [
        layout.overlap ^ {axis}
        for axis, size in ranks.items()
        if size > 1 and (axis not in layout.overlap or not job.profile.defaults.overlap)
    ]
    return [{"overlap": one} for one in others]


def _list_zero(job: JobConfig) -> Iterable[Change]:
    is_tried = job.parallel.zero == 0 and job.parallel.dp > 1 and 1 in job.profile.search.zero
    return ({"zero": 1},) if is_tried else ()


def _list_sequence_parallel(job: JobConfig) -> Iterable[Change]:
    is_tried = job.parallel.tp > 1 and job.profile.search.sequence_parallel
    return ({"sequence_parallel": not job.parallel.sequence_parallel},) if is_tried else ()


def _list_dispatchers(job: JobConfig) -> Iterable[Change]:
    if job.parallel.ep == 1:
        return ()
    others = (one for one in get_args(Dispatcher) if one != job.parallel.dispatcher)
    return [{"dispatcher": one} for one in others]


def _list_contexts(job: JobConfig) -> Iterable[Change]:
    if job.parallel.cp == 1:
        return ()
    others = (one for one in get_args(ContextKind) if one != job.parallel.context_kind)
    return [{"context_kind": one} for one in others]


def _list_chunks(job: JobConfig) -> Iterable[Change]:
    if job.parallel.schedule == "interleaved":
        return ({"schedule": "1f1b", "chunks": 1},)
    is_plain = job.parallel.pp > 1 and job.parallel.schedule == "1f1b"
    is_tried = is_plain and "interleaved" in job.profile.search.schedules
    return ({"schedule": "interleaved", "chunks": 2},) if is_tried else ()


SLOW_HOST_NS = 2.15e6
"""Host time of a layer's forward in Megatron-Bridge 0.1.0rc4 on one cluster of H100, where 0.25 ms
are taken; operations of an eager model of transformers need 1 ms (measured_jobs.csv)."""


def _list_host_times(job: JobConfig) -> Iterable[Change]:
    """Processors of half and twice the speed, and the slowest launches that were measured."""
    host_ns = compute_layer_host_ns(job)
    return [{"host_ns": host_ns / 2}, {"host_ns": max(2 * host_ns, SLOW_HOST_NS)}]


KEY_FEATURES = (
    KeyFeature("training", "flash_attention"),
    KeyFeature("training", "dropout"),
    KeyFeature("training", "fused_loss", _list_fused_loss, moves="kernels"),
    KeyFeature("training", "early_stop"),
    KeyFeature("training", "fused_optimizer", _list_fused_optimizer, moves="kernels"),
    KeyFeature("training", "gradient_dtype", _list_gradient_dtypes),
    KeyFeature("training", "activation_dtype"),
    KeyFeature("training", "moments_dtype"),
    KeyFeature("training", "master_weights"),
    KeyFeature("training", "attention_kernel", _list_attention_kernels, moves="kernels"),
    KeyFeature("training", "unfused", _list_unfused, moves="kernels"),
    KeyFeature("training", "compile", _list_compile),
    KeyFeature("training", "cuda_graph", _list_cuda_graphs, moves="launches"),
    KeyFeature("training", "recompute", _list_recomputation),
    KeyFeature("training", "fp8_scaling", _list_scalings),
    KeyFeature("training", "document_tokens", _list_documents),
    KeyFeature("parallel", "zero", _list_zero),
    KeyFeature("parallel", "overlap", _list_overlaps),
    KeyFeature("parallel", "expert_tp"),
    KeyFeature("parallel", "bucket_bytes"),
    KeyFeature("parallel", "reshard_after_forward"),
    KeyFeature("parallel", "sum_once"),
    KeyFeature("parallel", "root_unit"),
    KeyFeature("parallel", "sequence_parallel", _list_sequence_parallel),
    KeyFeature("parallel", "dispatcher", _list_dispatchers),
    KeyFeature("parallel", "context_kind", _list_contexts, key_name="context"),
    KeyFeature("parallel", "chunks", _list_chunks),
    KeyFeature("hardware.efficiency", "host_ns", _list_host_times, moves="launches"),
)
"""Keys whose values follow from the framework, or are usual, where a job leaves them out."""

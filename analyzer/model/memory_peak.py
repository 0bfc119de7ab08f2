"""The moments of a step at which the memory of a rank may be at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stepsplit.analyzer.model.comm_ops import count_kv_width, count_query_width, is_torch_ring
from stepsplit.analyzer.model.comm_volume import (
    find_reshard_policy,
    has_root_unit,
    is_kept_gathered,
)
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import (
    HALF_BYTES,
    MASK_BYTES,
    LayerActivations,
    LayersByKind,
    StageActivations,
    compute_final_norm_bytes,
    compute_input_bytes,
    compute_parameter_bytes,
    compute_stage_activations,
    count_hidden,
    count_moments_bytes,
    count_updated_bytes,
    find_offloaded_share,
    has_buckets,
    has_fp32_experts,
    is_autocast,
    shard_states,
    uses_foreach,
)
from stepsplit.analyzer.model.offload import OFFLOAD
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    count_stage_parameters,
    count_updated_parameters,
    count_vocabulary_parameters,
    select_trained,
)
from stepsplit.analyzer.model.profile import load_device
from stepsplit.analyzer.model.rank_layout import StageConfig, list_stages

# The moment at which a rank needs the most memory on top of its states.

PEAK = Formula(
    "memory.peak",
    "states + max over {the loss, the last layer's backward pass, the embedding's gradient, the"
    " optimizer step} of (activations in flight + what that moment needs)",
    "Korthikanti et al., arXiv:2205.05198, section 4.2.3",
)

MomentName = Literal["logits", "loss", "head", "backward", "first layer", "embedding", "optimizer"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory on top of the states at one moment of the step, in bytes.

    missing_gradients_bytes are those of the states' gradients that are not computed yet.
    """

    name: MomentName
    activations_bytes: int
    transient_bytes: int
    missing_gradients_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.activations_bytes + self.transient_bytes - self.missing_gradients_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory that a rank needs on top of its states; equal for all equal ranks.

    chunk_bytes are the activations of one chunk and microbatch in flight, offloaded_bytes the part
    of them that goes to the host, but for buffer_bytes of all together. The activations of moments
    come on top of those in flight; idle is the moment without any in flight.
    """

    chunk_bytes: int
    offloaded_bytes: int
    buffer_bytes: int
    moments: tuple[Moment, ...]
    idle: Moment
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def list_moments(self, in_flight: int) -> tuple[Moment, ...]:
        """The candidate moments for the peak, in the order of the step."""
        return (*(self._add_activations(moment, in_flight) for moment in self.moments), self.idle)

    def find_peak(self, in_flight: int) -> Moment:
        """The moment of the peak; which of the passes it is does not depend on in_flight."""
        busy = self._add_activations(max(self.moments, key=_sum_total_bytes), in_flight)
        return max(busy, self.idle, key=_sum_total_bytes)

    def _add_activations(self, moment: Moment, in_flight: int) -> Moment:
        saved_bytes = in_flight * self.chunk_bytes
        saved_bytes -= max(0, in_flight * self.offloaded_bytes - self.buffer_bytes)
        return Moment(
            moment.name,
            max(0, saved_bytes + moment.activations_bytes),
            moment.transient_bytes,
            moment.missing_gradients_bytes,
        )


def _sum_total_bytes(moment: Moment) -> int:
    return moment.total_bytes


def compute_needs(
    job: JobConfig,
    stage: StageConfig,
    parameters: StageParameters,
    layers: LayersByKind,
    gradients_bytes: int,
) -> MemoryNeeds:
    """Needs of a stage, and of all equal ones except the first, which sends no input gradient.

    gradients_bytes are those of the stage's states.
    """
    chunk = compute_stage_activations(job, stage, layers)
    persistent = count_persistent_bytes(job, parameters)
    formulas = [chunk.formula, *persistent.formulas]
    if stage.head:
        formulas.append(LOGITS)
    offloaded_bytes = round(chunk.saved_bytes * find_offloaded_share(job, stage))
    if offloaded_bytes:
        formulas.append(OFFLOAD)
    if is_torch_ring(job):
        formulas.append(RING)
    # Whether autograd allocates the gradients of each step anew, without a pipeline.
    if job.profile.memory.frees_gradients and job.parallel.pp == 1:
        build = FsdpStep if job.is_fsdp else TorchStep
        step = build(job, stage, parameters, layers, chunk, gradients_bytes)
        moments = tuple(step.list_moments())
        formulas += step.list_formulas()
    else:
        moments = tuple(_list_moments(job, stage, chunk, persistent.bytes))
    return MemoryNeeds(
        _compute_chunk_bytes(job, stage, chunk),
        offloaded_bytes,
        OFFLOAD_BUFFERS * chunk.saved_bytes * len(stage.chunks) // max(1, stage.layers),
        moments,
        Moment("optimizer", 0, compute_optimizer_bytes(job, parameters)),
        tuple(formulas),
    )


def _list_moments(
    job: JobConfig, stage: StageConfig, chunk: StageActivations, persistent_bytes: int
) -> Iterator[Moment]:
    """The moments of a framework that keeps its gradients from step to step."""
    if stage.head:
        # The head's backward pass: input and output of the final norm, logits, working memory.
        saved, working = compute_logits_bytes(job)
        around = (
            _compute_vocabulary_bytes(job) + compute_head_input_bytes(job)
        ) + compute_input_gradient_bytes(job, stage.index)
        yield Moment(
            "loss", saved + 2 * compute_input_bytes(job), persistent_bytes + working + around
        )
    # The last layer's backward pass, after its recomputation if there is any.
    needs = compute_layer_backward_bytes(job, stage) + chunk.recompute_bytes
    needs += compute_input_gradient_bytes(job, stage.index) + _count_ring_bytes(job)
    yield Moment("backward", 0, persistent_bytes + needs)
    if stage.embedding:
        chunk_bytes = _compute_chunk_bytes(job, stage, chunk)
        transient_bytes = persistent_bytes + _compute_vocabulary_bytes(job)
        yield Moment("embedding", -chunk_bytes, transient_bytes)


OFFLOAD_BUFFERS = 2
"""Layers whose offloaded activations are on the GPU, on their way to or from the host."""


def _compute_chunk_bytes(job: JobConfig, stage: StageConfig, chunk: StageActivations) -> int:
    """Saved activations of a chunk and microbatch, with its output and the embedding's mask."""
    extra = 0.0
    if job.parallel.pp > 1 and not stage.head:
        outputs = compute_input_bytes(job) / job.training.activation_bytes
        extra += outputs * job.profile.memory.pipeline_output
    if stage.embedding and job.training.dropout:
        extra += MASK_BYTES * count_hidden(job) / len(stage.chunks)
    return chunk.saved_bytes + round(extra)


RING = Formula(
    "memory.context_torch",
    "2 c K + 12 K + 4 Q + 2 (Q + K), Q and K elements of a rank's queries and of its keys and"
    " values: all ranks' keys and values, three fp32 copies of their gradients, the queries'"
    " gradients, and those of one piece",
    "PyTorch 2.13, _context_parallel/_attention.py, _templated_ring_attention_backward",
)


def _count_ring_bytes(job: JobConfig) -> int:
    """Memory of the backward of torch's context_parallel (RING)."""
    if not is_torch_ring(job):
        return 0
    cp, size = job.parallel.cp, job.training.activation_bytes
    queries, pairs = count_query_width(job), count_kv_width(job)
    return job.tokens * (size * cp * pairs + 12 * pairs + 4 * queries + size * (queries + pairs))


# A step of plain PyTorch: autograd computes gradients from the last layer to the first one.

TORCH = Formula(
    "memory.torch_step",
    "gradients exist from their backward to the optimizer step, which sets them to None (with"
    " several microbatches: always); autocast keeps a 16-bit copy of a weight from its forward to"
    " its backward",
    "pytorch/pytorch, torch/optim/optimizer.py, zero_grad; torch.autocast",
)

LOGITS_FORWARD = 1.5
"""Bytes of a logit in the forward of an unfused loss over the saved 4: in 16 bits, which the caller
holds, and in fp32."""


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The moments of a step of plain PyTorch on one rank (TORCH).

    gradients_bytes are all gradients of the rank. The activations of moments count on top of those
    of one chunk.
    """

    job: JobConfig
    stage: StageConfig
    parameters: StageParameters
    layers: LayersByKind
    chunk: StageActivations
    gradients_bytes: int

    def list_moments(self) -> Iterator[Moment]:
        """From the loss to the embedding's gradient."""
        yield from self._list_loss_moments()
        yield self._build_head_moment()
        # The last layer's backward, after its recomputation if there is any.
        needs = self._layer_needs + self.chunk.recompute_bytes
        needs += self._count_weights_bytes(max(self.parameters.largest_layer, self._copied_layers))
        below_head = self.parameters.total - (self.parameters.head or self.parameters.embedding)
        yield Moment("backward", 0, needs, self._count_missing(below_head))
        yield self._build_first_layer_moment()
        yield self._build_embedding_moment()

    def list_formulas(self) -> tuple[Formula, ...]:
        """The formulas that the moments follow."""
        return (TORCH,)

    def _list_loss_moments(self) -> Iterator[Moment]:
        """The loss's forward, where recomputation leaves copies of the layers to the forward alone,
        and its backward."""
        saved, working = compute_logits_bytes(self.job)
        held = compute_final_norm_bytes(self.job) + saved
        missing = self._count_missing(self.parameters.total)
        copied = self._head
        if self.chunk.recompute_bytes:
            logits = round(saved * LOGITS_FORWARD)
            weights = self._count_weights_bytes(self._cached_layers + self._head)
            yield Moment("logits", held, weights + logits, missing)
        else:
            copied += self._layer_matrices
        yield Moment("loss", held, working + self._count_weights_bytes(copied), missing)

    def _build_head_moment(self) -> Moment:
        """The head's backward, beside the 16-bit gradient of the logits."""
        needs = compute_head_input_bytes(self.job) + self._logits_gradient_bytes
        needs += self._count_gradient_needs(self._head)
        needs += self._count_weights_bytes(self._copied_layers)
        missing = self._count_missing(self.parameters.total)
        return Moment("head", compute_final_norm_bytes(self.job), needs, missing)

    def _build_first_layer_moment(self) -> Moment:
        """The first layer's backward: autograd is through with its MLP."""
        first, attention = self._first_layer, self.parameters.dense_layer.attention
        missing = attention + (self.parameters.embedding if self.parameters.head else 0)
        kept = first.total_bytes - self.chunk.saved_bytes - first.mlp - first.routed
        needs = self._layer_needs + self._count_weights_bytes(attention)
        return Moment("first layer", kept, needs, self._count_missing(missing))

    def _build_embedding_moment(self) -> Moment:
        """The embedding's gradient: the last one, unless a tied head has had it before."""
        needs = 2 * compute_input_bytes(self.job)
        if self._keeps_gradients or not self.parameters.head:
            trained = self._count_trained(self.parameters.embedding)
            needs += count_updated_bytes(self.job.training) * trained
        return Moment("embedding", -self.chunk.saved_bytes, needs)

    def _count_trained(self, parameters: int) -> int:
        """Those of so many parameters that have gradients: with adapters the share of all."""
        trained = select_trained(self.job, self.parameters)
        if trained is self.parameters:
            return parameters
        return parameters * trained.total // max(1, self.parameters.total)

    @property
    def _keeps_gradients(self) -> bool:
        """Whether an earlier microbatch has left its gradients."""
        return self.job.microbatches > 1

    @property
    def _head(self) -> int:
        return count_vocabulary_parameters(self.job) if self.stage.head else 0

    @property
    def _first_layer(self) -> LayerActivations:
        first = self.layers.dense if self.stage.dense_layers else self.layers.expert
        assert first is not None
        return first

    @property
    def _layer_matrices(self) -> int:
        """Weights of the layers of which autocast makes copies."""
        outside = self.parameters.embedding + self.parameters.head + self.parameters.final_norm
        outside += self.parameters.experts if has_fp32_experts(self.job) else 0
        return self.parameters.total - outside

    @property
    def _cached_layers(self) -> int:
        """Those whose copies autocast keeps for the whole forward: of weights that are trained."""
        return 0 if self.job.training.lora_rank else self._layer_matrices

    @property
    def _copied_layers(self) -> int:
        """Those whose copies stay until their backward."""
        return 0 if self.chunk.recompute_bytes else self._layer_matrices

    @property
    def _logits_gradient_bytes(self) -> int:
        return count_logits(self.job) * self.job.training.weight_bytes

    @property
    def _layer_needs(self) -> int:
        """Memory of the backward of one layer beside its activations and weights."""
        needs = compute_layer_backward_bytes(self.job, self.stage) + _count_ring_bytes(self.job)
        return needs + self._count_gradient_needs(self._matrix)

    @property
    def _matrix(self) -> int:
        """Weights of one matrix of a layer's MLP."""
        matrix = self.job.model.hidden * self.job.model.ffn // self.job.parallel.tp
        return min(matrix, self.parameters.largest_layer)

    def _count_gradients_bytes(self, parameters: int) -> int:
        """The rank's gradients of some of its parameters."""
        return self.gradients_bytes * parameters // max(1, self.parameters.total)

    def _count_missing(self, parameters: int) -> int:
        """Gradients of parameters whose backward is still to come."""
        return 0 if self._keeps_gradients else self._count_gradients_bytes(parameters)

    def _count_gradient_needs(self, matrix: int) -> int:
        """Memory to compute the gradients of a matrix."""
        copy = HALF_BYTES if is_autocast(self.job) else 0
        added = count_updated_bytes(self.job.training) if self._keeps_gradients else 0
        return self._count_trained(matrix) * (copy + added)

    def _count_weights_bytes(self, copied: int) -> int:
        """16-bit copies of so many weights, and DDP's buckets."""
        copies = HALF_BYTES * copied if is_autocast(self.job) else 0
        return copies + _count_bucket_bytes(self.job) * self._count_trained(self.parameters.total)


# A step of FSDP: units are gathered for their passes, and their gradients summed after them.

FSDP_STEP = Formula(
    "memory.fsdp_step",
    "the unit in use and the next one gathered, 2 (P_u + P_u'); after the unit's backward its"
    " gradients, 2 P_u, and the input of their reduce_scatter, g P_u, which stays until the next"
    " unit's is made; HSDP's all_reduced copies, g P_u/N, stay until the end of the backward",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277; PyTorch 2.13, _fully_shard/_fsdp_param_group.py,"
    " post_backward, and _fsdp_collectives.py, foreach_reduce",
)

UNREDUCED = Formula(
    "memory.unreduced",
    "g P of gradients that microbatches sum before the last one reduces them, unit by unit; the"
    " sharded gradients exist from then on",
    "PyTorch 2.13, _fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed",
)


@dataclass(frozen=True, slots=True)
class FsdpStep(TorchStep):
    """The moments of a step of FSDP on one rank (FSDP_STEP): weights and gradients are sharded.

    The backward goes through the units head (with the final norm), layers and embedding. As one
    unit, the root, head and embedding are gathered from the forward to the end of the backward, and
    their gradients are reduced last, since torch calls the root's post_backward there. If gradients
    are reduced only after the last microbatch, the moments are those of that one: the ones before
    have as many whole gradients at most, and no sharded ones.
    """

    def list_moments(self) -> Iterator[Moment]:
        """From the loss to the sum of the embedding's gradients."""
        yield from self._list_loss_moments()
        yield self._build_head_moment()
        yield from self._list_last_layer_moments()
        yield from self._list_first_layer_moments()
        yield from self._list_embedding_moments()

    def list_formulas(self) -> tuple[Formula, ...]:
        """The formulas that the moments follow."""
        return (TORCH, FSDP_STEP, UNREDUCED) if self._sums_once else (TORCH, FSDP_STEP)

    def _list_loss_moments(self) -> Iterator[Moment]:
        """The loss's forward after a forward that keeps little, and its backward."""
        saved, working = compute_logits_bytes(self.job)
        held, total = compute_final_norm_bytes(self.job) + saved, self.parameters.total
        if self.chunk.recompute_bytes:
            needs = round(saved * LOGITS_FORWARD) + self._count_gathered(self._last_unit, total)
            yield self._build_moment("logits", held, needs, total)
        kept = self._last_unit if find_reshard_policy(self.job) == "default" else 0
        needs = working + self._count_gathered(kept, total)
        yield self._build_moment("loss", held, needs, total)

    def _build_head_moment(self) -> Moment:
        """The head's backward, beside the 16-bit gradient of the logits; then the reduction of its
        gradients, unless they are part of the root's."""
        layer, last, total = self.parameters.largest_layer, self._last_unit, self.parameters.total
        needs = self._logits_gradient_bytes
        needs += self._count_trained(self._head) * self.job.training.weight_bytes
        needs += self._count_gathered(last + layer, total)
        if not self._is_root:
            reduction = self._count_reduction_bytes(last)
            needs = max(needs, reduction + self._count_gathered(layer, total - last))
        held = compute_final_norm_bytes(self.job)
        return self._build_moment("head", held, needs + compute_head_input_bytes(self.job), total)

    def _list_last_layer_moments(self) -> Iterator[Moment]:
        """The backward of the last layer, after its recomputation if there is any, while the input
        of the head's reduce_scatter exists; then of the one before and of the second layer, between
        which memory grows or shrinks evenly, while that of the layer above does."""
        layer, layers, root = self.parameters.largest_layer, self.stage.layers, self._root
        freed, needs = self._find_layer_needs()
        needs += self.chunk.recompute_bytes + self._root_gradients_bytes
        for done in sorted({0, min(1, max(0, layers - 2)), max(0, layers - 2)}):
            remaining = self.parameters.total - self._last_unit + root - done * layer
            gathered = self._count_gathered(2 * layer + root, remaining)
            held = self._count_input_bytes(layer if done else self._last_unit - root)
            activations = -freed - done * self.chunk.saved_bytes // layers
            yield self._build_moment("backward", activations, needs + gathered + held, remaining)

    def _list_first_layer_moments(self) -> Iterator[Moment]:
        """The first layer's backward, while the embedding is gathered; then the reduction of its
        gradients."""
        layer, first = self.parameters.largest_layer, self._first_unit
        freed, needs = self._find_layer_needs()
        kept = self._first_layer.total_bytes - self.chunk.saved_bytes - freed
        needs += self._root_gradients_bytes + self._count_input_bytes(layer)
        needs += self._count_gathered(layer + first, layer + first)
        yield self._build_moment("first layer", kept, needs, layer + first)
        needs = self._count_reduction_bytes(layer) + self._root_gradients_bytes
        needs += self._count_gathered(first, first)
        yield self._build_moment("first layer", -self.chunk.saved_bytes, needs, layer + first)

    def _list_embedding_moments(self) -> Iterator[Moment]:
        """The gradient of the embedding, while the input of the first layer's reduce_scatter
        exists; then the reduction of those of its unit, at the end of the backward."""
        layer, first = self.parameters.largest_layer, self._first_unit
        needs = self._count_input_bytes(layer) + 2 * compute_input_bytes(self.job)
        needs += self._count_gathered(first, first) + self._root_gradients_bytes
        needs += self._count_trained(self.parameters.embedding) * self.job.training.weight_bytes
        yield self._build_moment("embedding", -self.chunk.saved_bytes, needs, first)
        needs = self._count_reduction_bytes(first)
        yield self._build_moment("embedding", -self.chunk.saved_bytes, needs, first)

    def _build_moment(
        self, name: MomentName, activations_bytes: int, needs: int, remaining: int
    ) -> Moment:
        """A moment at which the gradients of so many parameters are still to be reduced."""
        # The whole gradients of earlier microbatches that are not reduced yet (UNREDUCED).
        trained = self._count_trained(remaining) if self._sums_once else 0
        transient_bytes = needs + (trained * self.job.training.gradient_bytes)
        transient_bytes += self._count_replica_sums_bytes(self.parameters.total - remaining)
        return Moment(name, activations_bytes, transient_bytes, self._count_missing(remaining))

    @property
    def _is_root(self) -> bool:
        """Whether embedding, final norm and head are one unit: the root."""
        return has_root_unit(self.parameters, self.job.parallel.root_unit)

    @property
    def _first_unit(self) -> int:
        """Parameters of the unit whose gradients are reduced last."""
        last = self.parameters.head + self.parameters.final_norm if self._is_root else 0
        return self.parameters.embedding + last

    @property
    def _last_unit(self) -> int:
        """Parameters of the unit that the head is in, the first one of the backward."""
        first = self.parameters.embedding if self._is_root else 0
        return first + self.parameters.head + self.parameters.final_norm

    @property
    def _root(self) -> int:
        """Parameters of the root, 0 if embedding and head are units of their own."""
        return self._last_unit if self._is_root else 0

    @property
    def _root_gradients_bytes(self) -> int:
        """The head's gradients, if they wait for the embedding's: they are the root's."""
        head = self._count_trained(self._head) if self._is_root else 0
        return head * self.job.training.weight_bytes

    @property
    def _keeps_gradients(self) -> bool:
        """Whether an earlier microbatch has left sharded gradients."""
        return self.job.microbatches > 1 and not self._sums_once

    @property
    def _sums_once(self) -> bool:
        """Whether earlier microbatches have left whole gradients (UNREDUCED)."""
        return self.job.parallel.sum_once and self.job.microbatches > 1

    def _find_layer_needs(self) -> tuple[int, int]:
        """Activations that a layer's backward has freed where it needs the most memory, and what it
        needs there besides activations and gathered weights: at the MLP's activation function, when
        the last matrix has its gradient; at the MLP's norm, when the MLP has; or at the first norm,
        when the whole layer has."""
        job, parameters = self.job, self.parameters
        own, layer = self.layers.expert or self.layers.dense, parameters.largest_layer
        mlp = layer - (parameters.expert_layer or parameters.dense_layer).attention
        start = compute_layer_backward_bytes(job, self.stage) + _count_ring_bytes(job)
        norm = compute_norm_backward_bytes(job)
        return max(
            (0, start + self._count_new_bytes(self._matrix)),
            (own.mlp + own.routed, norm + self._count_new_bytes(mlp)),
            (own.total_bytes - own.norms // 2, norm + self._count_new_bytes(layer)),
            # The moment that adds most over what the layer's backward has freed by then.
            key=lambda needs: needs[1] - needs[0],
        )

    def _count_new_bytes(self, parameters: int) -> int:
        """Gradients that autograd has computed in a layer's backward: matrix by matrix if it adds
        them to the sum of earlier microbatches, which has the dtype of the weights."""
        training = self.job.training
        if self._sums_once and training.gradient_bytes == training.weight_bytes:
            parameters = self._matrix
        return self._count_trained(parameters) * training.weight_bytes

    def _count_gathered(self, in_use: int, remaining: int) -> int:
        """Gathered weights: of the units in use, or of all remaining ones if they stay gathered
        until their backward."""
        is_kept = find_reshard_policy(self.job) == "never"
        return (remaining if is_kept else in_use) * self.job.training.weight_bytes

    def _count_input_bytes(self, unit: int) -> int:
        """The input of a unit's reduce_scatter."""
        return self._count_trained(unit) * _count_reduced_bytes(self.job)

    def _count_replica_sums_bytes(self, reduced: int) -> int:
        """The buffers of HSDP's all_reduces, which units keep until the end of the backward, unless
        they become the gradients themselves: in the same dtype, without any to add them to."""
        job, size = self.job, count_updated_bytes(self.job.training)
        is_gradient = _count_reduced_bytes(job) == size and not self._keeps_gradients
        if job.parallel.shard_replicas == 1 or is_gradient:
            return 0
        return self._count_gradients_bytes(reduced) * _count_reduced_bytes(job) // size

    def _count_reduction_bytes(self, unit: int) -> int:
        """Memory with which the gradients of a unit are reduced, the rank's own ones included: they
        are copied to a buffer, freed, and the buffer is reduced to the result. The sum of earlier
        microbatches includes the new gradients by then."""
        new = self._count_trained(unit) * self.job.training.weight_bytes
        copied = self._count_input_bytes(unit)
        if self._sums_once:
            return max(new, copied)
        return max(new + copied, copied + self._count_gradients_bytes(unit))


# Transient memory: gathered weights, gradients, logits.

GATHERED = Formula(
    "memory.gathered",
    "2 (unit + prefetched unit) gathered, all units if none is freed before its backward, 2 unit of"
    " gradients, with FSDP2 g unit of a copy that is reduced; with pipeline stages the gradients of"
    " the whole rank, and its weights unless they are freed after each forward pass; DeepSpeed"
    " 4 largest layer",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277; torchtitan, arXiv:2410.06511;"
    " DeepSpeed docs, memory.rst",
)

LOGITS = Formula(
    "memory.logits",
    "2TV'/t with a fused loss (its gradient takes their place), 4.5TV'/t where ddp or huggingface"
    " compile the loss too, else (4 + working) TV'/t; plus the head's gradient 2V'h/t, compiled"
    " under autocast with its fp32 copy 6V'h/t",
    "Korthikanti et al., arXiv:2205.05198, section 4.3; Hsu et al., Liger Kernel, arXiv:2410.10989",
)

DUMMY = Formula(
    "memory.layer_gradient",
    "2 bytes for each weight of one layer (one buffer per shape) besides the fp32 gradients",
    "Transformer Engine, get_dummy_wgrad",
)


BUCKETS = Formula(
    "memory.buckets",
    "DistributedDataParallel, besides the gradients: 2 g P, on a CPU g P; its buckets are g P",
    "torch/csrc/distributed/c10d/reducer.cpp; own measurements: over NCCL on an H100 (torch 2.11)"
    " 2.00 g P, over gloo on a CPU (torch 2.13) 1.00 g P",
)

KEPT_BUCKETS = 2
"""Copies of the gradients over NCCL, as in BUCKETS."""


@dataclass(frozen=True, slots=True)
class PersistentBytes:
    """Bytes that stay allocated throughout the passes, and their formulas."""

    bytes: int
    formulas: tuple[Formula, ...] = ()


def count_persistent_bytes(job: JobConfig, parameters: StageParameters) -> PersistentBytes:
    """Count the bytes that stay allocated throughout the passes (GATHERED and DUMMY).

    Under autocast (ddp, huggingface) the 16-bit copies of all weights live as long as the graph,
    and DistributedDataParallel keeps buckets in addition to the gradients.
    """
    trained = select_trained(job, parameters)
    if _is_gathered_once(job):
        gathered = job.training.weight_bytes * parameters.total
        return PersistentBytes(gathered + _count_sum_bytes(job, trained.total), (GATHERED,))
    if _sums_unreduced(job):
        unit = _count_gathered_unit_bytes(job, parameters.largest_layer, trained.largest_layer)
        return PersistentBytes(unit + _count_sum_bytes(job, trained.total), (GATHERED,))
    if job.is_fsdp and find_reshard_policy(job) == "never":
        unit = _count_unit_gradient_bytes(job, trained.largest_layer)
        gathered = job.training.weight_bytes * parameters.total
        return PersistentBytes(gathered + unit, (GATHERED,))
    if job.parallel.zero >= 3:
        unit = _count_gathered_unit_bytes(job, parameters.largest_layer, trained.largest_layer)
        return PersistentBytes(unit, (GATHERED,))
    copies = parameters.total * HALF_BYTES if is_autocast(job) else 0
    buckets = trained.total * _count_bucket_bytes(job)
    if copies or buckets:
        return PersistentBytes(copies + buckets, (BUCKETS,) if buckets else ())
    layer_copies = job.profile.memory.layer_gradient
    # TE keeps a 16-bit gradient of each weight's shape beside the fp32 sums that GEMMs write.
    is_summed_wide = job.training.gradient_bytes == 4 and job.training.weight_bytes == 2
    if not layer_copies or not is_summed_wide or job.training.lora_rank:
        return PersistentBytes(0)
    # Weights of one layer with one of its experts, because all experts have the same shapes.
    layer = parameters.expert_layer or parameters.dense_layer
    count = layer.attention + layer.mlp
    if parameters.expert_layer is not None and job.model.experts is not None:
        count += layer.experts * job.parallel.ep // job.model.experts.count
        count += parameters.dense_layer.mlp if parameters.dense_layers else 0
    return PersistentBytes(round(layer_copies * count), (DUMMY,))


def _count_bucket_bytes(job: JobConfig) -> int:
    """Bytes per parameter that DistributedDataParallel keeps besides the gradients (BUCKETS)."""
    if not has_buckets(job):
        return 0
    copies = 1 if load_device(job.hardware.family).processor else KEPT_BUCKETS
    return copies * count_updated_bytes(job.training)


def _is_gathered_once(job: JobConfig) -> bool:
    """Whether weights stay gathered: torchtitan gathers those of a pipeline stage once per step,
    unless they are freed after every forward pass."""
    return _sums_unreduced(job) and is_kept_gathered(job)


def _sums_unreduced(job: JobConfig) -> bool:
    """Whether microbatches add up whole gradients, which a pipeline of FSDP2 reduces once."""
    is_sharded = job.parallel.zero == 3 and job.parallel.pp > 1
    return is_sharded and job.profile.memory.sums_unreduced


def _count_sum_bytes(job: JobConfig, parameters: int) -> int:
    """The unreduced gradients that microbatches accumulate."""
    sums = job.training.gradient_bytes if job.microbatches > 1 else job.training.weight_bytes
    return parameters * sums


def _count_gathered_unit_bytes(job: JobConfig, unit: int, trained: int) -> int:
    """A gathered FSDP unit, the prefetched next one, and the gradients of the first, of which so
    many parameters are trained."""
    if each_bytes := job.profile.memory.gathered_bytes:
        return each_bytes * (unit + trained)
    return 2 * job.training.weight_bytes * unit + _count_unit_gradient_bytes(job, trained)


def _count_unit_gradient_bytes(job: JobConfig, unit: int) -> int:
    """Gradients of an FSDP unit, and FSDP2's copy of them that is reduced."""
    return (job.training.weight_bytes + _count_reduced_bytes(job)) * unit


def _count_reduced_bytes(job: JobConfig) -> int:
    """Bytes of a gradient in the input of FSDP2's reduce_scatter, which is a copy in the dtype of
    the reduction (FSDP_STEP)."""
    return job.training.gradient_bytes if job.profile.memory.reduces_copy else 0


def count_logits(job: JobConfig) -> int:
    """Count the logits of one microbatch on a rank of the last stage."""
    return job.tokens * (count_vocabulary_parameters(job) // job.model.hidden)


def compute_logits_bytes(job: JobConfig) -> tuple[int, int]:
    """Logits of one microbatch saved for the loss's backward, and its working memory."""
    known = job.profile.memory
    logits = count_logits(job)
    if job.training.fused_loss:
        return logits * job.training.weight_bytes, 0
    if job.training.compile and known.logits_compiled:
        saved, working = known.logits_compiled
        gradient = HALF_BYTES + (count_updated_bytes(job.training) if is_autocast(job) else 0)
        head = gradient * count_vocabulary_parameters(job)
        return round(logits * saved), round(logits * working) + head
    working = known.logits_working_split if job.parallel.tp > 1 else known.logits_working
    return round(logits * known.logits_saved), round(logits * working)


GATHERED_LOGIT_BYTES = 20.0
"""What a loss of plain torch keeps of a logit: in 16 bits as gathered over tp, in fp32, its softmax
and the gradients of these. Of 523 runs of Hagemann et al. (arXiv:2311.05610, their spreadsheets)
297 ran out of memory, from 80 GB less this much of a microbatch's logits on."""


def count_open_bytes(job: JobConfig, stage: int) -> tuple[int, int]:
    """What the peak of a stage may need less and more, by what the job does not say.

    Less: torchtitan compiles the loss too since 2025, which then saves no fp32 logits. More: a loss
    that is said to be fused may be so in a way that copies the logits; and programs of one's own on
    FSDP may keep the experts of a rank whole, where torchtitan shards them over its replicas.
    """
    less, more, known, training = 0, 0, job.profile.memory, job.training
    if job.stated is None or training.recipe:
        return 0, 0
    if list_stages(job)[stage].head:
        if training.fused_loss and "training.fused_loss" not in job.stated:
            is_split = job.parallel.tp > 1
            each = known.logits_native_split if is_split else known.logits_native
            more += round(count_logits(job) * each)
            if training.program:
                # Whoever writes the loss in torch gathers the logits of all ranks for it.
                more = max(more, round(job.tokens * job.padded_vocab * GATHERED_LOGIT_BYTES))
        if training.compile and not training.fused_loss:
            less += round(count_logits(job) * known.logits_uncompiled)
    shards = job.parallel.expert_shards
    if job.is_fsdp and job.parallel.ep > 1 and shards > 1:
        experts = count_stage_parameters(job)[stage].experts
        each_bytes = compute_parameter_bytes(training)
        held = shard_states(experts, 1, each_bytes, training, 0).total_bytes
        more += held - held // shards
    return less, more


def compute_head_input_bytes(job: JobConfig) -> int:
    """Gradient of the head's input and, with sequence parallelism, the gathered input and the
    reduced gradient."""
    own = compute_input_bytes(job)
    whole = own * job.parallel.sequence_split
    return whole + (whole + own if job.parallel.sequence_split > 1 else 0)


def _compute_vocabulary_bytes(job: JobConfig) -> int:
    """Gradient of the head or embedding, with the gathered weight if that is sharded."""
    parameters = count_vocabulary_parameters(job)
    weight_bytes = parameters * job.training.weight_bytes
    is_held = job.parallel.zero < 3 or _is_gathered_once(job)
    if job.training.lora_rank:
        return 0 if is_held else weight_bytes
    return weight_bytes if is_held else weight_bytes + _count_unit_gradient_bytes(job, parameters)


def compute_layer_backward_bytes(job: JobConfig, stage: StageConfig) -> int:
    """Peak working memory of one layer's backward pass, on top of saved activations.

    At the MLP's activation function: gradients of the layer's output and of the first GEMMs (that
    of the activated values replaces the values). With sequence parallelism the peak may be at the
    first GEMM: its gathered input and the gradient of that.
    """
    hidden = compute_input_bytes(job)
    width = job.model.ffn / job.parallel.tp
    if stage.expert_layers and job.model.experts is not None:
        experts = job.model.experts
        hidden += hidden * experts.top_k
        width = experts.top_k * experts.ffn / job.parallel.sequence_split / job.parallel.expert_tp
    width_bytes = round(job.tokens * width) * job.training.activation_bytes
    gathered = 2 * compute_input_bytes(job) * job.parallel.sequence_split - width_bytes
    activation = 2 * width_bytes if job.model.gated else width_bytes
    return hidden + (max(activation, gathered) if job.parallel.sequence_split > 1 else activation)


NORM_COPIES, FUSED_NORM_COPIES = 5, 2
"""Tensors of the hidden size beside the gradient of the residual in the backward of an RMS norm of
single operations, which are in fp32, and of a fused norm."""


def compute_norm_backward_bytes(job: JobConfig) -> int:
    """Peak working memory of a norm's backward pass, on top of saved activations."""
    is_fused = job.training.compile or job.model.norm != "rms"
    if is_fused:
        return (1 + FUSED_NORM_COPIES) * compute_input_bytes(job)
    return compute_input_bytes(job) + NORM_COPIES * 4 * count_hidden(job)


def compute_input_gradient_bytes(job: JobConfig, rank: int) -> int:
    """The input gradient that a stage sends to the stage before it."""
    return compute_input_bytes(job) if job.parallel.pp > 1 and rank > 0 else 0


def compute_optimizer_bytes(job: JobConfig, parameters: StageParameters) -> int:
    """Working memory of the optimizer step: the root of a moment of lists of tensors, an fp32 copy
    of Megatron-LM's gradients in 16 bits."""
    if "optimizer" in job.offloaded:
        return _count_bucket_bytes(job) * select_trained(job, parameters).total
    trained, updated = select_trained(job, parameters), count_updated_parameters(job, parameters)
    working_bytes = round(compute_parameter_bytes(job.training).gradient_copy * updated)
    if uses_foreach(job.training):
        each_bytes = count_moments_bytes(job.training) / 2
        working_bytes += round(each_bytes * trained.total / job.parallel.shard_size)
    return working_bytes + _count_bucket_bytes(job) * trained.total

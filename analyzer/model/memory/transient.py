"""What a rank holds only while something runs: gathered weights, gradients, logits."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory.activations import input_bytes
from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.memory.states import KEEPS_FP32
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.work.parameters import StageParameters, vocabulary_share

GATHERED = Formula(
    "memory.gathered",
    "2 (unit + prefetched unit) gathered, 2 unit of gradients, 4 unit where they are reduced in"
    " fp32; with pipeline stages the whole rank, and its gradients; DeepSpeed 4 largest layer",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277; torchtitan, arXiv:2410.06511;"
    " DeepSpeed docs, memory.rst",
)
LOGITS = Formula(
    "memory.logits",
    "2TV'/t with a fused loss (its gradient takes their place), else (4 + working) TV'/t;"
    " beside them the head's gradient 2V'h/t",
    "Korthikanti et al., arXiv:2205.05198, section 4.3; Hsu et al., Liger Kernel, arXiv:2410.10989",
)
DUMMY = Formula(
    "memory.layer_gradient",
    "2 bytes for each weight of one layer (one buffer a shape) beside the fp32 gradients",
    "Transformer Engine, get_dummy_wgrad",
)


def standing_bytes(job: Job, parameters: StageParameters) -> int:
    """What stays allocated throughout the passes: see GATHERED and DUMMY.

    Under autocast (ddp, huggingface) every weight's 16-bit copy lives as long as the graph, and
    DistributedDataParallel has buckets beside the gradients.
    """
    if _stays_gathered(job):
        return _kept_gathered(job, parameters.total)
    if job.layout.zero >= 3:
        return _gathered(job, parameters.largest_layer)
    if job.recipe.framework == "fsdp2" and job.layout.zero == 2:
        return 2 * parameters.total + _unit_gradients(job, parameters.largest_layer)
    if job.recipe.framework in KEEPS_FP32:
        return parameters.total * _autocast(job)
    kept = coefficients(job.recipe.framework).layer_gradient
    return round(kept * _one_of_each_shape(job, parameters)) if _fp32_gradients(job) else 0


def _autocast(job: Job) -> int:
    return (2 if job.recipe.dtype != "fp32" else 0) + _buckets(job)


def _buckets(job: Job) -> int:
    """Bytes of each gradient that DistributedDataParallel holds a second time."""
    plain = job.recipe.framework in KEEPS_FP32 and job.layout.zero < 2
    return 4 if plain and job.layout.gradient_ranks > 1 else 0


def _stays_gathered(job: Job) -> bool:
    """torchtitan gathers the weights of a pipeline stage once a step."""
    return job.recipe.framework == "fsdp2" and job.layout.zero == 3 and job.layout.pp > 1


def _kept_gathered(job: Job, parameters: int) -> int:
    """All weights, and the gradients that microbatches sum before they are reduced."""
    sums = job.recipe.gradient_bytes if job.microbatches > 1 else job.recipe.weight_bytes
    return parameters * (job.recipe.weight_bytes + sums)


def _gathered(job: Job, unit: int) -> int:
    """A gathered unit, the next one, and the gradients of the first."""
    if job.recipe.framework == "deepspeed":
        return 2 * 2 * unit
    return 2 * job.recipe.weight_bytes * unit + _unit_gradients(job, unit)


def _unit_gradients(job: Job, unit: int) -> int:
    reduced = 4 if job.recipe.framework == "fsdp2" and job.recipe.gradient_bytes == 4 else 0
    return (job.recipe.weight_bytes + reduced) * unit


def _fp32_gradients(job: Job) -> bool:
    return job.recipe.gradient_bytes == 4 and job.recipe.weight_bytes == 2


def _one_of_each_shape(job: Job, parameters: StageParameters) -> int:
    """Weights of one layer, of one expert in it: the experts of a rank share a shape."""
    layer = parameters.expert_layer or parameters.dense_layer
    found = layer.attention + layer.mlp
    if parameters.expert_layer is not None and job.model.experts is not None:
        found += layer.experts * job.layout.ep // job.model.experts.count
        found += parameters.dense_layer.mlp if parameters.dense_layers else 0
    return found


def logits_bytes(job: Job) -> tuple[int, int]:
    """The logits of one microbatch kept for the loss's backward pass, and what it needs beside."""
    found = coefficients(job.recipe.framework)
    logits = job.tokens * (vocabulary_share(job) // job.model.hidden)
    if job.recipe.fused_loss:
        return logits * job.recipe.weight_bytes, 0
    working = found.logits_working_split if job.layout.tp > 1 else found.logits_working
    return round(logits * found.logits_saved), round(logits * working)


def head_bytes(job: Job) -> int:
    """Around the head's product: the gradient of its weight, of its input, and, with sequence
    parallelism, the gathered input and the reduced gradient."""
    part = input_bytes(job)
    whole = part * job.layout.sequence_split
    return _vocabulary_bytes(job) + whole + (whole + part if job.layout.sequence_split > 1 else 0)


def _vocabulary_bytes(job: Job) -> int:
    """The gradient of the head or embedding, with the gathered weight where that is sharded."""
    each = vocabulary_share(job)
    if job.layout.zero < 3 or _stays_gathered(job):
        return each * job.recipe.weight_bytes
    return each * job.recipe.weight_bytes + _unit_gradients(job, each)


def layer_backward_bytes(job: Job, stage: Stage) -> int:
    """The most that the backward pass of one layer needs beside what it saved.

    At the activation of the MLP: the gradient of the layer's output and of the first products (that
    of the activated values takes the place of the values, which are no longer needed). With
    sequence parallelism, perhaps at the first product: its gathered input and that one's gradient.
    """
    hidden = input_bytes(job)
    width = job.model.ffn / job.layout.tp
    if stage.expert_layers and job.model.experts is not None:
        experts = job.model.experts
        hidden += hidden * experts.top_k
        width = experts.top_k * experts.ffn / job.layout.sequence_split / job.layout.expert_tp
    each = round(job.tokens * width) * job.recipe.activation_bytes
    gathered = 2 * input_bytes(job) * job.layout.sequence_split - each
    activation = 2 * each if job.model.gated else each
    return hidden + (max(activation, gathered) if job.layout.sequence_split > 1 else activation)


def embedding_bytes(job: Job) -> int:
    """The embedding's own gradient, as wide as the table."""
    return _vocabulary_bytes(job)


def handed_on_bytes(job: Job, rank: int) -> int:
    """The input gradient that a stage still sends to the stage before it."""
    return input_bytes(job) if job.layout.pp > 1 and rank > 0 else 0


def optimizer_bytes(job: Job, parameters: StageParameters) -> int:
    """What the optimizer step needs beside its states."""
    each = coefficients(job.recipe.framework).optimizer_working
    shared = round(each * parameters.total / job.layout.shard_size)
    return shared + _buckets(job) * parameters.total

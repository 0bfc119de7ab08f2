"""Why the states and the activations take what they take, with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.model.comm.calls import FULL_RECOMPUTE
from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory import activations, states
from stepsplit.analyzer.model.memory.recompute import EVERY, FULL, stage_activations
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage, stages_of
from stepsplit.analyzer.model.work.parameters import StageParameters, stage_parameters

_GPT_WHOLE, _GPT_SPLIT, _GPT_SCORES = 10, 24, 5
"""Bytes of Korthikanti et al., table 2: what tp leaves whole, what it divides, the scores."""


def of_memory(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """States of the fullest stage, and what one layer keeps of one microbatch."""
    fullest = max(prediction.memory, key=lambda stage: stage.total_bytes)
    if not job.recipe.offload:
        yield _states(job, fullest)
    yield _activations(job, stages_of(job)[fullest.stage])


def _states(job: Job, memory: StageMemory) -> Explained:
    value = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    held = stage_parameters(job)[memory.stage]
    each = states.parameter_bytes(job.recipe)
    symbols = (
        Symbol("P", f"parameters of a rank of stage {memory.stage}", held.dense, "parameters"),
        Symbol("N", "ranks that share their states (1: each has all)", job.layout.shard_size),
        *_experts(job, held),
        Symbol("w", "bytes of a weight", each.weights, "bytes"),
        Symbol("g", "bytes of a gradient", each.gradients, "bytes"),
        Symbol("o", "bytes of optimizer states a parameter", each.optimizer, "bytes"),
    )
    rules = [_sixteen(job, held)]
    if job.recipe.optimizer == "adam":
        rules.append(_doubling(memory))
    what = f"weights, gradients and optimizer of a rank of stage {memory.stage}"
    folk = differing(value, rules)
    return Explained(_states_formula(job), what, symbols, value, "memory_bytes", folk)


def _states_formula(job: Job) -> Formula:
    match job.recipe.framework:
        case "megatron":
            return states.MEGATRON
        case "deepspeed":
            return states.DEEPSPEED
        case "fsdp2" | "ddp" | "huggingface":
            return states.FSDP
    return states.STATES


def _sixteen(job: Job, held: StageParameters) -> RuleOfThumb:
    zero, recipe = job.layout.zero, job.recipe
    own = states.parameter_bytes(recipe)
    spread = f", by ZeRO-{zero} over N" if zero else ""
    value = held.dense * _paper_bytes(zero, job.layout.shard_size)
    value += held.experts * _paper_bytes(zero, states.expert_shards(job.layout))
    why = (
        f"{recipe.framework} with {recipe.dtype} and {recipe.optimizer} keeps"
        f" {own.weights} + {own.gradients} + {own.optimizer} bytes"
    )
    return RuleOfThumb(f"16 bytes a parameter (2 + 2 + 12){spread}", value, why)


def _paper_bytes(zero: int, n: int) -> float:
    """Bytes of one parameter on a rank (Rajbhandari et al., arXiv:1910.02054, figure 1)."""
    return (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[zero]


def _experts(job: Job, held: StageParameters) -> tuple[Symbol, ...]:
    if not held.experts:
        return ()
    shards = states.expert_shards(job.layout)
    return (
        Symbol("P_e", "parameters of its experts", held.experts, "parameters"),
        Symbol("N_e", "ranks that share theirs", shards),
    )


def _doubling(memory: StageMemory) -> RuleOfThumb:
    return RuleOfThumb(
        "the optimizer doubles the memory of the weights",
        2 * memory.weights_bytes,
        "Adam keeps two fp32 moments, 8 bytes a parameter, mixed precision an fp32 weight beside,"
        " and gradients come on top",
    )


def _activations(job: Job, stage: Stage) -> Explained:
    model, recipe, layout = job.model, job.recipe, job.layout
    symbols = (
        Symbol("s", "tokens a sequence", recipe.seq_len),
        Symbol("b", "sequences a microbatch", recipe.micro_batch),
        Symbol("c", "ranks of context parallelism", layout.cp),
        Symbol("h", "hidden size", model.hidden),
        Symbol("a", "heads", model.heads),
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("t", "ranks of tensor parallelism", layout.tp),
    )
    held = stage_activations(job, stage, activations.layers_of(job)).held_bytes
    value = held * len(stage.chunks) / stage.layers
    formula, rule = _kept(job)
    what = f"activations that a layer of stage {stage.index} keeps of one microbatch on a rank"
    return Explained(formula, what, symbols, value, "bytes", differing(value, [rule]))


def _kept(job: Job) -> tuple[Formula, RuleOfThumb]:
    if job.recipe.recompute in FULL_RECOMPUTE:
        why = "the input of each recomputed stretch stays, and one stretch at a time is whole"
        rule = RuleOfThumb("recomputing everything keeps O(1)", 0.0, why)
        return (FULL if job.recipe.recompute == "full" else EVERY), rule
    of_gpt = not (job.recipe.flash_attention or job.model.gated or job.model.experts)
    return (activations.KORTHIKANTI if of_gpt else activations.LAYER), _gpt_rule(job)


def _gpt_rule(job: Job) -> RuleOfThumb:
    model, layout = job.model, job.layout
    scores = _GPT_SCORES * model.heads * job.recipe.seq_len / model.hidden
    each = _GPT_WHOLE / layout.sequence_split + (_GPT_SPLIT + scores) / layout.tp
    why = "that is GPT in 16 bits with dropout, an MLP of 4h, and attention that keeps its scores"
    rule = "s b h (34 + 5 a s / h), spread by tp"
    return RuleOfThumb(rule, job.tokens * model.hidden * each, why)

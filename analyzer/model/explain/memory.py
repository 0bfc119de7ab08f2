"""Why the states of a rank take what they take, with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.explain.kept import kept_of_layer
from stepsplit.analyzer.model.memory import states
from stepsplit.analyzer.model.prediction import Prediction, StageMemory
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import stages_of
from stepsplit.analyzer.model.used import states_formula
from stepsplit.analyzer.model.work.parameters import StageParameters, stage_parameters

_MANY = 1000
"""Parameters enough to tell by their bytes what is shared."""


def of_memory(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """States of the fullest stage, and what one layer keeps of one microbatch."""
    fullest = max(prediction.memory, key=lambda stage: stage.total_bytes)
    if not job.recipe.offload:
        yield _states(job, fullest)
    yield kept_of_layer(job, stages_of(job)[fullest.stage])


def _states(job: Job, memory: StageMemory) -> Explained:
    value = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    held = stage_parameters(job)[memory.stage]
    each = states.parameter_bytes(job.recipe)
    symbols = (
        Symbol("P", f"parameters of a rank of stage {memory.stage}", held.dense, "parameters"),
        Symbol("N", "ranks that share their states", job.layout.shard_size),
        *_experts(job, held),
        Symbol("w", "bytes of a weight", each.weights, "bytes"),
        Symbol("g", "bytes of a gradient", each.gradients, "bytes"),
        Symbol("o", "bytes of optimizer states a parameter", each.optimizer, "bytes"),
    )
    rules = [_sixteen(job, held)]
    if job.recipe.optimizer == "adam":
        rules.append(_doubling(job, memory))
    what = f"weights, gradients and optimizer of a rank of stage {memory.stage}"
    folk = differing(value, rules)
    return Explained(
        states_formula(job), what, symbols, value, "memory_bytes", folk, _applied(job, held)
    )


def _applied(job: Job, held: StageParameters) -> str:
    """The bytes of a parameter as the ZeRO stage spreads them: "here 6 P + 12 P/N"."""
    parts = states.share(_MANY, 2, states.parameter_bytes(job.recipe), job.recipe, _stage(job))
    each = parts.weights_bytes, parts.gradients_bytes, parts.optimizer_bytes
    own = states.parameter_bytes(job.recipe)
    unsharded = own.weights, own.gradients, own.optimizer
    both = list(zip(each, unsharded, strict=True))
    whole = sum(n for found, n in both if found == n * _MANY)
    spread = sum(n for found, n in both if 0 < found < n * _MANY)
    terms = [f"{whole} P" * (whole > 0), f"{spread} P/N" * (spread > 0)]
    experts = ", for experts with P_e and N_e" if held.experts else ""
    return f"here {' + '.join(filter(None, terms))}{experts}"


def _stage(job: Job) -> int:
    """The ZeRO stage; FSDP2's second one shards at rest like the third."""
    zero = job.layout.zero
    return 3 if zero == 2 and job.recipe.framework == "fsdp2" else zero


def _sixteen(job: Job, held: StageParameters) -> RuleOfThumb:
    zero, recipe = job.layout.zero, job.recipe
    own = states.parameter_bytes(recipe)
    spread = f", by ZeRO-{zero} over N" if zero else ""
    value = held.dense * _paper_bytes(zero, job.layout.shard_size)
    value += held.experts * _paper_bytes(zero, job.layout.expert_shards)
    why = (
        f"{recipe.framework} with {recipe.dtype} and {recipe.optimizer} keeps"
        f" {own.weights} + {own.gradients} + {own.optimizer} bytes"
    )
    rule = f"16 bytes a parameter (2 + 2 + 12){spread}"
    return RuleOfThumb(rule, value, why, ("sixteen-bytes",))


def _paper_bytes(zero: int, n: int) -> float:
    """Bytes of one parameter on a rank (Rajbhandari et al., arXiv:1910.02054, figure 1)."""
    return (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[zero]


def _experts(job: Job, held: StageParameters) -> tuple[Symbol, ...]:
    if not held.experts:
        return ()
    shards = job.layout.expert_shards
    return (
        Symbol("P_e", "parameters of its experts", held.experts, "parameters"),
        Symbol("N_e", "ranks that share theirs", shards),
    )


def _doubling(job: Job, memory: StageMemory) -> RuleOfThumb:
    mixed = states.parameter_bytes(job.recipe).weights < 4
    return RuleOfThumb(
        "the optimizer doubles the memory of the weights",
        2 * memory.weights_bytes,
        "Adam keeps two fp32 moments, 8 bytes a parameter"
        + ", and an fp32 weight beside the 16-bit one" * mixed
        + "; gradients come on top",
        ("adam-doubles",),
    )

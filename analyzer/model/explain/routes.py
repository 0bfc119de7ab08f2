"""Why so many bytes go to experts, around the context and between stages of this job."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.model.comm.experts import EXPERTS
from stepsplit.analyzer.model.comm.pipeline import PIPELINE
from stepsplit.analyzer.model.explain.explained import Explained, Symbol
from stepsplit.analyzer.model.explain.messages import calls_of, messages_of_slowest, sent_bytes
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message, Prediction
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage, stages_of
from stepsplit.analyzer.model.used import CONTEXTS

_EXPERTS = ("ep", "expert-tp")


def of_routes(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """What the slowest stage's rank sends on ep, cp and pp, where it has them."""
    messages = messages_of_slowest(prediction)
    stage = stages_of(job)[prediction.splits.index(prediction.split)]
    experts = [one for one in messages if one.strategy in _EXPERTS]
    if experts:
        yield _sent(EXPERTS, "to and from experts", experts, _of_experts(job, stage))
    around = [one for one in messages if one.strategy == "cp"]
    if around:
        formula = CONTEXTS[job.layout.context_kind]
        yield _sent(formula, "around the context", around, _of_context(job, stage))
    between = [one for one in messages if one.strategy == "pp"]
    if between:
        yield _sent(PIPELINE, "to the stages beside it", between, _of_pipeline(job))


def _sent(
    formula: Formula, where: str, messages: list[Message], symbols: tuple[Symbol, ...]
) -> Explained:
    what = f"bytes that a rank of stage {messages[0].stage} sends {where} in a step"
    value = sent_bytes(messages)
    return Explained(formula, what, symbols, value, "bytes", note=calls_of(messages))


def _tokens(job: Job) -> tuple[Symbol, ...]:
    each = job.recipe.activation_bytes
    return (
        Symbol("m", "microbatches of a step", job.microbatches),
        Symbol("T", "tokens of a microbatch on a rank", job.tokens),
        Symbol("t", "ranks of tensor parallelism", job.layout.tp),
        Symbol("number", "bytes of one of them", each, "bytes"),
    )


def _of_experts(job: Job, stage: Stage) -> tuple[Symbol, ...]:
    top_k = job.model.experts.top_k if job.model.experts else 0
    return (
        *_tokens(job),
        Symbol("L", "layers with experts", stage.expert_layers),
        Symbol("top_k", "experts that a token passes", top_k),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("e", "ranks that share the experts of a layer", job.layout.ep),
    )


def _of_context(job: Job, stage: Stage) -> tuple[Symbol, ...]:
    return (
        *_tokens(job),
        Symbol("L", "layers", stage.layers),
        Symbol("c", "ranks of context parallelism", job.layout.cp),
        Symbol("a", "heads", job.model.heads),
        Symbol("k", "key-value heads", job.model.kv_heads),
        Symbol("d", "size of a head", job.model.head_size),
    )


def _of_pipeline(job: Job) -> tuple[Symbol, ...]:
    return (
        *_tokens(job),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("v", "stages on a rank", job.layout.stages_per_rank),
    )

"""Why a layer keeps so much until its backward pass, with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.model.comm.calls import FULL_RECOMPUTE
from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.explain.work import head_symbols
from stepsplit.analyzer.model.memory import activations
from stepsplit.analyzer.model.memory.recompute import stage_activations
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.used import kept_formula

_GPT_WHOLE, _GPT_SPLIT, _GPT_SCORES = 10, 24, 5
"""Bytes of Korthikanti et al., table 2: what tp leaves whole, what it divides, the scores."""
_PARTS = {
    "norms": "inputs and outputs of both norms, residuals",
    "heads": "queries, keys and values",
    "attention": "what attention keeps beside them, and its output",
    "masks": "dropout masks",
    "mlp": "the MLP",
    "routed": "experts and router",
}
"""Fields of LayerActivations."""


def kept_of_layer(job: Job, stage: Stage) -> Explained:
    """Bytes that a layer of the stage keeps of one microbatch, and what they are for."""
    layers = activations.layers_of(job)
    held = stage_activations(job, stage, layers).held_bytes
    value = held * len(stage.chunks) / stage.layers
    what = f"activations that a layer of stage {stage.index} keeps of one microbatch on a rank"
    symbols, rule, note = _tokens(job), _constant_rule(), ""
    if job.recipe.recompute not in FULL_RECOMPUTE:
        symbols, rule = (*symbols, *_widths(job), *_parts(stage, layers)), _gpt_rule(job)
        note = f"as {job.recipe.framework} saves it, item by item (presets/frameworks.toml)"
    found = differing(value, [rule])
    return Explained(kept_formula(job), what, symbols, value, "bytes", found, note)


def _tokens(job: Job) -> tuple[Symbol, ...]:
    return (
        Symbol("s", "tokens a sequence", job.recipe.seq_len),
        Symbol("b", "sequences a microbatch", job.recipe.micro_batch),
        Symbol("c", "ranks of context parallelism", job.layout.cp),
        Symbol("h", "hidden size", job.model.hidden),
        Symbol("t", "ranks of tensor parallelism", job.layout.tp),
    )


def _widths(job: Job) -> tuple[Symbol, ...]:
    model = job.model
    return (
        *head_symbols(model),
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("G", "products of the MLP (3 where gated)", 3 if model.gated else 2),
    )


def _parts(stage: Stage, layers: activations.Layers) -> Iterator[Symbol]:
    """What the bytes are for, on average over the layers of the stage; they add up to the value."""
    for name, meaning in _PARTS.items():
        total = stage.dense_layers * getattr(layers.dense, name)
        total += stage.expert_layers * getattr(layers.expert, name, 0)
        if total:
            yield Symbol(name, meaning, total / stage.layers, "bytes")


def _constant_rule() -> RuleOfThumb:
    why = "the input of each recomputed stretch stays, and one stretch at a time is whole"
    return RuleOfThumb("recomputing everything keeps O(1)", 0.0, why, ("recompute-all",))


def _gpt_rule(job: Job) -> RuleOfThumb:
    model, layout = job.model, job.layout
    scores = _GPT_SCORES * model.heads * job.recipe.seq_len / model.hidden
    each = _GPT_WHOLE / layout.sequence_split + (_GPT_SPLIT + scores) / layout.tp
    why = "that is GPT in 16 bits with dropout, an MLP of 4h, and attention that keeps its scores"
    rule = "s b h (34 + 5 a s / h), spread by tp"
    return RuleOfThumb(rule, job.tokens * model.hidden * each, why, ("activations-100b",))

"""Why so many parameters and FLOPs, and what share of the peak: with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from stepsplit.analyzer.model.comm.calls import FULL_RECOMPUTE
from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.work.conventions import CONVENTIONS, Convention
from stepsplit.analyzer.model.work.flops import RECOMPUTE, layer_weights
from stepsplit.analyzer.model.work.layers import dense_layer, expert_layer
from stepsplit.analyzer.model.work.mfu import MFU
from stepsplit.analyzer.model.work.parameters import TOTAL


def of_work(job: Job, prediction: Prediction) -> Iterator[Explained]:
    """Parameters, FLOPs of a step, MFU, and what recomputation adds where the job has it."""
    yield _parameters(job, prediction)
    yield _flops(job, prediction)
    if prediction.mfu is not None:
        yield _mfu(job, prediction, prediction.mfu)
    if prediction.hardware_flops != prediction.model_flops:
        yield _recompute(job, prediction)


def _parameters(job: Job, prediction: Prediction) -> Explained:
    model, value = job.model, prediction.parameters
    rule = RuleOfThumb(
        "12 L h^2",
        12 * model.layers * model.hidden**2,
        "leaves out the embedding and the head, and holds for an MLP of 4h without a gate, with"
        " as many key-value heads as heads",
    )
    return Explained(
        TOTAL, "parameters of the whole model", _shape(job), value, "parameters",
        differing(value, [rule]),
    )  # fmt: skip


def _shape(job: Job) -> tuple[Symbol, ...]:
    model = job.model
    symbols = (
        Symbol("L", "layers", model.layers),
        Symbol("h", "hidden size", model.hidden),
        *head_symbols(model),
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("G", "products of the MLP (3 where gated)", 3 if model.gated else 2),
        Symbol("V", "vocabulary", model.vocab),
    )
    if model.experts is None:
        return (
            *symbols,
            Symbol("layer", "parameters of one layer", dense_layer(model).total, "parameters"),
        )
    experts = (
        Symbol("layer", "parameters of one with experts", expert_layer(model).total, "parameters"),
        Symbol("E", "experts of a layer", model.experts.count),
        Symbol("k_top", "experts that a token passes", model.experts.top_k),
        Symbol("f_e", "width of an expert", model.experts.ffn),
    )
    return symbols + experts


def head_symbols(model: Transformer) -> tuple[Symbol, ...]:
    """How many heads, and how wide they are."""
    heads, latent = Symbol("a", "heads", model.heads), model.latent
    if latent is None:
        keys = Symbol("k", "key-value heads", model.kv_heads)
        return heads, keys, Symbol("d", "size of a head", model.head_size)
    return (
        heads,
        Symbol("r_q", "compressed size of a query", latent.query_rank),
        Symbol("r_kv", "compressed size of keys and values", latent.kv_rank),
        Symbol("d_k", "size of a key of one head", latent.nope + latent.rope),
        Symbol("d_v", "size of a value of one head", latent.value),
    )


def _flops(job: Job, prediction: Prediction) -> Explained:
    model, recipe, value = job.model, job.recipe, prediction.model_flops
    tokens = recipe.global_batch * recipe.seq_len
    rule = RuleOfThumb(
        "6 FLOPs a parameter and token",
        6 * prediction.parameters * tokens,
        "leaves out the attention core, and counts the embedding, which is a look-up"
        + (", and experts that a token does not pass" if model.experts else ""),
    )
    symbols = [
        Symbol("B", "sequences a step", recipe.global_batch),
        Symbol("s", "tokens a sequence", recipe.seq_len),
        Symbol("L", "layers", model.layers),
        Symbol("h", "hidden size", model.hidden),
        Symbol("V", "vocabulary, padded", job.padded_vocab),
    ]
    note = _of_products(model)
    if note:
        met = "weights of all layers that a token is multiplied with"
        symbols.append(Symbol("W", met, layer_weights(model), "parameters"))
    return Explained(
        CONVENTIONS[cast(Convention, prediction.convention)], "model FLOPs of a step, all ranks",
        tuple(symbols), value, "flops", differing(value, [rule]), note,
    )  # fmt: skip


def _of_products(model: Transformer) -> str:
    """How C1 reads where a layer is not GPT's; empty where it is."""
    gpt = replace(
        model, gated=False, experts=None, latent=None, ffn=4 * model.hidden,
        kv_heads=model.heads, head_size=model.hidden // model.heads,
    )  # fmt: skip
    if model == gpt:
        return ""
    core, widths = "12 L s a d), a d", model.heads * model.head_size
    if model.latent is not None:
        widths = model.heads * (model.latent.nope + model.latent.rope + model.latent.value)
        core = "6 L s a (d_k + d_v)), a (d_k + d_v)"
    return f"that is for GPT's layers; for these B s (6 W + 6 h V + {core} = {widths:,}"


def _mfu(job: Job, prediction: Prediction, value: float) -> Explained:
    symbols = (
        Symbol("F", "model FLOPs of a step", prediction.model_flops, "flops"),
        Symbol("T", "step time", prediction.split.step_ns, "ns"),
        Symbol("n", "ranks", job.layout.world_size),
        Symbol("P", f"dense peak, {job.recipe.dtype}", _peak(job), "flops_per_s"),
    )
    rules = []
    if prediction.hfu is not None:
        why = "counts what is recomputed as if it were the model's work: that is the HFU"
        rules.append(RuleOfThumb("all FLOPs that the GPUs execute", prediction.hfu, why))
    what = f"MFU by {prediction.convention}"
    return Explained(MFU, what, symbols, value, "ratio", differing(value, rules))


def _peak(job: Job) -> float:
    return job.hardware.peak_flops_per_s(job.recipe.dtype) or 0.0


def _recompute(job: Job, prediction: Prediction) -> Explained:
    value = prediction.hardware_flops / prediction.model_flops
    symbols = (
        Symbol("F", "model FLOPs of a step", prediction.model_flops, "flops"),
        Symbol("F_h", "FLOPs with recomputation", prediction.hardware_flops, "flops"),
    )
    whole = job.recipe.recompute in FULL_RECOMPUTE
    rule = RuleOfThumb(
        "recomputing doubles the compute",
        2.0,
        "only the forward pass runs again, and a backward pass is two forwards: 4 instead of 3"
        if whole
        else "only the attention core is computed again",
        ("recompute-all",),
    )
    what = f"hardware FLOPs over model FLOPs (recompute {job.recipe.recompute})"
    return Explained(RECOMPUTE, what, symbols, value, "", differing(value, [rule]))

"""Why so many parameters and FLOPs, and what share of the peak: with the job's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.work.conventions import CONVENTIONS, Convention
from stepsplit.analyzer.model.work.mfu import MFU
from stepsplit.analyzer.model.work.parameters import TOTAL, active_parameters

RECOMPUTE = Formula(
    "flops.recompute",
    "hardware FLOPs / model FLOPs; every layer recomputed: (3 + 1)/3, and the head once",
    "Narayanan et al., SC'21, arXiv:2104.04473, section 3.5 and eq. 3; Korthikanti et al.,"
    " arXiv:2205.05198, eq. 8",
)


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
        Symbol("a", "heads", model.heads),
        Symbol("k", "key-value heads", model.kv_heads),
        Symbol("d", "size of a head", model.head_size),
        Symbol("f", "width of the MLP", model.ffn),
        Symbol("G", "products of the MLP (3 where gated)", 3 if model.gated else 2),
        Symbol("V", "vocabulary", model.vocab),
    )
    if model.experts is None:
        return symbols
    experts = (
        Symbol("E", "experts of a layer", model.experts.count),
        Symbol("k_top", "experts that a token passes", model.experts.top_k),
        Symbol("f_e", "width of an expert", model.experts.ffn),
    )
    return symbols + experts


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
    if model.experts is not None:
        active = active_parameters(model)
        symbols.append(Symbol("N_active", "parameters that a token passes", active, "parameters"))
    return Explained(
        CONVENTIONS[cast(Convention, prediction.convention)], "model FLOPs of a step, all ranks",
        tuple(symbols), value, "flops", differing(value, [rule]),
    )  # fmt: skip


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
    rule = RuleOfThumb(
        "recomputing doubles the compute",
        2.0,
        "only the forward pass runs again, and a backward pass is two forwards: 4 instead of 3",
    )
    what = f"cost of recompute = {job.recipe.recompute}, times the model's work"
    return Explained(RECOMPUTE, what, symbols, value, "", differing(value, [rule]))

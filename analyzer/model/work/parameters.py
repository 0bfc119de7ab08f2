"""How many parameters a model has, how many a token uses, how many each rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage, each_once
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.work.layers import (
    LayerParameters,
    dense_layer,
    expert_layer,
    mlp_parameters,
    norm_parameters,
)
from stepsplit.analyzer.model.work.weights import of_experts, share

TOTAL = Formula(
    "parameters.total",
    "sum of layers + V h (embedding) + positions h + V h (head, unless tied) + final norm;"
    " GPT: 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h))",
    "Narayanan et al., SC'21, arXiv:2104.04473, eq. 2",
)
STAGE = Formula(
    "parameters.stage",
    "(attention + MLP)/t, experts/(e e_t), norms and row-parallel biases whole;"
    " first stage + V'h/t, last stage + V'h/t",
    "Shoeybi et al., arXiv:1909.08053, section 3; Narayanan et al., SC'21, arXiv:2104.04473",
)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """What one rank of a pipeline stage holds, before any sharding over data parallelism.

    dense counts all parameters whose gradients the dense data-parallel group sums: embedding,
    head and final_norm are among them. experts have a group of their own (Layout.expert_dp).
    dense_layer and expert_layer are one layer of each kind, dense_layers and expert_layers how
    many of them there are. embedding holds learned positions too; a tied head that lies on another
    rank than the embedding is a copy of it, on the same rank it counts once, as embedding.
    """

    stage: int
    dense: int
    experts: int
    embedding: int
    head: int
    final_norm: int
    dense_layer: LayerParameters
    expert_layer: LayerParameters | None
    dense_layers: int
    expert_layers: int

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def replicated(self) -> int:
        """Of the layers and the final norm, what every tensor-parallel rank holds whole."""
        count = self.final_norm + self.dense_layers * self.dense_layer.replicated
        if self.expert_layer is not None:
            count += self.expert_layers * self.expert_layer.replicated
        return count

    @property
    def largest_layer(self) -> int:
        """All parameters of the larger kind of layer that the rank holds; 0 without layers."""
        dense = self.dense_layer.total if self.dense_layers else 0
        return max(dense, self.expert_layer.total if self.expert_layer else 0)


def total_parameters(model: Transformer, vocab: int | None = None) -> int:
    """All parameters; vocab replaces the model's own where it is padded."""
    return _outside_layers(model, vocab) + _dense_sum(model) + _experts_sum(model)


def active_parameters(model: Transformer, vocab: int | None = None) -> int:
    """The parameters that one token passes: top_k of the experts, all of the rest."""
    if model.experts is None:
        return total_parameters(model, vocab)
    used = model.experts.top_k * mlp_parameters(model, model.experts.ffn)
    return _outside_layers(model, vocab) + _dense_sum(model) + model.expert_layers * used


def stage_parameters(job: Job) -> tuple[StageParameters, ...]:
    """One entry a pp coordinate: the parameters of one of its ranks."""
    layout, model = job.layout, job.model
    dense = dense_layer(model, layout.tp)
    experts = expert_layer(model, layout.tp, layout.ep, layout.expert_tp) if model.experts else None
    held = each_once(job, lambda stage: _stage(job, stage, dense, experts))
    return tuple(
        each if each.stage == rank else replace(each, stage=rank) for rank, each in enumerate(held)
    )


def _stage(
    job: Job, stage: Stage, dense: LayerParameters, experts: LayerParameters | None
) -> StageParameters:
    embedding, head = _embedding(job, stage), _head(job, stage)
    norm = norm_parameters(job.model) * sum(chunk.head for chunk in stage.chunks)
    in_layers = stage.dense_layers * dense.dense
    if experts is not None:
        in_layers += stage.expert_layers * experts.dense
    return StageParameters(
        stage=stage.index,
        dense=in_layers + embedding + head + norm,
        experts=stage.expert_layers * experts.experts if experts is not None else 0,
        embedding=embedding,
        head=head,
        final_norm=norm,
        dense_layer=dense,
        expert_layer=experts if stage.expert_layers else None,
        dense_layers=stage.dense_layers,
        expert_layers=stage.expert_layers,
    )


def vocabulary_share(job: Job) -> int:
    """The embedding, or the head, of one tensor-parallel rank: V'h/t."""
    return share(job.padded_vocab, job.layout.vocab_split) * job.model.hidden


def _embedding(job: Job, stage: Stage) -> int:
    """Learned positions are whole on every tensor-parallel rank."""
    if not stage.embedding:
        return 0
    return vocabulary_share(job) + job.model.positions * job.model.hidden


def _head(job: Job, stage: Stage) -> int:
    if not stage.head or (job.model.tied and stage.embedding):
        return 0
    return vocabulary_share(job)


def _outside_layers(model: Transformer, vocab: int | None) -> int:
    words = model.vocab if vocab is None else vocab
    copies = 1 if model.tied else 2
    return (copies * words + model.positions) * model.hidden + norm_parameters(model)


def _dense_sum(model: Transformer) -> int:
    moe = model.expert_layers
    count = (model.layers - moe) * dense_layer(model).dense
    return count + (moe * expert_layer(model).dense if moe else 0)


def _experts_sum(model: Transformer) -> int:
    if not model.expert_layers:
        return 0
    experts = of_experts(model)
    return model.expert_layers * experts.count * mlp_parameters(model, experts.ffn)

"""The model's shape, inferred from the input shapes of the ops that a trace recorded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from stepsplit.analyzer.arrays import union
from stepsplit.analyzer.model.config import LatentAttention, LoraTarget
from stepsplit.analyzer.split.host_steps import count_profiled_steps
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import Category, RankTrace
from stepsplit.collectors.formats.run_spec import Mesh

# What the shapes say about a decoder-only transformer.


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model and the batch, inferred from shapes; None is not inferred.

    The fields have the names and values of job.toml. microbatches are those of one rank and step,
    dtype is that of most GEMMs of the forward pass.
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    ffn: int | None = None
    gated: bool | None = None
    vocab: int | None = None
    tied: bool | None = None
    learned_positions: int | None = None
    norm: str | None = None
    biases: bool | None = None
    qkv_biases: bool | None = None
    qk_norm: bool | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    dense_layers: int | None = None
    latent: LatentAttention | None = None
    lora_rank: int | None = None
    lora_targets: tuple[LoraTarget, ...] | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    microbatches: int | None = None
    dtype: str | None = None


NO_SHAPE = ModelShape()


def infer_model_shape(split: RunSplit, mesh: Mesh | None, split_vocab: bool | None) -> ModelShape:
    """Infer the model from the shapes of all ranks.

    Args:
        split: The recording. Without `record_shapes` nothing is inferred.
        mesh: The mesh of the job. None: unknown; then the ranks count as replicas if each has both
            the embedding and the loss.
        split_vocab: Whether tensor parallelism shards the embedding. None: unknown.
    """
    found = {rank.trace.rank: collect_forward_ops(rank.trace) for rank in split.ranks}
    ops = {rank: one for rank, one in found.items() if one.gemms or one.attentions}
    passes = {rank: one.count_passes() for rank, one in ops.items()}
    known = [count for count in passes.values() if count]
    if not known:
        return ModelShape()
    passes = {rank: count or max(known) for rank, count in passes.items()}
    whole = mesh or (Mesh.of({}) if all(one.is_whole for one in ops.values()) else None)
    first = next((one for one in ops.values() if one.embeddings), None)
    last = next((one for one in ops.values() if one.losses), None)
    batch = _infer_batch(first or last, whole)
    ends = _infer_ends(ops, passes, batch)
    hidden = ends.hidden
    blocks = {
        rank: block
        for rank, one in ops.items()
        if hidden and (block := _infer_block(one, passes[rank], hidden, ends.vocab, whole))
    }
    block = next(iter(blocks.values()), None)
    layers = None
    if whole is not None:
        by_stage = {
            split.layout.find_stage(rank): sum(one.attentions.values()) / passes[rank]
            for rank, one in ops.items()
        }
        total = sum(by_stage.values())
        # Not known if a stage was not recorded, or its passes differ.
        if len(by_stage) == whole.size("pp") and total and float(total).is_integer():
            layers = int(total)
    mixture = [_infer_experts(one, passes[rank], hidden) for rank, one in ops.items()]
    experts = next((one for one in mixture if one is not None), _NO_EXPERTS)
    has_biases, has_qkv_biases = _infer_biases(ops.values(), hidden, ends.vocab, block)
    head_size = None
    if block and not block.latent and hidden != block.heads * block.head_size:
        head_size = block.head_size
    vocab, tp = ends.vocab, whole.size("tp") if whole else 1
    if vocab is not None and tp > 1 and (block is None or block.shards > 1):
        # Of the whole vocabulary a tensor-parallel rank may have one part.
        vocab = None if split_vocab is None else vocab * (tp if split_vocab else 1)
    norms = sum((one.norms for one in ops.values()), Counter[str]())
    dtypes = sum((one.dtypes for one in ops.values()), Counter[str]())
    # The microbatches of a step are its forward passes, if every step of every rank has as many.
    of_step = set()
    for recorded in split.ranks:
        steps = count_profiled_steps(recorded.trace) or len(recorded.steps)
        if recorded.trace.rank in passes and steps:
            of_step.add(passes[recorded.trace.rank] / steps)
    microbatches = of_step.pop() if len(of_step) == 1 else 0.5
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=block.heads if block else None,
        kv_heads=block.kv_heads if block else None,
        head_size=head_size,
        ffn=experts.dense_ffn or (block.ffn if block else None),
        gated=block.gated if block and experts.gated is None else experts.gated,
        vocab=vocab,
        tied=ends.tied,
        learned_positions=ends.learned_positions,
        # A layer norm has a shift, an RMS norm only a scale; others may run beside either.
        norm=max(norms, key=lambda name: norms[name], default=None),
        biases=has_biases,
        qkv_biases=has_qkv_biases,
        qk_norm=_infer_qk_norm(ops, passes),
        experts=next((one.experts for one in ops.values() if one.experts), None),
        top_k=experts.top_k,
        expert_ffn=experts.ffn,
        shared_ffn=experts.shared_ffn,
        dense_layers=experts.dense_layers,
        latent=block.latent if block else None,
        lora_rank=block.lora_rank if block else None,
        lora_targets=block.lora_targets if block else None,
        seq_len=batch.seq_len if batch else None,
        micro_batch=batch.micro_batch if batch else None,
        microbatches=int(microbatches) if microbatches.is_integer() else None,
        dtype=max(dtypes, key=lambda name: dtypes[name], default=None),
    )


def _infer_biases(
    ops: Iterable[ForwardOps], hidden: int | None, vocab: int | None, block: _Block | None
) -> tuple[bool | None, bool | None]:
    """Whether the GEMMs of the layers have a bias, and whether the projections to queries, keys and
    values alone have one; None if unknown."""
    gemms = sum((one.gemms for one in ops), Counter[LinearShape]())
    layer = [one for one in gemms if (one.inputs, one.outputs) != (hidden, vocab)]
    kinds = {one.bias for one in layer}
    if len(kinds) < 2:
        return (kinds.pop(), False) if kinds else (None, None)
    if block is None or block.ffn is None:
        return None, None
    width, kv = block.heads * block.head_size, block.kv_heads * block.head_size
    projections = {width // block.shards, kv // block.shards, (width + 2 * kv) // block.shards}
    biased = {(one.inputs, one.outputs) for one in layer if one.bias}
    is_of_qkv = biased <= {(hidden, outputs) for outputs in projections}
    return (False, True) if is_of_qkv else (None, None)


def _infer_qk_norm(ops: Mapping[int, ForwardOps], passes: Mapping[int, int]) -> bool | None:
    """Whether each head's queries and keys have a norm; not if there are two norms in a layer and
    one before the head."""
    if any(one.head_norms for one in ops.values()):
        return True
    known = [
        one.norms.total() == passes[rank] + 2 * sum(one.attentions.values())
        for rank, one in ops.items()
        if one.is_whole
    ]
    return False if known and all(known) else None


# The ends of the model: embedding, positions and output head.


@dataclass(frozen=True, slots=True)
class _Batch:
    """One microbatch of one rank."""

    micro_batch: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """The widths at both ends of the model, vocab as one rank has it."""

    hidden: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    learned_positions: int | None = None


def _infer_batch(ops: ForwardOps | None, mesh: Mesh | None) -> _Batch | None:
    """Sequences and tokens of a microbatch: the index of the embedding, else the attention."""
    if ops is None:
        return None
    ranks = mesh.size("cp") if mesh else 1
    index = max((one.index for one in ops.embeddings), key=prod, default=())
    if len(index) == 2:
        return _Batch(index[0], index[1] * ranks)
    attention = ops.main_attention
    if attention is None or not attention.batch:
        return None
    return _Batch(attention.batch, attention.seq_len * ranks)


def _infer_ends(
    ops: Mapping[int, ForwardOps],
    passes: Mapping[int, int],
    batch: _Batch | None,
) -> _Ends:
    """The ends from the ranks that have the embedding or the loss; a loss with fewer rows than half
    of the tokens is over classes, not over a vocabulary."""
    classes = next((width for one in ops.values() for width in one.losses), None)
    for rank, one in ops.items():
        # The embedding of the tokens has as many rows as the loss has classes, or else the most.
        tokens = max(
            one.embeddings,
            key=lambda each: (each.rows == classes, prod(each.index), each.rows),
            default=None,
        )
        if tokens is None:
            continue
        # A tied weight gets one gradient in a backward pass, embedding and head get one each.
        others = sum(each.rows == tokens.rows and each != tokens for each in one.embeddings)
        gradients = one.gradients[tokens.rows, tokens.width] - others * passes[rank]
        is_known = one.is_whole and gradients in (passes[rank], 2 * passes[rank])
        return _Ends(
            hidden=tokens.width,
            vocab=tokens.rows,
            tied=gradients == passes[rank] if is_known else None,
            learned_positions=_infer_positions(one, tokens),
        )
    widths = Counter(norm for one in ops.values() for norm in one.norm_widths.elements())
    tokens_of_loss = max((one.loss_rows for one in ops.values()), default=0)
    if batch is not None and 2 * tokens_of_loss < batch.micro_batch * batch.seq_len:
        classes = None
    return _Ends(hidden=max(widths, key=lambda w: widths[w], default=None), vocab=classes)


def _infer_positions(ops: ForwardOps, tokens: Embedding) -> int:
    """The rows of a second embedding, else of a weight that is added to the first one's output.

    Positions are looked up once for all sequences, or for each; a table of fewer rows than tokens
    in a sequence is one of token types.
    """
    index, width = tokens.index, tokens.width
    seq_len = index[1] if len(index) == 2 else 1
    tables = [
        one.rows
        for one in ops.embeddings
        if one != tokens
        and one.width == width
        and one.rows >= seq_len
        and (one.index == index or prod(one.index) == seq_len)
    ]
    weights = [
        shape[1]
        for shape in ops.gradients
        if len(shape) == 3 and shape[0] == 1 and shape[1] >= seq_len and shape[2] == width
    ]
    return max((*tables, *weights), default=ops.added_rows.get((*index, width), 0))


# The layers: attention and MLP, whose GEMMs must add up to those that ran.


@dataclass(frozen=True, slots=True)
class _Block:
    """The sizes of a layer; shards is the number of ranks over which its GEMMs are cut."""

    heads: int
    kv_heads: int
    head_size: int
    ffn: int | None
    gated: bool | None
    shards: int
    latent: LatentAttention | None = None
    lora_rank: int | None = None
    lora_targets: tuple[LoraTarget, ...] | None = None


def _infer_block(
    ops: ForwardOps, passes: int, hidden: int, vocab: int | None, mesh: Mesh | None
) -> _Block | None:
    """The layer of the rank; None without attention.

    Tensor parallelism shows local heads, and GEMMs of whole weights (DTensor) or of shards.
    """
    attention = ops.main_attention
    if attention is None:
        return None
    tp = mesh.size("tp") if mesh else 1
    layers = sum(ops.attentions.values())
    gemms = ops.count_gemms()
    if vocab is not None:
        gemms[hidden, vocab] -= passes if ops.losses else 0
    layer = Counter({one: count // layers for one, count in gemms.items() if count >= layers})
    adapters = _find_adapters(layer)
    for shards in dict.fromkeys((1, tp)):
        scaled = attention.scale(tp // shards)
        match = _match_layer(layer - adapters.gemms, hidden, scaled)
        if match is not None:
            kv_heads, ffn, gated = match
            return _Block(
                attention.heads * tp, kv_heads * shards, attention.head_size,
                ffn * shards, gated, shards, None, adapters.rank,
                adapters.find_targets(hidden, ffn, scaled.heads * scaled.head_size),
            )  # fmt: skip
    whole = attention.scale(tp)
    if attention.value_size != attention.head_size:
        latent = _match_latent(gemms, hidden, attention) if tp == 1 else None
        if latent is None:
            return None
        return _Block(whole.heads, whole.heads, whole.head_size, None, None, tp, latent)
    return _Block(whole.heads, whole.kv_heads, whole.head_size, None, None, tp)


_Gemm = tuple[int, int]
"""(input width, output width)"""


@dataclass(frozen=True, slots=True)
class _Adapters:
    """The GEMMs of a layer's low-rank adapters; rank is None without any."""

    gemms: Counter[_Gemm] = field(default_factory=Counter)
    rank: int | None = None

    def find_targets(self, hidden: int, ffn: int, queries: int) -> tuple[LoraTarget, ...] | None:
        """The linear layers with adapters, None if all have one or none has; the adapter of a
        square matrix counts for queries before it does for the output of attention."""
        if self.rank is None:
            return None
        downs = {inputs: n for (inputs, outputs), n in self.gemms.items() if outputs == self.rank}
        ups = {outputs: n for (inputs, outputs), n in self.gemms.items() if inputs == self.rank}
        mlp = downs.get(ffn, 0) + ups.get(ffn, 0) + ups.get(2 * ffn, 0)
        back = ups.get(hidden, 0) - downs.get(ffn, 0)
        output = downs.get(queries, 0) if queries != hidden else max(0, back - 1)
        qkv = sum(ups.values()) - mlp - output
        counts: dict[LoraTarget, int] = {"qkv": qkv, "output": output, "mlp": mlp}
        found = tuple(target for target, count in counts.items() if count)
        return None if len(found) == len(counts) else found


RANK_SHARE = 4
"""An adapter's rank is at most one of so many parts of the widths of its linear layer."""


def _find_adapters(layer: Counter[_Gemm]) -> _Adapters:
    """The pairs of GEMMs through a narrow width that run beside a GEMM of the layer."""
    for rank in sorted({outputs for _, outputs in layer}):
        downs = Counter({one: n for one, n in layer.items() if one[1] == rank})
        ups = Counter({one: n for one, n in layer.items() if one[0] == rank})
        narrowest = min((*(x for x, _ in downs), *(y for _, y in ups)))
        if downs.total() != ups.total() or RANK_SHARE * rank > narrowest:
            continue
        if all(any((x, y) in layer for x, _ in downs) for _, y in ups):
            return _Adapters(downs + ups, rank)
    return _Adapters()


_Grouped = tuple[int, int, int, int]
"""(rows, experts, input width, output width)"""


def _match_layer(
    layer: Counter[_Gemm], hidden: int, attention: Attention
) -> tuple[int, int, bool] | None:
    """(kv_heads, ffn, gated) for which attention and MLP have exactly these GEMMs."""
    width, head = attention.heads * attention.head_size, attention.head_size
    keys = [out // head for each, out in layer if each == hidden and out % head == 0]
    for kv_heads in dict.fromkeys((attention.kv_heads, *keys)):
        kv = kv_heads * head
        for projections in (
            Counter({(hidden, width + 2 * kv): 1}),
            Counter([(hidden, width), (hidden, kv), (hidden, kv)]),
            Counter([(hidden, width), (hidden, 2 * kv)]),
        ):
            rest = Counter(layer)
            rest.subtract(projections + Counter([(width, hidden)]))
            mlp = _match_mlp(+rest, hidden) if min(rest.values()) >= 0 else None
            if mlp is not None and attention.heads % kv_heads == 0:
                return kv_heads, *mlp
    return None


def _match_latent(
    gemms: Iterable[_Gemm], hidden: int, attention: Attention
) -> LatentAttention | None:
    """Latent attention, which has other sizes of keys than of values: a GEMM makes both from
    compressed ones, which come with the rotary part of the keys from another."""
    known, value = set(gemms), attention.value_size
    width = attention.heads * attention.head_size
    ranks = [r for r, out in known if out == width and r != hidden and (hidden, r) in known]
    for kv_rank, out in known:
        nope = out // attention.heads - value
        rope = attention.head_size - nope
        if out % attention.heads or nope <= 0 or rope <= 0:
            continue
        if (hidden, kv_rank + rope) in known and (ranks or (hidden, width) in known):
            return LatentAttention(ranks[0] if ranks else 0, kv_rank, nope, rope, value)
    return None


def _match_mlp(rest: Counter[_Gemm], hidden: int) -> tuple[int, bool] | None:
    """(ffn, gated) of an MLP with exactly these GEMMs."""
    for ffn, out in rest:
        if out != hidden:
            continue
        if rest == Counter([(hidden, ffn), (ffn, hidden)]):
            return ffn, False
        if rest in (
            Counter([(hidden, ffn), (hidden, ffn), (ffn, hidden)]),
            Counter([(hidden, 2 * ffn), (ffn, hidden)]),
        ):
            return ffn, True
    return None


@dataclass(frozen=True, slots=True)
class _Mixture:
    """What grouped GEMMs show of the experts."""

    top_k: int | None = None
    ffn: int | None = None
    gated: bool | None = None
    dense_layers: int | None = None
    dense_ffn: int | None = None
    shared_ffn: int | None = None


_NO_EXPERTS = _Mixture()


def _infer_experts(ops: ForwardOps, passes: int, hidden: int | None) -> _Mixture | None:
    """The experts of the rank, from GEMMs of all of them at once; None without such.

    On a rank with all experts there are as many rows as tokens, top_k times; with expert
    parallelism the rows are those that were sent to it.
    """
    gemms = Counter[_Gemm]()
    for (_, _, inputs, outputs), count in ops.grouped.items():
        gemms[inputs, outputs] += count
    calls = min(gemms.values(), default=0)
    if not calls or hidden is None or any(count % calls for count in gemms.values()):
        return None
    mlp = _match_mlp(Counter({gemm: count // calls for gemm, count in gemms.items()}), hidden)
    if mlp is None:
        return None
    rows = {rows for rows, experts, _, _ in ops.grouped if experts == ops.experts}
    tokens = ops.routed[0] if ops.routed else 0
    top_k, rest = divmod(rows.pop(), tokens) if len(rows) == 1 and tokens else (0, 0)
    found = _Mixture(top_k if top_k and not rest else None, *mlp)
    dense = sum(ops.attentions.values()) - calls
    if not ops.is_whole or calls % passes or dense < 0:
        return found
    return replace(
        found,
        dense_layers=dense // passes,
        dense_ffn=_find_mlp(ops, hidden, dense, found.gated) if dense else found.ffn,
        shared_ffn=_find_mlp(ops, hidden, calls, found.gated) if dense != calls else None,
    )


def _find_mlp(ops: ForwardOps, hidden: int, layers: int, gated: bool | None) -> int | None:
    """The width of an MLP that exactly so many layers have, in all passes together; 0 for none,
    None if there are several."""
    gemms = ops.count_gemms()
    found = [
        ffn
        for (ffn, out), count in gemms.items()
        if out == hidden
        and count == layers
        and (
            gemms[hidden, ffn] == (2 if gated else 1) * layers
            or (gated and gemms[hidden, 2 * ffn] == layers)
        )
    ]
    return found[0] if len(found) == 1 else None if found else 0


# The ops of the forward passes of a rank, by their shapes.

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """A table of rows x width, and the shape of the index that looks it up."""

    rows: int
    width: int
    index: _Shape


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer by its widths."""

    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """The heads of one rank, with the sizes of keys and values. batch is 0 if it is not
    distinguished from the heads."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_size: int
    value_size: int

    def scale(self, ranks: int) -> Attention:
        """The attention with the heads of so many ranks."""
        return replace(self, heads=self.heads * ranks, kv_heads=self.kv_heads * ranks)


@dataclass(frozen=True, slots=True)
class ForwardOps:
    """What the forward passes of a rank computed, with the number of times.

    losses: by number of classes; loss_rows: the most rows of one. norms: by "layer" or "rms";
    norm_widths by the width; head_norms: those over each head. grouped: GEMMs of all experts at
    once, by rows, experts and widths; routed: tokens and experts of the router. added_rows:
    rows of a weight that is added to activations, by the shape of these. gradients: how often a
    weight of a shape got its gradient. experts: experts among which a router chose, 0 for none.
    dtypes: of the inputs of GEMMs, which autocast calls once more with its own.
    """

    embeddings: Counter[Embedding]
    gemms: Counter[LinearShape]
    attentions: Counter[Attention]
    losses: Counter[int]
    norms: Counter[str]
    norm_widths: Counter[int]
    head_norms: int
    grouped: Counter[_Grouped]
    routed: _Shape
    loss_rows: int
    added_rows: Mapping[_Shape, int]
    gradients: Counter[_Shape]
    experts: int
    dtypes: Counter[str]

    @property
    def is_whole(self) -> bool:
        """Whether the rank has both ends of the model."""
        return bool(self.embeddings and self.losses)

    @property
    def main_attention(self) -> Attention | None:
        """The most frequent attention."""
        return max(self.attentions, key=lambda one: self.attentions[one], default=None)

    def count_gemms(self) -> Counter[_Gemm]:
        """The linear layers by their widths, with and without biases."""
        gemms = Counter[_Gemm]()
        for gemm, count in self.gemms.items():
            gemms[gemm.inputs, gemm.outputs] += count
        return gemms

    def count_passes(self) -> int:
        """Forward passes of microbatches; 0 if the rank has neither embedding nor loss."""
        return max((*self.losses.values(), *self.embeddings.values()), default=0)


_GEMMS = ("aten::linear", "aten::addmm", "aten::mm", "aten::_scaled_mm")
_BATCHED = ("aten::bmm", "aten::baddbmm")
_FUSED_ATTENTION = "aten::scaled_dot_product_attention"
_ATTENTIONS = (_FUSED_ATTENTION, "flash_attn::_flash_attn_forward", "flash_attn_3::fwd")
_LOSSES = ("aten::cross_entropy_loss", "aten::log_softmax", "aten::_log_softmax")
_NORMS = ("aten::layer_norm", "aten::rms_norm", "aten::rsqrt")
_OUTERMOST = (
    *_GEMMS, *_BATCHED, *_ATTENTIONS, *_LOSSES, *_NORMS, "aten::embedding",
    "aten::add", "aten::topk", "aten::_grouped_mm",
)  # fmt: skip
_BACKWARD = "autograd::engine::evaluate_function"
_GRADIENT = "torch::autograd::AccumulateGrad"


def collect_forward_ops(trace: RankTrace) -> ForwardOps:
    """Count the ops of a rank's forward passes that show the model's shape."""
    events, texts = trace.events, trace.shapes.texts
    rows = np.flatnonzero(events.is_category(Category.OP))
    ids = trace.shapes.find_ids(rows)
    rows, ids = rows[ids >= 0], ids[ids >= 0]
    names = events.name_id[rows]
    chosen = np.isin(names, [i for i, name in enumerate(events.names) if name in _OUTERMOST])
    # Whether the events in these rows begin within one of the spans of their thread.
    spans = events.match_prefix(_BACKWARD)
    inside = np.zeros(len(rows), dtype=np.bool_)
    for lane in np.unique(events.lane[rows]).tolist():
        here, of_lane = events.lane[rows] == lane, spans & (events.lane == lane)
        covered = union(events.start_ns[of_lane], events.ends_of(of_lane))
        edges = np.stack([covered.start_ns, covered.end_ns], axis=1).ravel()
        at = np.searchsorted(edges, events.start_ns[rows[here]], side="right")
        inside[here] = at % 2 == 1
    forward = chosen & ~inside
    gemms = forward & np.isin(names, [i for i, name in enumerate(events.names) if name in _GEMMS])
    dtypes = Counter(_parse_dtype(texts[i]) for i in ids[gemms].tolist())
    # An op calls others of the same kind: only those count that no other one contains.
    outermost = np.flatnonzero(forward)
    for lane in np.unique(events.lane[rows[outermost]]).tolist():
        here = outermost[events.lane[rows[outermost]] == lane]
        start, end = events.start_ns[rows[here]], events.ends_of(rows[here])
        order = np.lexsort((-end, start))
        before = np.maximum.accumulate(np.concatenate([[-1], end[order][:-1]]))
        forward[here[order]] = start[order] >= before
    gradients = np.isin(names, [i for i, name in enumerate(events.names) if name == _GRADIENT])
    shapes = {i: _parse_shapes(texts[i]) for i in np.unique(ids[forward | gradients]).tolist()}
    counter = _OpCounter()
    for name, text in zip(names[forward].tolist(), ids[forward].tolist(), strict=True):
        counter.count(events.names[name], shapes[text])
    found = (shapes[text] for text in ids[gradients].tolist())
    return counter.build(Counter(shape[0] for shape in found if shape), dtypes)


def _parse_shapes(text: str) -> tuple[_Shape, ...]:
    """The shapes of an op's inputs; () for those that are no tensors, and for lists of tensors."""
    try:
        body: Any = json.loads(text[: text.rfind("]") + 1])
    except (ValueError, RecursionError):
        return ()
    return tuple(
        tuple(one)
        if isinstance(one, list) and all(isinstance(size, int) and size > 0 for size in one)
        else ()
        for one in (body if isinstance(body, list) else ())
    )


def _parse_dtype(text: str) -> str:
    return text[text.rfind("]") + 1 :].strip() or "fp32"


class _OpCounter:
    """Counts the forward ops of a rank."""

    def __init__(self) -> None:
        self.embeddings, self.gemms = Counter[Embedding](), Counter[LinearShape]()
        self.attentions, self.losses = Counter[Attention](), Counter[int]()
        self.scores = Counter[Attention]()
        self.norms, self.norm_widths, self.head_norms = Counter[str](), Counter[int](), 0
        self.grouped, self.loss_rows = Counter[_Grouped](), 0
        self.added_rows: dict[_Shape, int] = {}
        self.routed: _Shape = ()

    def count(self, name: str, shapes: Sequence[_Shape]) -> None:
        """Counts one op by its name and the shapes of its inputs."""
        first, second, third = (*shapes, (), (), ())[:3]
        match name:
            case "aten::embedding" if len(first) == 2:
                self.embeddings[Embedding(*first, second)] += 1
            case "aten::linear" if len(second) == 2:
                self.gemms[LinearShape(second[1], second[0], bool(third))] += 1
            case "aten::addmm" if len(third) == 2:
                self.gemms[LinearShape(*third, True)] += 1
            case "aten::mm" | "aten::_scaled_mm" if len(second) == 2:
                self.gemms[LinearShape(*second, False)] += 1
            case "aten::bmm":
                self._count_scores(first, second)
            case "aten::baddbmm":
                self._count_scores(second, third)
            case "aten::layer_norm" | "aten::rms_norm" | "aten::rsqrt":
                shift = name == "aten::layer_norm" and any(shapes[3:4])
                self.norms["layer" if shift else "rms"] += 1
                self.head_norms += bool(shapes) and len(shapes[0]) == 4
                if name != "aten::rsqrt" and shapes and shapes[0]:
                    self.norm_widths[shapes[0][-1]] += 1
            case "aten::add" if len(first) == 3 and first != second in (first[1:], (1, *first[1:])):
                self.added_rows[first] = first[1]
            case "aten::topk" if len(first) == 2:
                self.routed = first
            case "aten::_grouped_mm" if len(first) == 2 and len(second) == 3:
                self.grouped[first[0], *second] += 1
            case _ if name in _LOSSES and len(first) >= 2:
                self.losses[first[-1]] += 1
                self.loss_rows = max(self.loss_rows, prod(first[:-1]))
            case _ if name in _ATTENTIONS and len(first) == len(second) == 4:
                # torch has the heads before the tokens, FlashAttention after them.
                heads, tokens = (1, 2) if name == _FUSED_ATTENTION else (2, 1)
                value = third if len(third) == 4 else first
                sizes = first[0], first[heads], second[heads], first[tokens], first[3], value[3]
                self.attentions[Attention(*sizes)] += 1

    def _count_scores(self, query: _Shape, key: _Shape) -> None:
        """Queries by keys: (sequences x heads, seq_len, head size) by its transpose."""
        if len(query) == len(key) == 3 and query[1:] == key[:0:-1] and query[1] != query[2]:
            size = query[2]
            self.scores[Attention(0, query[0], query[0], query[1], size, size)] += 1

    def build(self, gradients: Counter[_Shape], dtypes: Counter[str]) -> ForwardOps:
        attentions = self.attentions
        sequences = max((one.index[0] for one in self.embeddings if len(one.index) == 2), default=0)
        if not attentions and sequences:
            # Attention that is not fused: its sequences are those of the embedding's index.
            for one, count in self.scores.items():
                heads, rest = divmod(one.heads, sequences)
                if not rest:
                    each = replace(one, batch=sequences, heads=heads, kv_heads=heads)
                    attentions[each] = count
        # A router: the largest few outputs of a GEMM are chosen for each token.
        widths = {gemm.outputs for gemm in self.gemms}
        return ForwardOps(
            self.embeddings,
            self.gemms,
            attentions,
            self.losses,
            self.norms,
            self.norm_widths,
            self.head_norms,
            self.grouped,
            self.routed,
            self.loss_rows,
            self.added_rows,
            gradients,
            self.routed[-1] if self.routed and self.routed[-1] in widths else 0,
            dtypes,
        )

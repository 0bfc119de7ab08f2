"""The matrix products of one layer and one microbatch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.transformer import Experts, LatentAttention
from stepsplit.analyzer.model.step.speed import Speed
from stepsplit.analyzer.model.work.weights import share


@dataclass(frozen=True, slots=True)
class Product:
    """count products (rows x inner) (inner x columns): activations times a weight."""

    rows: float
    columns: int
    inner: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * self.columns * self.inner

    def forward_ns(self, speed: Speed) -> float:
        return self.count * speed.product_ns(self.rows, self.columns, self.inner)

    def input_ns(self, speed: Speed) -> float:
        """The gradient of what went in."""
        return self.count * speed.product_ns(self.rows, self.inner, self.columns)

    def weight_ns(self, speed: Speed) -> float:
        """The gradient of the weight."""
        return self.count * speed.product_ns(self.inner, self.columns, self.rows)


def attention_products(job: Job) -> tuple[Product, ...]:
    """The projections around attention; its core is not among them."""
    model, tokens, tp = job.model, job.tokens, job.layout.tp
    if model.latent is not None:
        return _latent(job, model.latent)
    queries = share(model.heads, tp) * model.head_size
    pairs = 2 * share(model.kv_heads, tp) * model.head_size
    return (
        Product(tokens, queries + pairs, model.hidden),
        Product(tokens, model.hidden, queries),
    )


def _latent(job: Job, latent: LatentAttention) -> tuple[Product, ...]:
    """What compresses is whole on every rank, which applies it to its own part of the sequence."""
    tokens, h, heads = job.tokens, job.model.hidden, share(job.model.heads, job.layout.tp)
    own = tokens / job.layout.sequence_split
    wide = heads * (latent.nope + latent.rope)
    queries = (
        (Product(own, latent.query_rank, h), Product(tokens, wide, latent.query_rank))
        if latent.query_rank
        else (Product(tokens, wide, h),)
    )
    return (
        *queries,
        Product(own, latent.kv_rank + latent.rope, h),
        Product(tokens, heads * (latent.nope + latent.value), latent.kv_rank),
        Product(tokens, h, heads * latent.value),
    )


def mlp_products(job: Job, ffn: int) -> tuple[Product, ...]:
    """An MLP of that width, divided over tensor parallelism."""
    width, h = share(ffn, job.layout.tp), job.model.hidden
    first = (2 if job.model.gated else 1) * width
    return Product(job.tokens, first, h), Product(job.tokens, h, width)


def expert_products(job: Job, experts: Experts) -> tuple[Product, ...]:
    """The router, the shared expert, and the rank's experts with balanced routing."""
    h, local = job.model.hidden, share(experts.count, job.layout.ep)
    width = share(experts.ffn, job.layout.expert_tp)
    rows = routed_tokens(job, experts) / local
    shared = mlp_products(job, experts.shared_ffn) if experts.shared_ffn else ()
    return (
        Product(job.tokens / job.layout.sequence_split, experts.count, h),
        Product(rows, (2 if job.model.gated else 1) * width, h, local),
        Product(rows, h, width, local),
        *shared,
    )


def routed_tokens(job: Job, experts: Experts) -> float:
    """Tokens, counted once an expert, that all experts of one rank get in a microbatch.

    Ranks of tensor parallelism see the same tokens and share them out.
    """
    return job.tokens / job.layout.tp * experts.top_k * job.layout.expert_tp


def head_product(job: Job) -> Product:
    """The output layer of a tensor-parallel rank."""
    return Product(job.tokens, share(job.padded_vocab, job.layout.vocab_split), job.model.hidden)

"""Case: a job that somebody ran, and how long its step took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.validate.records import Record

Family = Literal["A100 Megatron", "B200 dense", "B200 experts", "llm-foundry", "torchtitan"]


@dataclass(frozen=True, slots=True)
class Case:
    """step_ns is the published time of a step, or follows from the published throughput."""

    table: str
    id: str
    family: Family
    job: Job
    step_ns: float


def gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> Transformer:
    """GPT as Megatron-LM trains it: learned positions, layer norms, biases, tied embeddings."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        positions=seq_len,
    )


def llama(row: Record, tied: bool = False) -> Transformer:
    """A model of Llama's kind, with the sizes that the row's columns give."""
    return Transformer(
        layers=row.count("layers"),
        hidden=row.count("hidden"),
        heads=row.count("heads"),
        kv_heads=row.count("kv_heads"),
        head_size=row.count("hidden") // row.count("heads"),
        ffn=row.count("ffn"),
        vocab=row.count("vocab"),
        gated=True,
        tied=tied,
        norm="rms",
        biases=False,
    )

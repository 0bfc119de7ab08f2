"""A detected strategy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct


class Strategy(Struct, frozen=True):
    """A parallelism or memory strategy detected in the recorded steps.

    Only strategies with unambiguous evidence are listed.

    Attributes:
        name: One of "ddp", "zero-1", "zero-2", "fsdp", "hsdp", "tp", "sp", "vocabulary", "loss",
            "cp", "ep", "pp", "gradient accumulation", "recompute", "offload", "autocast", "fp8",
            "mixed precision", "loss scaling".
        axis: Mesh axis along which ranks share the work; None if it has none.
        size: Number of ranks along the axis; None without an axis.
        detail: The variant or further evidence: the schedule of pp, "ring", "all-gather" or
            "ulysses" for cp, "full" or "selective" for recompute; "" if there is none.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [strategy.in_words for strategy in report.run.strategies]
        ['tp 2', 'pp 2 (1f1b)']
    """

    name: str
    axis: str | None = None
    size: int | None = None
    detail: str = ""

    @property
    def in_words(self) -> str:
        """Name, number of ranks, axis and detail in one line, such as "fsdp 8 on dp_shard"."""
        size = f" {self.size}" if self.size is not None else ""
        axis = f" on {self.axis}" if self.axis not in (None, "tp", self.name) else ""
        return self.name + size + axis + (f" ({self.detail})" if self.detail else "")


_ACCUMULATION = "gradient accumulation"


class GradientSums(StrEnum):
    """When gradients of accumulated microbatches are summed over the ranks."""

    ONCE = "gradients summed once"
    AFTER_EACH = "gradients summed after each"
    UNKNOWN = ""


class Accumulation(Struct, frozen=True):
    """Gradient accumulation: microbatches of a rank and step, and when their gradients are summed.

    `detail` is how a Strategy has it, which report.json keeps.
    """

    microbatches: int
    sums: GradientSums

    @property
    def detail(self) -> str:
        return ", ".join(filter(None, (f"{self.microbatches} microbatches", self.sums)))


def find_accumulation(strategies: Iterable[Strategy]) -> Accumulation | None:
    """The gradient accumulation among detected strategies; None without it, as in a pipeline."""
    detail = next((one.detail for one in strategies if one.name == _ACCUMULATION), "")
    count, _, sums = detail.partition(" microbatches")
    if not count.isdecimal():
        return None
    return Accumulation(int(count), GradientSums(sums.removeprefix(", ")))


def count_accumulated_microbatches(strategies: Iterable[Strategy]) -> int | None:
    """Microbatches per step with gradient accumulation; None without it."""
    found = find_accumulation(strategies)
    return None if found is None else found.microbatches


def sums_after_each_microbatch(strategies: Iterable[Strategy]) -> bool:
    """Whether accumulated gradients are reduced after each microbatch instead of once."""
    found = find_accumulation(strategies)
    return found is not None and found.sums is GradientSums.AFTER_EACH

"""A detected strategy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stepsplit.collectors.formats.run_spec import AXES

SUMMED_AFTER_EACH = "gradients summed after each"


@dataclass(frozen=True, slots=True)
class Strategy:
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


def count_accumulated_microbatches(strategies: Iterable[Strategy]) -> int | None:
    """Microbatches per step with gradient accumulation, from the detected strategies; None if there
    is none, as in a pipeline."""
    details = [one.detail for one in strategies if one.name == "gradient accumulation"]
    count = re.match(r"\d+", details[0]) if details else None
    return int(count.group()) if count else None


def sums_after_each_microbatch(strategies: Iterable[Strategy]) -> bool:
    """Whether accumulated gradients are reduced after each microbatch instead of once."""
    return any(
        one.name == "gradient accumulation" and SUMMED_AFTER_EACH in one.detail
        for one in strategies
    )


def format_axes(axes: Collection[str], unknown: str) -> str:
    """The axes of a group joined in mesh order, such as "dp_shard x cp"; unknown if there are
    none."""
    return " x ".join(sorted(axes, key=AXES.index)) or unknown

"""What a job did at once, or spared memory by, in one word."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

NAMES = (
    "ddp",
    "zero-1",
    "zero-2",
    "fsdp",
    "hsdp",
    "tp",
    "sp",
    "vocabulary",
    "loss",
    "cp",
    "ep",
    "pp",
    "gradient accumulation",
    "recompute",
    "offload",
    "autocast",
    "fp8",
    "mixed precision",
    "loss scaling",
)
"""In the order in which people read them; those that a prediction's messages have are its words."""

_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way of training that the steps show beyond doubt; its name is one of NAMES.

    axis is the mesh's along which size ranks share the work, None where it lies along none. detail
    is the kind, where there are several, or what else is seen: the schedule of pp, ring, all-gather
    or ulysses of cp, full or selective of recompute.
    """

    name: str
    axis: str | None = None
    size: int | None = None
    detail: str = ""

    @property
    def in_words(self) -> str:
        """Its name, over how many ranks of which axis, and what else is seen."""
        size = f" {self.size}" if self.size is not None else ""
        axis = f" on {self.axis}" if self.axis not in (None, "tp", self.name) else ""
        return self.name + size + axis + (f" ({self.detail})" if self.detail else "")


def accumulated_microbatches(strategies: Iterable[Strategy]) -> int | None:
    """How many microbatches a step adds the gradients of up, as its strategies tell it; None where
    it does not, as in a pipeline."""
    said = [one.detail for one in strategies if one.name == "gradient accumulation"]
    count = re.match(r"\d+", said[0]) if said else None
    return int(count.group()) if count else None


def axis_named(axes: Collection[str], unknown: str) -> str:
    """The axes of a group as one word, in the usual order of a mesh; unknown for no axis."""
    return " x ".join(sorted(axes, key=_ORDER.index)) or unknown

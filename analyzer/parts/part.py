"""Where in the model an instant belongs: its layer, the kind of part, and the phase."""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct


class PartKind(IntEnum):
    """What a part of a model or of a step does; in the order in which tables show them."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2
    ROUTER = 3
    EXPERTS = 4
    NORM = 5
    HEAD = 6
    LOSS = 7
    OPTIMIZER = 8
    GRADIENT_REDUCTION = 9
    OTHER = 10

    @property
    def label(self) -> str:
        """The name in report.json and in tables."""
        return self.name.lower()


class PartPhase(IntEnum):
    """The pass of a part; OTHER is outside of the passes, such as the optimizer."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OTHER = 3

    @property
    def label(self) -> str:
        """The name in report.json and in tables."""
        return self.name.lower()


NO_LAYER = -1


class Part(Struct, frozen=True, order=True):
    """A part of the model in one phase of a step; layer is NO_LAYER outside of the layers."""

    layer: int = NO_LAYER
    kind: PartKind = PartKind.OTHER
    phase: PartPhase = PartPhase.OTHER


UNPLACED = Part()
"""What no evidence places."""

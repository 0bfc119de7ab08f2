"""The look of the seven buckets, the same in every figure and page.

Okabe and Ito's colors, which people with any color vision can tell apart; time in which a rank
waits is hatched as well, and time in which nothing happens is pale.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.buckets import BUCKETS


@dataclass(frozen=True, slots=True)
class Look:
    """How one bucket is drawn: its color on white and on black, and whether it is hatched."""

    bucket: str
    color: str
    dark: str
    hatched: bool = False


LOOKS = (
    Look("compute", "#0072B2", "#3B9AD9"),
    Look("collective", "#E69F00", "#E69F00"),
    Look("p2p", "#D55E00", "#E8743B"),
    Look("skew", "#CC79A7", "#CC79A7", hatched=True),
    Look("bubble", "#8D949E", "#8D949E", hatched=True),
    Look("copy", "#009E73", "#22B68C"),
    Look("idle", "#E6E9EE", "#39424E"),
)
assert tuple(look.bucket for look in LOOKS) == BUCKETS


# All three are compute, so they are blues; their lightness tells them apart.
FORWARD, BACKWARD, WEIGHT = "#A9D5F0", "#3D8CC2", "#17507D"
INK, MUTED, GRID, PAPER = "#1B2430", "#5B6675", "#E3E7EC", "#FFFFFF"
WORSE, BETTER = "#D55E00", "#009E73"
"""More time than it was held against, and less."""
AXES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Axes of the mesh, in the order in which they come."""
MEMORY = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "transient": "#CC79A7",
    "other": "#8D949E",
}
"""What memory is for."""

"""How each bucket looks, in figures, pages and the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Color:
    """A color as #RRGGBB in the light and in the dark theme."""

    light: str
    dark: str


# Okabe and Ito's colors, distinguishable with any color vision.
BLUE = Color("#0072B2", "#3B9AD9")
ORANGE = Color("#E69F00", "#E69F00")
VERMILION = Color("#D55E00", "#E8743B")
PURPLE = Color("#CC79A7", "#CC79A7")
GREEN = Color("#009E73", "#22B68C")
SKY = Color("#56B4E9", "#56B4E9")
GRAY = Color("#8D949E", "#8D949E")
PALE = Color("#E6E9EE", "#39424E")

PALETTE = (BLUE, ORANGE, VERMILION, PURPLE, GREEN, SKY, GRAY, PALE)
"""The colors of buckets, mesh axes and memory."""


@dataclass(frozen=True, slots=True)
class BucketStyle:
    """The look of a bucket: its color, whether it is hatched, and its color in a terminal."""

    bucket: str
    color: Color
    hatched: bool
    terminal: str


# Waiting is also hatched, and idle time is pale.
_STYLES: dict[Bucket, tuple[Color, bool, str]] = {
    Bucket.COMPUTE: (BLUE, False, "green"),
    Bucket.COLLECTIVE: (ORANGE, False, "blue"),
    Bucket.P2P: (VERMILION, False, "cyan"),
    Bucket.SKEW: (PURPLE, True, "magenta"),
    Bucket.BUBBLE: (GRAY, True, "yellow"),
    Bucket.COPY: (GREEN, False, "bright_black"),
    Bucket.IDLE: (PALE, False, "bright_black"),
}

BUCKET_STYLES = tuple(BucketStyle(bucket.label, *_STYLES[bucket]) for bucket in Bucket)

TERMINAL_STYLE = {look.bucket: look.terminal for look in BUCKET_STYLES}
"""The style in rich's words, by bucket."""

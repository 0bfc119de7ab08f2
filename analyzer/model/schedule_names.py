"""The names of the pipeline schedules, and the largest pipelines that are simulated."""

from __future__ import annotations

from typing import Literal, get_args

Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"
]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

TWO_STAGES: tuple[Schedule, ...] = ("zb-v", "dualpipe", "dualpipe-v")
"""Schedules with two stages on each rank, whatever chunks is."""

MAX_STAGE_PAIRS = 1 << 14
"""Most pipeline ranks times model stages (128 ranks of one stage, 64 of four). Warm-up and
cool-down of a schedule have 6 to 16 times as many passes, which take one to two seconds and a
quarter of a GB to simulate. Published jobs have up to 64 ranks."""

MAX_SIMULATED_FORWARDS = 1 << 17
"""Most forward passes of a schedule that is simulated whole, without a steady state: more than
warm-up and cool-down of MAX_STAGE_PAIRS have."""

"""The size of the trainings and of their faults: chosen for two ranks of one thread each."""

from __future__ import annotations

import os

SETTLE = 3
"""The first steps, which allocate."""
TURNS, TIMED = 6, 4
"""Then two jobs take turns. The first step of a turn contains the wait for the other job; the time
of the next ones is measured, without a profiler."""
RECORDED_TURN, RECORDED = 2, 5
"""In this turn, counted from 0, the timed steps are followed by one of warmup, so many recorded
ones, and one in which the traces are packed: what is recorded meets the noise of what is timed."""
FIRST = SETTLE + (RECORDED_TURN + 1) * TIMED + 1
TURN_BEGINS = tuple(
    SETTLE + turn * TIMED + (RECORDED + 2 if turn > RECORDED_TURN else 0) for turn in range(TURNS)
)
"""How many steps come before each turn."""
STEPS = TURN_BEGINS[-1] + TIMED

DEEP = "STEPSPLIT_DEEP" in os.environ
"""A model of many small layers and little work: small collectives cost nothing where the backward
hides them."""
BATCH, TOKENS = (2, 32) if DEEP else (8, 64)
LAYERS, WIDTH = (24, 64) if DEEP else (12, 128)
"""Samples of a rank, their length; layers of the model and their width."""
HEADS, VOCABULARY = 4, 1000
MICROBATCHES = 4
"""Of a step in the pipeline."""

FORWARD_SLEEP_S = 0.3
LOADER_SLEEP_S = 0.3
EXTRA_BYTES = 128 * 2**20
BUCKET_MB = 1e-6
"""So small that each tensor has its own."""
UNEVEN = 1.5

LAYER_CLASSES = (
    "GPT2Block", "LlamaDecoderLayer", "TransformerEncoderLayer", "TransformerLayer", "Block",
)  # fmt: skip
"""Classes of the repeated layers of other people's models."""

"""The size of the trainings and of their faults: chosen for two ranks of one thread each."""

from __future__ import annotations

import os

SETTLE = 3
"""The first steps, which allocate."""
BLOCKS, BLOCK = 6, 4
"""Then jobs take turns: each runs a block of steps while the others wait. The first step of a block
contains the wait; the time of the others is measured, without a profiler."""
FIRST, RECORDED = SETTLE + BLOCKS * BLOCK + 2, 5
"""The recorded steps, in a last block, after one of warmup."""
SETTLE_S = 3.0
"""How long the next job waits before that block: the one before it still packs its traces."""
STEPS = FIRST + RECORDED + 1

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

"""Compile time: torch.compile compiles, or recompiles, within the recorded steps."""

from __future__ import annotations

from functools import partial

from stepsplit.analyzer.diagnose.causes.cause import CauseEntry
from stepsplit.analyzer.diagnose.causes.host_idle import find_named_idle

COMPILE_TIME = CauseEntry(
    "compile_time",
    partial(
        find_named_idle,
        cause="compilation",
        text="{who} compiles code {share} of the step, in {steps} (torch.compile: "
        "TORCH_LOGS=recompiles says why; shapes that change need dynamic=True or mark_dynamic)",
    ),
    basis="measured",
    as_set="compiling",
)

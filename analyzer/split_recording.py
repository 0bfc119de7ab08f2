"""The split of a recording, with what the model adds to the traces: the ideal bubble of a schedule,
and how long a call within a node can take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config_file import load_hardware
from stepsplit.analyzer.model.hardware_config import find_preset, load_link
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.model.schedule_time import compute_ideal_bubble_fraction
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.split.run import RunSplit, split_run
from stepsplit.analyzer.split.transfers import CallLimit
from stepsplit.analyzer.trace import RankTrace
from stepsplit.collectors.run_spec import Mesh, RunSpec


def split_recording(recording: Recording, mesh: Mesh | None = None) -> RunSplit:
    """Splits all ranks of a recording.

    Args:
        recording: The recording.
        mesh: The job's mesh as the user states it, which outweighs that of run.json. Default: none.

    Raises:
        DataError: No rank has device data and steps.
    """
    limit = build_call_limit(recording.traces, recording.spec)
    return split_run(recording.traces, recording.spec, compute_ideal_bubble_fraction, mesh, limit)


SLOWEST = "a100-pcie-40gb", "pcie-3"
"""A GPU whose node is joined by PCIe, and the slowest such link: bounds a GPU without a preset."""


def build_call_limit(traces: Sequence[RankTrace], spec: RunSpec | None) -> CallLimit | None:
    """The upper end of the model's time of a call among ranks of one node, on the recorded GPU.

    None on a CPU. What joins nodes is not in a recording.
    """
    if not all(trace.on_device for trace in traces):
        return None
    preset = find_preset(next((trace.device for trace in traces if trace.device), ""))
    hardware = load_hardware(preset or SLOWEST[0])
    if preset is None:
        hardware = replace(hardware, intra=load_link(SLOWEST[1]))
    per_node = _count_ranks_per_node(spec) or hardware.gpus_per_node

    @cache
    def limit_call_ns(op: str, message_bytes: int, ranks: tuple[int, ...]) -> float:
        is_in_node = len({rank // per_node for rank in ranks}) == 1
        if op not in TIMED_OPS or message_bytes <= 0 or len(ranks) < 2 or not is_in_node:
            return math.inf
        group = GroupPlacement(len(ranks), len(ranks))
        return time_of(op, message_bytes, group, hardware).high_ns

    return limit_call_ns


def _count_ranks_per_node(spec: RunSpec | None) -> int:
    """Ranks of each host in run.json, 0 if it does not list all."""
    if spec is None or len(spec.ranks) < spec.world_size:
        return 0
    return max(Counter(rank.host for rank in spec.ranks).values())

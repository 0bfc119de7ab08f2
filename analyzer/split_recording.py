"""The split of a recording, with what the model adds to the traces: the ideal bubble of a schedule,
and how long a call within a node can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from msgspec import Struct

from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.analyzer.readers.recording import Recording
from stepsplit.analyzer.split.run import RunSplit, split_run
from stepsplit.analyzer.split.transfers import ModelledTransfer, TransferModel
from stepsplit.analyzer.trace import RankTrace
from stepsplit.collectors.formats.run_spec import Mesh, RunSpec

if TYPE_CHECKING:
    from stepsplit.analyzer.model.config import HardwareConfig


def split_recording(recording: Recording, mesh: Mesh | None = None) -> RunSplit:
    """Splits all ranks of a recording.

    Args:
        recording: The recording.
        mesh: The job's mesh as the user states it, which outweighs that of run.json. Default: none.

    Raises:
        DataError: No rank has device data and steps.
    """
    model = build_transfer_model(recording.traces, recording.spec)
    return split_run(recording.traces, recording.spec, compute_ideal_bubble_fraction, mesh, model)


SLOWEST = "a100-pcie-40gb", "pcie-3"
"""A GPU whose node is joined by PCIe, and the slowest such link: bounds a GPU without a preset."""

MARGIN = 2.0
"""A call may take so many times the upper end of the model's time: nodes differ in their links, and
compute at the same time slows transfers down."""

EVEN_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
"""Ops whose size tells what moves; all_to_alls may be uneven, and messages share their links."""


def build_transfer_model(traces: Sequence[RankTrace], spec: RunSpec | None) -> TransferModel | None:
    """How long a call of ranks that are known to share a node can take on the recorded GPU.

    None on a CPU. What joins nodes is not in a recording.
    """
    if not all(trace.on_device for trace in traces):
        return None
    nodes = _Nodes.build(traces, spec)
    device = next((trace.device for trace in traces if trace.device), "")

    @cache
    def model_transfer(
        op: str, message_bytes: int, ranks: tuple[int, ...]
    ) -> ModelledTransfer | None:
        is_known = op in EVEN_OPS and message_bytes > 0 and len(ranks) > 1
        if not is_known or not nodes.are_one(ranks):
            return None
        from stepsplit.analyzer.model.comm_time import time_of
        from stepsplit.analyzer.model.rank_layout import GroupPlacement

        group = GroupPlacement(len(ranks), len(ranks))
        time = time_of(op, message_bytes, group, _load_node(device))
        return ModelledTransfer(time.ns, MARGIN * time.high_ns)

    return model_transfer


@cache
def _load_node(device: str) -> HardwareConfig:
    """The preset of a device, or the slowest there may be. Few recordings have a call that asks for
    it, and what reads it takes a tenth of a second to import."""
    from stepsplit.analyzer.model.hardware_config import load_hardware, load_link
    from stepsplit.analyzer.model.preset_names import find_preset

    preset = find_preset(device)
    if preset is not None:
        return load_hardware(preset)
    return replace(load_hardware(SLOWEST[0]), intra=load_link(SLOWEST[1]))


class _Nodes(Struct, frozen=True):
    """The hosts of the ranks of which they are known, and how many ranks a node has, 0 if
    unknown."""

    host_of: Mapping[int, str]
    ranks_per_node: int

    @classmethod
    def build(cls, traces: Sequence[RankTrace], spec: RunSpec | None) -> _Nodes:
        host_of = {one.rank: one.host for one in spec.ranks if one.host} if spec else {}
        host_of |= {trace.rank: trace.host for trace in traces if trace.host}
        return cls(host_of, max(trace.visible_devices for trace in traces))

    def are_one(self, ranks: tuple[int, ...]) -> bool:
        """Whether the ranks share a node, by their hosts, or else by the GPUs that one saw there:
        launchers give a node consecutive ranks."""
        hosts = {self.host_of.get(rank, "") for rank in ranks}
        if "" not in hosts or len(hosts - {""}) > 1:
            return len(hosts) == 1
        per_node = self.ranks_per_node
        return per_node > 1 and len({rank // per_node for rank in ranks}) == 1

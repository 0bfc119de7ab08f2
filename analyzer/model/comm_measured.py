"""Collective times from measurements: nccl-tests sweeps and NCCL's tuning tables."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_time import PLATEAU, time_of
from stepsplit.analyzer.model.config import HardwareConfig
from stepsplit.analyzer.model.config_limits import KEY
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.rank_layout import GroupPlacement

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.nccl import nccl_tests
    from stepsplit.analyzer.readers.nccl.records import CostTable, NcclLog


# Time of a collective by the cluster's own measurements, else by the closed form.

INTERPOLATION_ERROR = (0.8, 1.25)
"""Measured / interpolated time, 10th and 90th percentile of leave-one-out over the sweeps of
1x8 A100, 1x8 B200 and Alps GH200 on 1 to 64 nodes (0.80 to 1.14; made symmetric)."""

OTHER_RANKS_ERROR = (0.6, 1.7)
"""The same for a sweep of another number of ranks: Alps GH200, 16 nodes from 64 and 64 from 16."""

TUNER_ERROR = (0.6, 2.0)
"""The same for NCCL's own estimate: BORROWED, wider because its protocols can be slower."""

MAX_RANKS_RATIO = 4
"""A sweep is used for groups of up to this many times more or fewer ranks."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured communication times of one cluster.

    Without sweeps and tables, times come from the closed form.

    Args:
        sweeps: nccl-tests sweeps, one per op and group size. Default: none.
        tables: NCCL's tuning tables, one per group size. Default: none.

    Examples:
        >>> from stepsplit.analyzer import predict, read_job, read_rates
        >>> job = read_job("job.toml")
        >>> rates = read_rates("job.toml", job.hardware)
        >>> prediction = predict(job, rates)
    """

    sweeps: tuple[TransferSweep, ...] = ()
    tables: tuple[TunerTable, ...] = ()

    def estimate_call_time(
        self,
        op: str,
        message_bytes: float,
        group: GroupPlacement,
        hardware: HardwareConfig,
        sent_to: GroupPlacement | None = None,
    ) -> Band:
        """Estimates the time of one call.

        The first available source is used: a sweep of the same op, ranks and ranks per node; the
        sweep of the op with the closest number of ranks, scaled by the closed forms of both;
        NCCL's table of these ranks; the closed form.

        Args:
            op: The op, such as "all_reduce" or "send".
            message_bytes: Message size as nccl-tests counts it, in bytes.
            group: Placement of the group: its ranks and ranks per node.
            hardware: The hardware, for the closed form.
            sent_to: Placement of those that get a message, for the closed form. Default: the group.

        Returns:
            The time in ns with its error band and its formulas.

        Raises:
            UsageError: The op is not modelled, or the size or the group is invalid.
        """
        closed = time_of(op, message_bytes, sent_to or group, hardware)
        if closed.ns == 0:
            return closed
        name = "send" if op == "recv" else op
        # Finds the op's sweep with the closest number of ranks, then of ranks per node (by their
        # log ratios), also within or across nodes.
        candidates = [
            (
                (
                    abs(math.log(sweep.ranks / group.ranks)),
                    abs(math.log(sweep.ranks_per_node / group.ranks_per_node)),
                ),
                i,
            )
            for i, sweep in enumerate(self.sweeps)
            if sweep.op == name and (sweep.ranks > sweep.ranks_per_node) == (group.nodes > 1)
        ]
        distance, i = min(candidates, default=((math.inf, 0.0), -1))
        sweep = self.sweeps[i] if distance[0] <= math.log(MAX_RANKS_RATIO) + 1e-9 else None
        if sweep is not None:
            band = _estimate_from_sweep(sweep, op, message_bytes, closed, group, hardware)
            return self._choose_formula(band, SWEEP, closed)
        placed = (group.ranks, group.ranks_per_node)
        tuned = (one for one in self.tables if (one.ranks, one.ranks_per_node) == placed)
        table = next(tuned, None)
        if table is not None and (ns := table.estimate_ns(name, message_bytes)) is not None:
            return self._choose_formula(_build_band(ns, TUNER_ERROR), TUNER, closed)
        return self._choose_formula(closed, closed.formulas[0], closed) if self._sources else closed

    def _choose_formula(self, band: Band, formula: Formula, closed: Band) -> Band:
        """Puts the chosen formula first, before those of the closed form and of measured times."""
        among = (*closed.formulas, *self._sources)
        others = tuple(each for each in among if each is not formula)
        return replace(band, formulas=(formula, *others))

    @property
    def _sources(self) -> tuple[Formula, ...]:
        """The formulas of the available measurements, whether or not one applies to a call."""
        return (SWEEP,) * bool(self.sweeps) + (TUNER,) * bool(self.tables)


def _estimate_from_sweep(
    sweep: TransferSweep,
    op: str,
    message_bytes: float,
    closed: Band,
    group: GroupPlacement,
    hardware: HardwareConfig,
) -> Band:
    sweep_group = GroupPlacement(sweep.ranks, sweep.ranks_per_node)
    ns = _compute_sweep_ns(sweep, op, message_bytes, sweep_group, hardware)
    if sweep_group == group:
        return _build_band(ns, INTERPOLATION_ERROR)
    scale = closed.ns / time_of(op, message_bytes, sweep_group, hardware).ns
    return _build_band(ns * scale, OTHER_RANKS_ERROR)


def _compute_sweep_ns(
    sweep: TransferSweep,
    op: str,
    message_bytes: float,
    sweep_group: GroupPlacement,
    hardware: HardwareConfig,
) -> float:
    """The sweep's time; beyond the sizes of recorded runs, the closed form scaled to the last."""
    edge = min(max(message_bytes, sweep.sizes_bytes[0]), sweep.sizes_bytes[-1])
    if sweep.swept or edge == message_bytes:
        return sweep.interpolate_ns(message_bytes)
    at_edge = time_of(op, edge, sweep_group, hardware).ns
    return (
        sweep.interpolate_ns(edge) * time_of(op, message_bytes, sweep_group, hardware).ns / at_edge
    )


def _build_band(ns: float, error_band: tuple[float, float]) -> Band:
    return Band(ns, ns * error_band[0], ns * error_band[1])


# The time of one call, for a user.


def collective_time(
    op: str,
    message_bytes: int,
    ranks: int,
    hardware: HardwareConfig | str,
    ranks_per_node: int | None = None,
    rates: Rates | None = None,
) -> Band:
    """Estimate the time of one collective or message.

    Args:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
            "send" or "recv".
        message_bytes: message size as nccl-tests counts it, in bytes: the full buffer of an
            all_gather or reduce_scatter.
        ranks: ranks of the group; a send or recv is between two of them.
        hardware: a preset such as "h100-sxm", or the hardware of a job.
        ranks_per_node: ranks of the group on each node. Default: full nodes; if they do not divide
            the ranks, the largest number of GPUs of a node that does.
        rates: measured times of the cluster, see `read_rates`. Default: none, the closed form.

    Returns:
        A `Band`: the time in ns, its band (nine of ten calls of this size and placement on three
        published clusters; narrower for measured sizes), and its formulas, the one that was used
        first. 0 for one rank.

    Raises:
        UsageError: the op is not modelled, the preset is unknown, or a number is not possible.

    Examples:
        >>> from stepsplit.analyzer import collective_time
        >>> call = collective_time("all_reduce", 2**30, ranks=8, hardware="h100-sxm")
        >>> call.low_ns < call.ns < call.high_ns, call.formulas[0].id
        (True, 'comm.nvls')
    """
    if ranks < 1:
        raise UsageError(f"ranks ({ranks}) must be at least 1")
    device = load_hardware(hardware) if isinstance(hardware, str) else hardware
    most = min(ranks, device.gpus_per_node)
    full = next(count for count in range(most, 0, -1) if ranks % count == 0)
    group = GroupPlacement(ranks, full if ranks_per_node is None else ranks_per_node)
    return (rates or Rates()).estimate_call_time(op, message_bytes, group, device)


# Interpolation in a measured sweep.

SWEEP = Formula(
    "comm.sweep",
    "log t is linear in log S between two measured sizes; constant below the first,"
    " t_last S / S_last beyond the last",
    "arithmetic; leave one out on the sweeps of one node: 2 to 8 % (A100, B200, Alps GH200)",
)

SWEEP_OPS = {"send_recv": "send"}


@dataclass(frozen=True, slots=True)
class TransferSweep:
    """Times of one op on one group: ns at each size, sizes ascending.

    swept: whether the sizes are those of a sweep; else they are those of recorded runs, and beyond
    them the closed form is scaled to the nearest one. Raises UsageError for invalid sizes or times.
    """

    op: str
    ranks: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...]
    times_ns: tuple[float, ...]
    swept: bool = field(default=True, metadata={KEY: ""})

    def __post_init__(self) -> None:
        sizes, times = self.sizes_bytes, self.times_ns
        if len(sizes) != len(times) or not sizes:
            raise UsageError(
                f"a sweep of {self.op} has {len(sizes)} sizes but {len(times)} times;"
                " give one time for each size"
            )
        rising = all(one < following for one, following in pairwise(sizes))
        if not rising or sizes[0] <= 0 or min(times) <= 0:
            raise UsageError(
                f"a sweep of {self.op} needs ascending sizes and times > 0; remove other rows"
            )

    def interpolate_ns(self, message_bytes: float) -> float:
        """Interpolates the time of a message size, in ns (SWEEP)."""
        sizes, times = self.sizes_bytes, self.times_ns
        after = bisect_right(sizes, message_bytes)
        if after == 0:
            return times[0]
        if after == len(sizes):
            return times[-1] * message_bytes / sizes[-1]
        before = after - 1
        part = math.log(message_bytes / sizes[before]) / math.log(sizes[after] / sizes[before])
        return times[before] * math.exp(part * math.log(times[after] / times[before]))


def build_sweeps(
    tables: Sequence[nccl_tests.Sweep], ranks_per_node: int | None = None
) -> tuple[TransferSweep, ...]:
    """Converts nccl-tests tables to sweeps; without ranks_per_node all ranks share a node.

    Skips tables without an op or with fewer than two ranks, and rows with wrong results. Prefers
    out-of-place times, and uses the first row of each size.
    """
    sweeps = []
    for table in tables:
        points: dict[int, float] = {}
        for row in table.rows:
            timing = row.out_of_place or row.in_place
            if timing and timing.wrong <= 0 and timing.time_ns > 0 and row.message_bytes > 0:
                points.setdefault(row.message_bytes, float(timing.time_ns))
        if table.op and table.nranks > 1 and points:
            on_node = min(table.nranks, ranks_per_node or table.nranks)
            sizes, times = zip(*sorted(points.items()), strict=True)
            sweeps.append(
                TransferSweep(
                    SWEEP_OPS.get(table.op, table.op), table.nranks, on_node, sizes, times
                )
            )
    return tuple(sweeps)


# Times from NCCL's cost table, as printed in its log.

TUNER = Formula(
    "comm.tuner",
    "t = min over algorithms and protocols of latency + S / bandwidth; the latency of a ring with"
    " Simple between nodes x 1.4 (all_reduce)",
    "NVIDIA/nccl src/graph/tuning.cc; its correction of trees by size is left out",
)


@dataclass(frozen=True, slots=True)
class TunerCost:
    """One cell of the table: an op with one algorithm and protocol."""

    op: str
    latency_ns: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TunerTable:
    """NCCL's estimates for one communicator, by which it selects algorithms; not measured."""

    ranks: int
    ranks_per_node: int
    costs: tuple[TunerCost, ...]

    def estimate_ns(self, op: str, message_bytes: float) -> float | None:
        """Estimates the time of a call in ns (TUNER); None if the table does not have the op."""
        times_ns = (
            c.latency_ns + message_bytes / c.bytes_per_s * 1e9 for c in self.costs if c.op == op
        )
        return min(times_ns, default=None)


def build_tuner_table(table: CostTable, group: GroupPlacement) -> TunerTable:
    """Builds the table of a communicator from NCCL's cost table."""
    slow = ("all_reduce", "Ring", "Simple") if group.nodes > 1 else None
    costs = tuple(
        TunerCost(
            cell.op,
            # NCCL's estimate of a large ring between nodes is too short.
            cell.latency_ns
            * (PLATEAU.value if (cell.op, cell.algorithm, cell.protocol) == slow else 1.0),
            cell.bandwidth_bytes_per_s,
        )
        for cell in table.cells
        if cell.bandwidth_bytes_per_s > 0
    )
    return TunerTable(group.ranks, group.ranks_per_node, costs)


def build_tuner_tables(log: NcclLog) -> tuple[TunerTable, ...]:
    """Builds the log's tables with known communicator and nodes, the first of each placement."""
    by_group: dict[GroupPlacement, TunerTable] = {}
    for table in log.costs:
        if table.comm < 0:
            continue
        comm = log.communicators[table.comm]
        nodes = comm.nodes
        if nodes <= 0 and len(comm.members) >= comm.nranks:
            # Not logged: the distinct hosts of all members.
            nodes = len({member.host for member in comm.members})
        if comm.nranks > 1 and nodes > 0:
            group = GroupPlacement(comm.nranks, -(-comm.nranks // nodes))
            by_group.setdefault(group, build_tuner_table(table, group))
    return tuple(by_group.values())

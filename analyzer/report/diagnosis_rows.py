"""The rows of a report that diagnosis computes: critical paths, late arrivals, slow kernels."""

from __future__ import annotations

from msgspec import Struct


class PathPart(Struct, frozen=True):
    """Time that one rank contributes to the critical path of a step, per bucket and mesh axis.

    The parts of a step add up to its length.

    Attributes:
        step: Step number.
        rank: Global rank.
        bucket: Bucket of that time, one of BUCKETS.
        axis: Mesh axis for communication buckets, or the name of the group as in GroupRow; None
            for other buckets or an unknown group.
        ns: Duration in ns.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> sum(part.ns for part in report.critical_path if part.bucket == "compute")
        479590111
    """

    step: int
    rank: int
    bucket: str
    axis: str | None
    ns: int


class PathStep(Struct, frozen=True):
    """Extent of the critical path of one step.

    Attributes:
        step: Step number.
        start_ns: Earliest step start over all ranks, on the common clock in ns.
        end_ns: Latest step end over all ranks, on the common clock in ns.
        last_rank: Rank that finished last.
        jumps: Number of times the path changes ranks.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> [row.end_ns - row.start_ns for row in report.path_steps]
        [205392950, 184869335, 173537733, 176108535, 178687827]
    """

    step: int
    start_ns: int
    end_ns: int
    last_rank: int
    jumps: int


class PathKernel(Struct, frozen=True):
    """Time of the kernels of one name and stream on the critical paths; copies, collectives and
    messages, and in CPU runs ops, count as kernels.

    Where kernels overlap, the time is that of the one that began first.

    Attributes:
        rank: Global rank.
        kernel: Name of the kernel.
        stream: CUDA stream; None in CPU runs.
        bucket: Bucket of that time, one of BUCKETS.
        ns: Duration on the path, summed over the full steps, in ns.
        count: Number of kernels on the path.
        start_ns: Start of the one that is longest on the path, from the report's t0 in ns.
        dur_ns: Duration of that one.

    Examples:
        >>> report = analyze("sample_traces/tp2_pp2")
        >>> report.path_kernels[0].kernel
        'MmBackward0'
    """

    rank: int
    kernel: str
    stream: int | None
    bucket: str
    ns: int
    count: int
    start_ns: int
    dur_ns: int


class Lateness(Struct, frozen=True):
    """How often one rank arrived last at the collectives or messages on one axis.

    Only calls with all members recorded count, each once. Lateness is measured from the median
    arrival (for two members: from the earlier one).

    Attributes:
        rank: Global rank.
        axis: Mesh axis, or the name of the groups as in GroupRow; None if unknown.
        message: True for sends and receives, False for collectives.
        members: Number of members per call.
        calls: Number of calls.
        last: Number of calls in which all other members waited for this rank.
        late_ns_median: Median lateness over those calls in ns.
        late_ns_total: Summed lateness over those calls in ns.
        p_value: Probability of arriving last this often if all members are alike; 1 if last is at
            most the rank's share of the calls. None for messages, where the schedule decides who
            waits.
        straggler: Whether the rank is a straggler on this axis.

    Examples:
        >>> report = analyze("sample_traces/built_tp_pp_dp_slow_rank")
        >>> rows = [row for row in report.lateness if row.straggler]
        >>> [(row.rank, row.axis, round(row.last_fraction, 2)) for row in rows]
        [(3, 'tp', 1.0)]
    """

    rank: int
    axis: str | None
    message: bool
    members: int
    calls: int
    last: int
    late_ns_median: int
    late_ns_total: int
    p_value: float | None
    straggler: bool

    @property
    def last_fraction(self) -> float:
        """Fraction of the calls in which the rank arrived last, 0..1."""
        return self.last / self.calls


class SlowKernel(Struct, frozen=True):
    """A kernel that is slower on one rank than on its peers.

    Attributes:
        rank: Global rank.
        kernel: Kernel name.
        family: Kernel family, such as "gemm".
        ratio: Duration on this rank over that on the median rank, above 1.
        lost_ns: Time that this costs the rank per step in ns.
        count: Number of runs on this rank.
        shapes: Input shapes or launch grid of the runs, equal on all ranks; None if they were not
            recorded: the rank may have more work instead.

    Examples:
        >>> report = analyze("sample_traces/built_tp_pp_dp_slow_rank")
        >>> row = report.slow_kernels[0]
        >>> row.rank, row.family, round(row.ratio, 2)
        (3, 'gemm', 1.44)
    """

    rank: int
    kernel: str
    family: str
    ratio: float
    lost_ns: int
    count: int
    shapes: str | None = None

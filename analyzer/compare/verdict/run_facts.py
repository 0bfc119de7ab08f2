"""What the gate keeps of a run: small enough for a file in git, enough to say what moved."""

from __future__ import annotations

from msgspec import Struct


class Setup(Struct, frozen=True):
    """What ran where. None is unknown; ranks are those recorded; mesh is such as "pp 2 tp 4"."""

    world_size: int
    ranks: tuple[int, ...]
    hosts: int
    device: str
    mesh: str | None
    backend: str | None
    schedule: str | None
    microbatches: int | None
    torch: str | None
    nccl: str | None
    driver: str | None


class Value(Struct, frozen=True):
    """A metric of one run by its name, in the unit of metrics.py: shares 0..1, ns, bytes."""

    metric: str
    value: float


class CallsFact(Struct, frozen=True):
    """The calls of one kind: how many a full step, of all recorded ranks together, and the medians
    of one call. varies: not all steps of the run have as many."""

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    calls: int
    varies: bool
    transfer_ns: int
    wait_ns: int


class TimeFact(Struct, frozen=True):
    """The mean time of a bucket in a step of a rank, in ns; axis None: of all of the bucket."""

    bucket: str
    axis: str | None
    mean_ns: int


class BlameFact(Struct, frozen=True):
    """How much waiting one rank causes in a step, over all ranks; rank None is nobody."""

    rank: int | None
    cause: str
    axis: str | None
    caused_ns: int


class GroupFact(Struct, frozen=True):
    """A process group."""

    axis: str | None
    description: str
    ranks: tuple[int, ...]


class RunFacts(Struct, frozen=True):
    """One run. steps counts those that its values are medians of; calls is None where the report is
    older than the count of calls a step; predicted are the model's values, where there is a model.
    """

    name: str
    setup: Setup
    steps: int
    values: tuple[Value, ...]
    calls: tuple[CallsFact, ...] | None
    times: tuple[TimeFact, ...]
    blame: tuple[BlameFact, ...] = ()
    predicted: tuple[Value, ...] = ()
    groups: tuple[GroupFact, ...] = ()

    def value(self, metric: str) -> float | None:
        """The metric's value, None where the run does not tell it."""
        return next((one.value for one in self.values if one.metric == metric), None)

    def model(self, metric: str) -> float | None:
        """What the model says the metric should be, None where it says nothing of it."""
        return next((one.value for one in self.predicted if one.metric == metric), None)

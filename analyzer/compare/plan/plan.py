"""Plan: the layouts that fit a number of GPUs, the fastest first, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.buckets import Split

SCHEMA = "stepsplit.plan/1"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a plan chooses: the axes of the ranks and the settings that go with them."""

    tp: int
    pp: int
    cp: int
    dp_replicate: int
    dp_shard: int
    ep: int
    expert_tp: int
    sequence_parallel: bool
    zero: int
    schedule: str
    chunks: int
    layers_per_stage: tuple[int, ...] | None
    micro_batch: int
    recompute: str

    @property
    def axes(self) -> tuple[int, ...]:
        """How the GPUs are split, whatever the settings: tp, pp, cp, dp, ep."""
        return self.tp, self.pp, self.cp, self.dp_replicate * self.dp_shard, self.ep


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, with its prediction.

    split is the slowest stage's, exposed_ns its exposed communication by axis, the largest first;
    peak_bytes is the fullest stage's peak; mfu is None where no peak is known at the dtype.
    """

    choice: Choice
    microbatches: int
    split: Split
    exposed_ns: tuple[tuple[str, int], ...]
    peak_bytes: int
    mfu: float | None
    confidence: str

    @property
    def step_ns(self) -> int:
        return self.split.step_ns


@dataclass(frozen=True, slots=True)
class Reason:
    """How much longer a bucket of the step is than the best's, in ns; less than 0: shorter.

    axis names whose communication it is, "" outside collective and p2p.
    """

    bucket: str
    axis: str
    delta_ns: int


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best layout of another split of the GPUs. reasons: the longest first, what it gains last;
    more_bytes is its peak less the best's."""

    candidate: Candidate
    behind_ns: int
    more_bytes: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One question of the tree that people decide by: does this much of the cluster hold the model?

    The layout is the leanest of its kind: one sequence at a time, all recomputed.
    """

    question: str
    tp: int
    pp: int
    zero: int
    ranks: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where an axis of the best layout lies: its neighbors' link, and how many nodes it spans."""

    axis: str
    ranks: int
    nodes: int
    link: str


@dataclass(frozen=True, slots=True)
class Searched:
    """What became of the layouts: considered = refused + too_big + fit; timed of those that fit.

    Those that fit and were not timed can't be among the shown: even the least that they may take
    is longer. refused is counted by the arithmetic that fails.
    """

    considered: int
    too_big: int
    fit: int
    timed: int
    refused: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The best layout of a job on so many GPUs, and the best of each other split of them."""

    gpus: int
    best: Candidate
    runners_up: tuple[RunnerUp, ...]
    tree: tuple[Trial, ...]
    places: tuple[Place, ...]
    searched: Searched

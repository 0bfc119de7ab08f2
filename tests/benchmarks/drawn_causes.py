"""Causes in jobs of drawn kinds and sizes: python tests/benchmarks/drawn_causes.py --seeds 601 602

Each kind is drawn once a seed: its layout, size, rank, place and the script's and profiler's style.
The truth is the difference to the same job simulated without the cause.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsplit.analyzer import Finding, StepsplitError, analyze

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cuda_simulator.jobs import (
    CausalBlocks,
    Cause,
    ExpertLoad,
    ExtraKernels,
    HostStall,
    Job,
    MoreWork,
    SlowKernel,
    SlowLink,
    SlowRank,
    Throttling,
)
from cuda_simulator.kineto import TraceStyle
from cuda_simulator.simulate import simulate

from benchmarks.table import in_markdown

LEAST_SHARE, NEAR = 0.01, 0.15

_OF_THE_JOB = ("few_microbatches", "host_bound", "host_sync", "no_overlap")
"""What a job loses by itself, with and without a cause."""


@dataclass(frozen=True)
class Drawn:
    """A job with a cause, and what must be said of it; code "" of none."""

    job: Job
    cured: Job
    code: str
    ranks: frozenset[int] = frozenset()
    style: TraceStyle | None = None


def _draw_sizes(rng: random.Random) -> dict[str, Any]:
    """Any layout of 2 to 64 ranks."""
    sizes = rng.choice(
        (
            {"dp": rng.choice((2, 4, 8, 16))},
            {"dp": rng.choice((2, 4)), "tp": rng.choice((2, 4))},
            {"pp": rng.choice((2, 4)), "dp": rng.choice((1, 2, 4)), "microbatches": 8},
            {"pp": 4, "tp": 2, "dp": rng.choice((2, 8)), "microbatches": 8},
            {"dp": rng.choice((4, 8, 16)), "fsdp": True, "microbatches": 1, "layers": 10},
            {"dp": 8, "shards": 4, "fsdp": True, "microbatches": 1, "layers": 10},
            {"dp": rng.choice((4, 8)), "ep": 4, "microbatches": 2},
            {"cp": rng.choice((2, 4)), "dp": 2, "cp_ring": rng.random() < 0.5},
        )
    )
    return {"microbatches": 4, "layer_ns": rng.randint(300, 600) * 1_000, **sizes}


def _draw_job(rng: random.Random, **sizes: Any) -> Job:
    ends = rng.choice(("item", "device", "none"))
    return Job(
        "drawn",
        seed=rng.randrange(1_000),
        noise=rng.choice((0.005, 0.02)),
        end_of_step=ends,
        touching=rng.random() < 0.3,
        reduce_norm=rng.random() < 0.3,
        steps=5,
        whole_kernels=rng.random() < 0.5,
        **sizes,
    )


def _draw_style(rng: random.Random, **more: Any) -> TraceStyle:
    return TraceStyle(
        events=rng.choice(("none", "runtime", "cuda_sync")),
        whole_microseconds=rng.random() < 0.2,
        late_ends_ns=rng.choice((0, 0, 2_000)),
        **more,
    )


def _plant(rng: random.Random, job: Job, code: str, *causes: Cause) -> Drawn:
    ranks = frozenset(getattr(cause, "rank", -1) for cause in causes)
    return Drawn(replace(job, causes=causes), job, code, ranks, _draw_style(rng))


def _slow_rank(rng: random.Random) -> Drawn:
    job = _draw_job(rng, **_draw_sizes(rng))
    return _plant(
        rng, job, "slow_rank", SlowRank(rng.randrange(job.world_size), rng.uniform(1.12, 1.5))
    )


def _throttling(rng: random.Random) -> Drawn:
    job = _draw_job(rng, **_draw_sizes(rng))
    rank = rng.randrange(job.world_size)
    return _plant(rng, job, "slow_rank", Throttling(rank, 1.0, rng.uniform(1.25, 1.5)))


def _slow_kernel(rng: random.Random) -> Drawn:
    job = _draw_job(rng, **_draw_sizes(rng))
    late_ns = job.microbatches * job.layers * job.layer_ns
    place = rng.choice(("begin", "middle", "end"))
    cause = SlowKernel(rng.randrange(job.world_size), late_ns, rng.randrange(1, 5), place)
    return _plant(rng, job, "slow_rank", cause)


def _extra_kernels(rng: random.Random) -> Drawn:
    job = _draw_job(rng, **_draw_sizes(rng))
    extra_ns = job.microbatches * job.layers * job.layer_ns
    place = rng.choice(("begin", "middle", "end"))
    cause = ExtraKernels(rng.randrange(job.world_size), extra_ns, place, rng.randrange(1, 5))
    return _plant(rng, job, "uneven_ranks", cause)


def _more_work(rng: random.Random) -> Drawn:
    while True:
        job = _draw_job(rng, **_draw_sizes(rng))
        if job.world_size > job.pp:
            break
    part = rng.choice(("first", "second", "all"))
    return _plant(rng, job, "uneven_ranks", MoreWork(rng.randrange(job.world_size), 1.4, part))


def _uneven_stage(rng: random.Random) -> Drawn:
    sizes = {"pp": rng.choice((2, 4)), "tp": rng.choice((1, 2)), "dp": rng.choice((1, 2))}
    job = _draw_job(rng, layer_ns=450_000, microbatches=8, **sizes)
    per_stage = job.world_size // job.pp
    stage, times = rng.randrange(job.pp), 1.4
    heavy = range(stage * per_stage, (stage + 1) * per_stage)
    mean = 1 + (times - 1) / job.pp
    causes = tuple(MoreWork(rank, times) for rank in heavy)
    even = tuple(MoreWork(rank, mean) for rank in range(job.world_size))
    ran, cured = replace(job, causes=causes), replace(job, causes=even)
    return Drawn(ran, cured, "uneven_stages", frozenset(heavy), _draw_style(rng))


def _host_stall(rng: random.Random) -> Drawn:
    sizes = _draw_sizes(rng)
    job = _draw_job(rng, synchronize_microbatches=True, **sizes)
    stall_ns = job.layers * job.layer_ns
    return _plant(rng, job, "host_stall", HostStall(rng.randrange(job.world_size), stall_ns))


def _slow_link(rng: random.Random) -> Drawn:
    sizes, axis = rng.choice(
        (
            ({"tp": 2, "dp": rng.choice((2, 4)), "microbatches": 4}, "tp"),
            ({"tp": 4, "pp": 2, "microbatches": 8}, "tp"),
            ({"pp": 4, "dp": 2, "microbatches": 8}, "pp"),
            ({"pp": 4, "dp": 2, "microbatches": 8, "early_receives": True}, "pp"),
            ({"dp": 8, "ep": 4, "microbatches": 2}, "ep"),
            ({"cp": 4, "dp": 4, "cp_ring": False, "microbatches": 4}, "cp"),
            ({"dp": 8, "shards": 4, "fsdp": True, "microbatches": 1, "layers": 10}, "dp"),
        )
    )
    job = _draw_job(rng, layer_ns=450_000, **sizes)
    rank, times = rng.randrange(job.world_size), rng.uniform(4, 8)
    ranks = job.group(axis, rank).ranks
    if axis != "pp":
        drawn = _plant(rng, job, "slow_link", SlowLink(axis, rank, times))
        return replace(drawn, ranks=frozenset(ranks))
    place = ranks.index(rank)
    peer = ranks[place + 1] if place + 1 < len(ranks) else ranks[place - 1]
    drawn = _plant(rng, job, "slow_link", SlowLink(axis, rank, 3 * times, peer))
    return replace(drawn, ranks=frozenset((rank, peer)))


def _two_slow_ranks(rng: random.Random) -> Drawn:
    while True:
        job = _draw_job(rng, **_draw_sizes(rng))
        if job.world_size >= 4:
            break
    first = rng.randrange(job.world_size)
    second = (first + rng.randrange(1, job.world_size)) % job.world_size
    return _plant(rng, job, "slow_rank", SlowRank(first, 1.3), SlowRank(second, 1.3))


def _expert_load(rng: random.Random) -> Drawn:
    by = rng.choice(("nccl", "nccl", "deep_ep", "hybrid_ep", "mori"))
    job = _draw_job(
        rng, dp=rng.choice((4, 8)), ep=4, microbatches=rng.choice((2, 4)), experts_by=by,
        persistent=rng.random() < 0.5,
    )  # fmt: skip
    cause = ExpertLoad(rng.randrange(job.world_size), rng.uniform(1.4, 1.8))
    drawn = _plant(rng, job, "uneven_ranks", cause)
    return replace(drawn, style=replace(drawn.style or TraceStyle(), annotates=True))


def _schedules(rng: random.Random) -> Drawn:
    schedule = rng.choice(("interleaved", "zb-v", "dualpipe-v", "zb-h1", "1f1b", "dualpipe"))
    job = _draw_job(
        rng, pp=rng.choice((2, 4)), dp=rng.choice((1, 2)), microbatches=8, layers=1,
        schedule=schedule, chunks=2 if schedule == "interleaved" else 1,
    )  # fmt: skip
    cause = SlowRank(rng.randrange(job.world_size), rng.uniform(1.2, 1.6))
    return _plant(rng, job, "slow_rank", cause)


def _causal_ring(rng: random.Random) -> Drawn:
    cp = rng.choice((2, 4, 8))
    job = _draw_job(
        rng, cp=cp, dp=rng.choice((1, 2)), microbatches=2, layers=rng.choice((1, 2)),
        layer_ns=rng.choice((450_000, 1_500_000, 3_000_000)),
    )  # fmt: skip
    heavy = [rank for rank in range(job.world_size) if rank % cp >= cp / 2]
    drawn = _plant(rng, job, "uneven_ranks", CausalBlocks())
    return replace(drawn, ranks=frozenset(heavy))


def _whole_step_graph(rng: random.Random) -> Drawn:
    """Replayed kernels have no arguments."""
    sizes = rng.choice(
        (
            {"tp": rng.choice((2, 4)), "dp": 2, "microbatches": 4},
            {"dp": 8, "microbatches": 4},
            {"dp": 8, "fsdp": True, "microbatches": 1, "layers": 10},
        )
    )
    # What the host launched ahead of a recording is no launch of a graph that it captures there.
    job = replace(_draw_job(rng, **sizes), described=False, end_of_step="item")
    cause = SlowRank(rng.randrange(job.world_size), rng.uniform(1.2, 1.5))
    drawn = _plant(rng, job, "slow_rank", cause)
    return replace(drawn, style=replace(drawn.style or TraceStyle(), graph=True, captures=True))


def _late_buckets(rng: random.Random) -> Drawn:
    layers = rng.choice((2, 4, 8))
    job = _draw_job(
        rng, dp=rng.choice((2, 4, 8)), tp=rng.choice((1, 1, 2)), layers=layers,
        microbatches=rng.choice((1, 2, 4, 8)), buckets=rng.choice((2, layers)),
        bucket_ns=rng.choice((1_000_000, 2_000_000, 4_000_000)), layer_ns=450_000,
    )  # fmt: skip
    return Drawn(replace(job, late_buckets=True), job, "no_overlap", style=_draw_style(rng))


def _clean(rng: random.Random) -> Drawn:
    job = _draw_job(rng, **_draw_sizes(rng))
    return Drawn(job, job, "", style=_draw_style(rng))


KINDS: tuple[Callable[[random.Random], Drawn], ...] = (
    _slow_rank, _throttling, _slow_kernel, _extra_kernels, _more_work, _uneven_stage, _host_stall,
    _slow_link, _two_slow_ranks, _expert_load, _schedules, _causal_ring, _whole_step_graph,
    _late_buckets, _clean, _clean,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What was said of a drawn job, and what is true."""

    kind: str
    drawn: Drawn
    truth_ns: float
    step_ns: float
    findings: tuple[Finding, ...]

    @property
    def found(self) -> Finding | None:
        """The finding of the planted cause, with its ranks."""
        code, ranks = self.drawn.code, self.drawn.ranks
        own = (each for each in self.findings if each.code == code)
        return next((each for each in own if not ranks or ranks == frozenset(each.ranks)), None)

    @property
    def is_expected(self) -> bool:
        return bool(self.drawn.code) and self.truth_ns >= LEAST_SHARE * self.step_ns

    @property
    def is_right(self) -> bool:
        """The cause comes first, but for what the job loses by itself; without a cause worth a
        hundredth nothing does."""
        own = self.drawn.code
        others = [one for one in self.findings if one.code not in _OF_THE_JOB or one.code == own]
        if self.is_expected:
            return bool(others) and others[0] is self.found
        return all(one.code == own or one.gain_ns <= LEAST_SHARE * self.step_ns for one in others)

    @property
    def off(self) -> float:
        said = self.found.gain_ns if self.found else 0
        return said / self.truth_ns - 1

    def describe(self) -> str:
        job = self.drawn.job
        near = not self.is_expected or abs(self.off) <= NEAR
        sizes = {
            name: value
            for name, value in vars(job).items()
            if name not in ("name", "causes", "groups") and value != getattr(Job("drawn"), name)
        }
        lines = [
            f"{'ok  ' if self.is_right and near else 'FAIL'} {self.kind} truth "
            f"{self.truth_ns / 1e6:.2f} of {self.step_ns / 1e6:.2f} ms {self.drawn.code} "
            f"{sorted(self.drawn.ranks)[:9]} {sizes} {self.drawn.style} {job.causes[:2]}"
        ]
        if not (self.is_right and near):
            lines += [
                f"       * {one.gain_ns / 1e6:.2f} ms {one.code} {one.ranks[:9]}: {one.message}"
                for one in self.findings
            ]
        return "\n".join(lines)


def examine(kind: Callable[[random.Random], Drawn], seed: int, folder: Path) -> Outcome:
    """Simulates the job of a kind that a seed draws, and what is said of it."""
    name = kind.__name__.removeprefix("_")
    drawn = kind(random.Random(f"{name} {seed}"))
    ran, cured = simulate(drawn.job), simulate(drawn.cured)
    ran.write(folder, drawn.style)
    report = analyze(folder)
    whole = {row.step for row in report.steps} - {
        row.step for row in report.steps if row.kind != "full"
    }
    truth = [ran.steps_ns[step] - cured.steps_ns[step] for step in whole]
    steps = [ran.steps_ns[step] for step in whole]
    count = max(len(whole), 1)
    return Outcome(name, drawn, sum(truth) / count, sum(steps) / count, report.findings)


def summarize(kind: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """One line of the table."""
    expected = [one for one in outcomes if one.is_expected]
    off = sorted(abs(one.off) for one in expected)
    return (
        kind, str(len(outcomes)), f"{sum(one.is_right for one in outcomes)} of {len(outcomes)}",
        f"{sum(each <= NEAR for each in off)} of {len(off)}" if off else "",
        f"{100 * off[-1]:.0f} %" if off else "",
    )  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[601])
    parser.add_argument("--only", default="", help="part of the kinds to draw")
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    for seed in chosen.seeds:
        for number, kind in enumerate(KINDS):
            if chosen.only not in kind.__name__:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    outcomes.append(examine(kind, 100 * seed + number, Path(folder)))
                except StepsplitError as error:
                    sys.stderr.write(f"FAIL {kind.__name__} {seed}: {error}\n")
                    continue
            sys.stderr.write(f"{seed} {outcomes[-1].describe()}\n")
            sys.stderr.flush()
    rows = [("kind", "jobs", "first and rank right", "within 15 %", "worst")]
    for name in dict.fromkeys(one.kind for one in outcomes):
        rows.append(summarize(name, [one for one in outcomes if one.kind == name]))
    rows.append(summarize("all", outcomes))
    sys.stdout.write(f"{in_markdown(rows)}\n")


if __name__ == "__main__":
    main()

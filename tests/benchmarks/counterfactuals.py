"""Findings against jobs simulated without their cause: python tests/benchmarks/counterfactuals.py

Each job is simulated with one or two planted causes and again without; the difference of the mean
steps is the truth. The simulator (tests/cuda_simulator) knows nothing of the analyzer's replay.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepsplit.analyzer import Finding, Report, StepsplitError, UsageError, analyze, what_if

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cuda_simulator.jobs import (
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
from cuda_simulator.planted import CLEAN, LAYOUTS, Planted, list_causes, plant
from cuda_simulator.simulate import simulate

from benchmarks.table import in_markdown

LEAST_SHARE = 0.01
"""Causes worth less of the step need no finding; clean jobs may have none above it."""
WORTH_SHARE = 0.02
NEAR, FAR = 0.15, 0.25

_CODES = {
    SlowRank: "slow_rank",
    HostStall: "host_stall",
    SlowLink: "slow_link",
    ExpertLoad: "uneven_ranks",
    Throttling: "slow_rank",
    SlowKernel: "slow_rank",
    ExtraKernels: "uneven_ranks",
    MoreWork: "uneven_ranks",
}


@dataclass(frozen=True)
class Part:
    """A cause, or causes cured together: what it costs, and what the report says of it."""

    label: str
    truth_ns: float
    said_ns: int | None
    place: int | None
    """0 for the first finding."""

    @property
    def error(self) -> float:
        """Relative to the truth; 1 without a finding."""
        return abs((self.said_ns or 0) - self.truth_ns) / self.truth_ns


@dataclass(frozen=True)
class Trial:
    """One job, examined."""

    planted: Planted
    step_ns: float
    parts: tuple[Part, ...]
    """The causes that must be found, each with its own saving."""
    individual: tuple[Part, ...]
    """If the causes mask each other: each cured alone."""
    findings: tuple[Finding, ...]
    blamed: int | None
    """The rank that caused most waiting."""
    on_path: int | None
    """The rank with most of the critical path."""
    seconds: float
    """What the analysis took."""

    @property
    def expected(self) -> tuple[Part, ...]:
        """The parts that cost enough to be found."""
        return tuple(part for part in self.parts if part.truth_ns >= LEAST_SHARE * self.step_ns)

    @property
    def largest_share(self) -> float:
        """The largest finding as a share of the step."""
        return max((each.gain_ns for each in self.findings), default=0) / self.step_ns

    @property
    def right(self) -> bool:
        """The expected causes, with their ranks, come first; else nothing above 1 % is found."""
        expected = self.expected
        if not expected:
            return self.largest_share <= LEAST_SHARE
        return all(part.place is not None and part.place < len(expected) for part in expected)

    @property
    def agrees(self) -> bool | None:
        """Blame and critical path name the slow rank too; None if one slow rank is not all."""
        causes = self.planted.job.causes
        if len(causes) != 1 or not isinstance(causes[0], SlowRank) or not self.expected:
            return None
        return self.blamed == self.on_path == causes[0].rank

    @property
    def worst_error(self) -> float:
        return max((part.error for part in self.expected), default=0.0)

    @property
    def is_worth_much(self) -> bool:
        """Each expected cause costs 2 % of the step."""
        return all(part.truth_ns >= WORTH_SHARE * self.step_ns for part in self.expected)


def _name_ranks(job: Job, causes: Sequence[Cause]) -> frozenset[int]:
    ranks: set[int] = set()
    for cause in causes:
        if isinstance(cause, SlowLink) and cause.peer is not None:
            ranks.update((cause.rank, cause.peer))
        elif isinstance(cause, SlowLink):
            ranks.update(job.group(cause.axis, cause.rank).ranks)
        else:
            ranks.add(cause.rank)
    return frozenset(ranks)


def _is_found(finding: Finding, job: Job, causes: Sequence[Cause]) -> bool:
    """The finding has the causes' code and exactly their ranks."""
    if finding.code != _CODES[type(causes[0])]:
        return False
    return _name_ranks(job, causes) == frozenset(finding.ranks)


def _find_blamed(report: Report) -> int | None:
    caused_ns: Counter[int] = Counter()
    for row in report.blame:
        if row.rank is not None:
            caused_ns[row.rank] += row.caused_ns
    return caused_ns.most_common(1)[0][0] if caused_ns else None


def _find_on_path(report: Report) -> int | None:
    on_path_ns: Counter[int] = Counter()
    for part in report.critical_path:
        on_path_ns[part.rank] += part.ns
    return on_path_ns.most_common(1)[0][0] if on_path_ns else None


class Bench:
    """Simulates, writes and analyzes jobs; remembers the steps of jobs without causes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.steps_ns: dict[Job, dict[int, float]] = {}

    def measure_ns(self, job: Job, steps: Collection[int] = ()) -> float:
        """Mean of these steps of a job; without any, of all that it records."""
        if job not in self.steps_ns:
            self.steps_ns[job] = simulate(job).steps_ns
        return statistics.mean(
            length for number, length in self.steps_ns[job].items() if not steps or number in steps
        )

    def examine(self, planted: Planted) -> Trial:
        job = planted.job
        simulation = simulate(job)
        self.steps_ns[job] = simulation.steps_ns
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            simulation.write(Path(name), planted.style)
            del simulation
            begin = time.perf_counter()
            report = analyze(name)
            seconds = time.perf_counter() - begin
        # Of a host that runs ahead, the recording begins within its first step: what happens there
        # is not to be seen, so that the truth is that of the whole steps.
        whole = {row.step for row in report.steps} - {
            row.step for row in report.steps if row.kind != "full"
        }
        # What the schedule of a pipeline leaves idle is no cause of the job with it.
        findings = [one for one in report.findings if one.code != "few_microbatches"]
        together = len(job.causes) > 1 and len({type(each) for each in job.causes}) == 1
        sets = [job.causes] if together else [(cause,) for cause in job.causes]
        alone = [(cause,) for cause in job.causes] if together else []
        return Trial(
            planted,
            self.measure_ns(job, whole),
            tuple(self._compare(job, causes, findings, whole) for causes in sets),
            tuple(self._compare(job, causes, findings, whole) for causes in alone),
            tuple(findings),
            _find_blamed(report),
            _find_on_path(report),
            seconds,
        )

    def _compare(
        self, job: Job, causes: Sequence[Cause], findings: Sequence[Finding], whole: Collection[int]
    ) -> Part:
        cured = job.without(*causes)
        truth_ns = self.measure_ns(job, whole) - self.measure_ns(cured, whole)
        place = next((i for i, each in enumerate(findings) if _is_found(each, job, causes)), None)
        said_ns = None if place is None else findings[place].gain_ns
        label = " and ".join(str(cause) for cause in causes)
        return Part(label, truth_ns, said_ns, place)


_HEAD: tuple[str, ...] = (
    "layout", "planted", "jobs", "costs", "first and rank right", "within 15 %", "within 25 %",
    "error: median", "worst", "blame and path agree",
)  # fmt: skip


def summarize(layout: str, cause: str, trials: Sequence[Trial]) -> tuple[str, ...]:
    """One line of the table of causes."""
    costs = sorted(sum(part.truth_ns for part in each.parts) / each.step_ns for each in trials)
    right = f"{sum(each.right for each in trials)} of {len(trials)}"
    found = [each for each in trials if each.expected]
    worth = [each for each in found if each.is_worth_much]
    if not found:
        largest = max(each.largest_share for each in trials)
        cost = "" if cause == CLEAN else _format_range(costs)
        return (
            layout, cause, str(len(trials)), cost, right, "", "",
            f"largest finding {100 * largest:.1f} % of the step", "", "",
        )  # fmt: skip
    agrees = [each.agrees for each in found if each.agrees is not None]
    errors = sorted(each.worst_error for each in found)
    return (
        layout, cause, str(len(trials)), _format_range(costs), right,
        f"{sum(each.worst_error <= NEAR for each in found)} of {len(found)}",
        f"{sum(each.worst_error <= FAR for each in worth)} of {len(worth)}",
        f"{100 * statistics.median(errors):.1f} %", f"{100 * errors[-1]:.1f} %",
        f"{sum(agrees)} of {len(agrees)}" if agrees else "",
    )  # fmt: skip


def _format_range(costs: Sequence[float]) -> str:
    low, high = 100 * costs[0], 100 * costs[-1]
    return f"{low:.1f} %" if len(costs) == 1 else f"{low:.1f} to {high:.1f} %"


def describe(trial: Trial) -> Iterator[str]:
    """What was planted, what it costs, and the first findings."""
    job = trial.planted.job
    mark = "ok  " if trial.right and trial.worst_error <= NEAR else "FAIL"
    yield (
        f"{mark} {trial.planted.layout} {trial.planted.cause} seed {job.seed}, noise "
        f"{100 * job.noise:g} %, {job.end_of_step}: step {trial.step_ns / 1e6:.2f} ms, "
        f"blamed most: rank {trial.blamed}, on the critical path: rank {trial.on_path}"
    )
    for part in [*trial.parts, *trial.individual]:
        said = "nothing" if part.said_ns is None else f"{part.said_ns / 1e6:.2f}"
        yield f"       truth {part.truth_ns / 1e6:.2f} ms, said {said}: {part.label}"
    for finding in trial.findings[:3]:
        yield (
            f"       * {finding.gain_ns / 1e6:.2f} ms {finding.code} {finding.ranks[:9]}: "
            f"{finding.message[:110]}"
        )


@dataclass(frozen=True)
class Change:
    """A what-if question, and the job that answers it."""

    label: str
    text: str
    job: Job
    changed: Job
    scale: float = 1.0
    """Steps of the changed job count this much."""


def list_changes(seed: int) -> list[Change]:
    """No straggler, faster links, other buckets, another number of microbatches."""
    slow = [
        plant(layout, "slow_rank_1.3", seed).job
        for layout in ("tp4_pp4_dp2", "dp16", "tp8_dp2", "fsdp8", "ep8_dp16")
    ]
    changes = [
        Change("no straggler", "no-slow-ranks", job, job.without(*job.causes)) for job in slow
    ]
    for layout, axis, text in (
        ("tp4_pp4_dp2", "tp", "link:tp=2"), ("tp4_pp4_dp2", "pp", "link:pp=2"),
        ("tp4_pp4_dp2", "dp", "link:dp_replicate=2"), ("tp8_dp2", "tp", "link:tp=2"),
        ("dp16", "dp", "link:all=2"), ("fsdp8", "dp", "link:all=2"),
        ("ep8_dp16", "ep", "link:ep=2"), ("cp4_dp4_gather", "cp", "link:cp=2"),
    ):  # fmt: skip
        job = plant(layout, CLEAN, seed).job
        changes.append(Change("faster link", text, job, replace(job, link_speeds=((axis, 2.0),))))
    for layout in ("dp16", "tp8_dp2"):
        job = replace(
            plant(layout, CLEAN, seed).job,
            layers=8, layer_ns=LAYOUTS[layout].layer_ns // 4, buckets=8, bucket_latency_ns=200_000,
            first_bucket=0.5,
        )  # fmt: skip
        for count in (1, 2, 4):
            merged = replace(job, buckets=count, first_bucket=1.0)
            changes.append(Change("buckets", f"buckets={count}", job, merged))
    for layout in ("tp4_pp4", "tp4_pp4_dp2", "tp2_pp2_dp8"):
        job = plant(layout, CLEAN, seed).job
        for count in (8, 32):
            changed = replace(job, microbatches=count)
            changes.append(
                Change(
                    "microbatches", f"microbatches={count}", job, changed, job.microbatches / count
                )
            )
    return changes


def compare_change(bench: Bench, change: Change, folder: Path) -> tuple[str, ...]:
    """One line of the what-if table."""
    simulation = simulate(change.job)
    before_ns, truth_ns = simulation.step_ns, bench.measure_ns(change.changed) * change.scale
    with tempfile.TemporaryDirectory(dir=folder) as name:
        simulation.write(Path(name))
        try:
            said = what_if(name, changes=[change.text])
        except UsageError as error:
            return (
                change.label, change.job.name, change.text, f"{before_ns / 1e6:.2f}",
                f"{truth_ns / 1e6:.2f}", str(error)[:60], "", "",
            )  # fmt: skip
    step_ns = said.changes[0].step_ns
    gain_ns, error_ns = before_ns - truth_ns, step_ns - truth_ns
    return (
        change.label, change.job.name, change.text, f"{before_ns / 1e6:.2f}",
        f"{truth_ns / 1e6:.2f}", f"{step_ns / 1e6:.2f}", f"{100 * error_ns / truth_ns:+.1f} %",
        f"{100 * error_ns / -abs(gain_ns):+.0f} %" if gain_ns else "",
    )  # fmt: skip


_WHAT_IF_HEAD: tuple[str, ...] = (
    "question", "layout", "change", "step, ms", "truth, ms", "said, ms", "error of the step",
    "saving off by",
)  # fmt: skip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", action="append", choices=sorted(LAYOUTS), default=[])
    parser.add_argument("--cause", default="", help="part of the causes to plant")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--skip-causes", action="store_true")
    parser.add_argument("--skip-what-if", action="store_true")
    parser.add_argument("--all", action="store_true", help="describe right trials too")
    chosen = parser.parse_args()
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        if not chosen.skip_causes:
            layouts = chosen.layout or list(LAYOUTS)
            _print_causes(bench, layouts, chosen.cause, seeds, chosen.all)
        if not chosen.skip_what_if:
            rows = [_WHAT_IF_HEAD]
            for seed in seeds:
                for change in list_changes(seed):
                    if not chosen.layout or change.job.name in chosen.layout:
                        rows.append(compare_change(bench, change, Path(name)))
                        sys.stderr.write(f"{' | '.join(rows[-1])}\n")
            sys.stdout.write(f"\n{in_markdown(rows)}\n")


def _print_causes(
    bench: Bench, layouts: Sequence[str], part: str, seeds: Sequence[int], show_all: bool
) -> None:
    rows, trials = [_HEAD], []
    for layout in layouts:
        for cause in list_causes(layout):
            if part not in cause:
                continue
            some = []
            for seed in seeds:
                try:
                    some.append(bench.examine(plant(layout, cause, seed)))
                except StepsplitError as error:
                    sys.stderr.write(f"FAIL {layout} {cause} seed {seed}: {error}\n")
            for trial in some:
                if show_all or not trial.right or trial.worst_error > NEAR:
                    sys.stderr.write("\n".join(describe(trial)) + "\n")
            rows.append(summarize(layout, cause, some))
            sys.stderr.write(f"{' | '.join(rows[-1])}\n")
            trials += some
        bench.steps_ns.clear()
    found = [each for each in trials if each.expected]
    worth = [each for each in found if each.is_worth_much]
    sys.stdout.write(f"{in_markdown(rows)}\n\n")
    sys.stdout.write(
        f"{sum(each.right for each in trials)} of {len(trials)} right; within 15 %: "
        f"{sum(each.worst_error <= NEAR for each in found)} of {len(found)}; within 25 %: "
        f"{sum(each.worst_error <= FAR for each in worth)} of {len(worth)} worth 2 % of the step\n"
    )


if __name__ == "__main__":
    main()

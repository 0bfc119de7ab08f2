"""Published tuning tables: what `plan` picks for their jobs, and the rank of what they found best.

python tests/benchmarks/tuning_tables.py [--name WORD]

Of each job: the rank of the published best split of the GPUs among plan's, plan's first pick, how
sure that fits, and what the table says of its split: the measured step over the best, that it ran
out of memory, or nothing. A search keeps what the table did not vary. The bands know the runs of
the first four tables, the constants those of the fifth; of the last nothing was made.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.plan_space import KEYS
from stepsplit.analyzer.validation.predictions import NANOTRON
from stepsplit.analyzer.validation.published_runs import build_nanotron, list_published_cases
from stepsplit.analyzer.validation.tables import Published

Split = tuple[int, int, int, int]
"""tp, pp, cp, ep."""

TOP = 8

DENSE = frozenset({"cp", "ep", "zero", "schedule", "chunks"})
"""What tables of dense models kept: no context parallelism, one schedule."""


@dataclass(frozen=True)
class TuningTable:
    """The runs of a publisher, of which those with a model, length and batch in common are a job;
    least is how many splits of the GPUs it has to have tried. out_of_memory: splits that the table
    says ran out of memory, with their microbatch, by GPUs."""

    title: str
    source: str
    least: int = 3
    keep: frozenset[str] = DENSE
    out_of_memory: frozenset[tuple[int, Split, int, str]] = frozenset()


TABLES = (
    TuningTable("Hagemann et al., arXiv:2311.05610, spreadsheets", "aleph-alpha", 8),
    TuningTable("BigScience tr11-176B, chronicles", "bigscience", 4),
    TuningTable("Skywork, arXiv:2310.19341, table 10", "skywork"),
    TuningTable(
        "Nebius PoC, training/README.md", "nebius", 4,
        out_of_memory=frozenset({(16, (1, 1, 1, 1), 1, "none")}),
    ),
    TuningTable(
        "Megatron-Bridge, performance summary (Llama on H100 and GB200)", "megatron-bridge", 1,
        frozenset({"ep", "schedule"}),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class TunedJob:
    """A job of a table, its measured steps by split, and the best of them."""

    title: str
    name: str
    job: JobConfig
    keep: frozenset[str]
    best: Split
    steps_ns: dict[Split, int]
    out_of_memory: frozenset[tuple[int, Split, int, str]]


def split_of(job: JobConfig) -> Split:
    layout = job.parallel
    return layout.tp, layout.pp, layout.cp, layout.ep


def find_setting(job: JobConfig, key: str) -> object:
    """The value of a key that plan can keep."""
    return getattr(job.training if hasattr(job.training, key) else job.parallel, key)


def list_jobs() -> Iterator[TunedJob]:
    cases = list_published_cases().cases
    for table in TABLES:
        sets = defaultdict(list)
        for case in cases:
            job, training = case.job, case.job.training
            if case.source == table.source and job.model.experts is None:
                key = (
                    job.model, job.hardware, job.parallel.world_size, training.dtype,
                    training.seq_len, training.global_batch, bool(training.lora_rank),
                )  # fmt: skip
                sets[key].append(case)
        for runs in sets.values():
            steps_ns: dict[Split, int] = {}
            for run in runs:
                own = split_of(run.job)
                steps_ns[own] = min(run.step_ns, steps_ns.get(own, run.step_ns))
            first = min(runs, key=lambda run: run.step_ns).job
            model = first.model
            if len(steps_ns) < table.least or first.training.lora_rank:
                continue
            name = f"{model.name or f'{model.layers}x{model.hidden}'}, {first.training.seq_len:,}"
            keep = table.keep
            if table.least > 1:  # With a single split nothing says what its authors tried.
                keep |= {
                    key for key in KEYS if len({find_setting(run.job, key) for run in runs}) < 2
                }
            yield TunedJob(
                table.title, f"{name} on {first.parallel.world_size} {first.hardware.name}", first,
                keep, split_of(first), steps_ns, table.out_of_memory,
            )  # fmt: skip
    for row in Published().read_records(NANOTRON):
        job = build_nanotron(row)
        yield TunedJob(
            "Hugging Face, Ultra-Scale Playbook, best of each cell",
            f"{row.read_text('params_B')}B on {job.parallel.world_size} H100", job,
            frozenset({"cp", "ep", "schedule", "recompute"}), split_of(job), {split_of(job): 0},
            frozenset(),
        )  # fmt: skip


def describe(tuned: TunedJob) -> tuple[bool | None, str]:
    """Whether the best is within plan's first three, and a line."""
    gpus = tuned.job.parallel.world_size
    try:
        found = plan(tuned.job, gpus, tuned.keep, TOP)
    except UsageError as error:
        return False, f"| {tuned.name} | no plan: {error} |"
    candidates = [found.best, *(each.candidate for each in found.runners_up)]
    splits = [(one.choice.tp, one.choice.pp, one.choice.cp, one.choice.ep) for one in candidates]
    rank = splits.index(tuned.best) + 1 if tuned.best in splits else 0
    first, choice = splits[0], found.best.choice
    said = "not in the table"
    if (gpus, first, choice.micro_batch, choice.recompute) in tuned.out_of_memory:
        said = "RAN OUT OF MEMORY"
    elif first in tuned.steps_ns:
        behind = tuned.steps_ns[first] / tuned.steps_ns[tuned.best] - 1 if rank != 1 else 0
        said = f"ran, {behind:+.1%} of the best" if len(tuned.steps_ns) > 1 else "ran"
    chance = found.best.fit_chance or 0.0
    cells = (
        tuned.name, format_split(tuned.best), str(rank) if rank else f"above {len(splits)}",
        f"{format_split(first)} mb {choice.micro_batch} {choice.recompute}",
        f"{found.best.peak_bytes / 2**30:.0f} GiB, {chance:.0%}", said,
    )  # fmt: skip
    return 0 < rank <= 3, f"| {' | '.join(cells)} |"


def format_split(split: Sequence[int]) -> str:
    names = ("tp", "pp", "cp", "ep")
    return " ".join(f"{n}{s}" for n, s in zip(names, split, strict=True) if s > 1) or "dp alone"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--name", default="", help="tables with this word in their title")
    given = options.parse_args()
    title = ""
    within: defaultdict[str, list[bool]] = defaultdict(list)
    for tuned in list_jobs():
        if given.name not in tuned.title:
            continue
        if tuned.title != title:
            title = tuned.title
            heads = "job | published best | rank | plan's first | memory, sure | of that split"
            sys.stdout.write(f"\n{title}\n\n| {heads} |\n|{'---|' * 6}\n")
        is_within, line = describe(tuned)
        within[title].append(bool(is_within))
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    for name, found in within.items():
        sys.stdout.write(f"\n{name}: within the first three in {sum(found)} of {len(found)}\n")


if __name__ == "__main__":
    main()

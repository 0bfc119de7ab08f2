"""Faults injected into other people's training code: python tests/benchmarks/injected_faults.py

Two gloo ranks on the CPU train with transformers, accelerate, DeepSpeed, Lightning, FSDP2 and
torch's pipeline, without a fault and with each of some. Both jobs run at the same time and take
turns of a few steps, so that the noise of the machine meets both alike, and in one of the turns
some more steps are recorded by `stepsplit record`. The truth is the difference of the mean step
with the fault and without it, by time.perf_counter and without a profiler; said is the finding that
names the fault.

    injected_faults.py                         # both, in a temporary folder
    injected_faults.py --record --work DIR     # adds recordings to a folder
    injected_faults.py --report --work DIR     # the table of the recordings that it has
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from injected_faults.jobs import FRAMEWORKS, list_missing, record
from injected_faults.trials import Trial, read_trials

from benchmarks.table import in_markdown
from stepsplit.analyzer.report.report import Finding

_HEAD = (
    "framework", "fault", "step without", "truth", "share", "first", "saving within 30 %",
    "both", "said", "first instead", "false findings",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Records, and prints the table."""
    args = _parse_arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        if args.record or not args.report:
            record_all(work, args.repeat, args.only, args.fault)
        if args.report or not args.record:
            sys.stdout.write(f"{in_markdown([_HEAD, *map(format_trial, read_trials(work))])}\n")


def record_all(work: Path, repeats: int, only: str, fault: str) -> None:
    """Adds recordings of these frameworks and faults to the folder, as often as asked for."""
    for turn in range(repeats):
        for framework, faults in FRAMEWORKS.items():
            if only not in framework:
                continue
            if missing := list_missing(framework):
                _say(f"{framework}: no {', '.join(missing)}")
                continue
            for name in faults:
                if fault in name:
                    _say(f"{turn + 1} of {repeats}: {framework}: {name}")
                    _record(framework, name, work / framework)


def _record(framework: str, name: str, folder: Path) -> None:
    """Adds the pair of jobs in the next numbered folder; failed ones are reported and kept
    apart."""
    place = folder / f"{len(list(folder.glob('*'))) + 1:03}"
    try:
        record(framework, name, place)
    except RuntimeError as error:
        _say(str(error))
        place.rename(folder / f"failed_{place.name}")


def format_trial(trial: Trial) -> tuple[str, ...]:
    """One line of the table."""
    named = sum(map(trial.is_named, trial.faulty))
    near = sum(map(trial.is_near, trial.faulty))
    both = sum(trial.is_named(one) and trial.is_near(one) for one in trial.faulty)
    first = [one.findings[0] for one in trial.faulty if one.findings and not trial.is_named(one)]
    without_s = mean(turn for one in trial.clean for turn in one.turns_s)
    false = [f for one in trial.faulty for f in trial.list_false(one)]
    return (
        trial.framework,
        trial.name,
        f"{1e3 * without_s:.0f} ms",
        f"{1e3 * trial.truth_s:.0f} ± {1e3 * trial.error_s:.0f} ms",
        f"{100 * trial.truth_s / (trial.truth_s + without_s):.0f} %",
        f"{named} of {len(trial.faulty)}",
        f"{near} of {len(trial.faulty)}",
        f"{both} of {len(trial.faulty)}",
        ", ".join(_format_said(trial.find_said(one)) for one in trial.faulty),
        ", ".join(map(_format_finding, first)),
        ", ".join(map(_format_finding, false)),
    )


def _format_said(said: Finding | None) -> str:
    return _format_finding(said) if said is not None else "nothing"


def _format_finding(finding: Finding) -> str:
    ranks = f" r{','.join(map(str, finding.ranks))}" if finding.ranks else ""
    return f"{finding.code}{ranks} {finding.gain_ns / 1e6:.0f}"


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder of the recordings")
    parser.add_argument("--record", action="store_true", help="only record")
    parser.add_argument("--report", action="store_true", help="only report")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--only", default="", help="part of the names of the frameworks to record")
    parser.add_argument("--fault", default="", help="part of the names of the faults to record")
    return parser.parse_args(argv)


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


if __name__ == "__main__":
    main()

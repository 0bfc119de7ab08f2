"""stepsplit check: candidate runs against a baseline -> a verdict, as a gate's exit status."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.dashboard.commands.json_out import put_json
from stepsplit.dashboard.commands.store_options import artifacts_option, open_store, store_option

if TYPE_CHECKING:
    from stepsplit.analyzer.regression.check_result import Verdict
    from stepsplit.dashboard.commands.sides import Run
    from stepsplit.dashboard.store.store import Store

EXITS = {"pass": 0, "regressed": 1, "inconclusive": 3}
_EPILOG = (
    "Budgets: exposed_comm:5% (of the baseline), exposed_comm:2pt (points of the step), "
    "step:5%,3ms (whichever allows more), exposed_comm:<=10%, mfu:>=40%, step:model+20%, "
    "calls:exact. Exits: 0 pass, 1 regressed, 2 bad input, 3 inconclusive."
)


def _file(flag: str, text: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.option(flag, metavar="FILE", type=click.Path(path_type=Path), help=text)


@click.command(epilog=_EPILOG)
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...")
@click.option("--baseline", "baselines", multiple=True, metavar="B",
              help="Runs to hold the candidate against; may be repeated.")  # fmt: skip
@click.option("--budget", "budgets", multiple=True, metavar="FILE|RULE",
              help="How much worse a metric may be; may be repeated. By default calls and bytes "
                   "exact, exposed_comm and bubble 10%,1pt.")  # fmt: skip
@click.option("--run", "run_file", metavar="RUN.toml",
              help="Hold the candidates against the model, for budgets such as step:model+20%; "
                   "auto: by what they tell.")  # fmt: skip
@click.option("--across-setups", is_flag=True,
              help="Compare runs of another device, mesh, backend or world size too.")  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the verdict here; - for standard output, and nothing else there.",
)  # fmt: skip
@_file("--junit", "Write a JUnit XML report.")
@_file("--summary", "Add markdown to this file, such as $GITHUB_STEP_SUMMARY.")
@_file("--markdown", "Write markdown for a comment on a pull request.")
@_file("--codequality", "Write GitLab's code quality JSON.")
@_file("--openmetrics", "Write OpenMetrics text, for GitLab's metrics reports.")
@_file("--bencher", "Write Bencher's JSON.")
@_file("--benchmark-action", "Write github-action-benchmark's JSON (customSmallerIsBetter).")
@click.option("--dashboard", "dashboard_url", metavar="URL",
              help="Where the store's runs are seen, to link to.")  # fmt: skip
@store_option
@artifacts_option
def command(
    candidates: tuple[str, ...],
    baselines: tuple[str, ...],
    budgets: tuple[str, ...],
    run_file: str | None,
    across_setups: bool,
    json_file: str | None,
    dashboard_url: str | None,
    url: str,
    artifacts: str,
    **files: Path | None,
) -> int:
    """Say whether runs stay within their budgets: pass, regressed or inconclusive.

    CANDIDATE and B are each a recording as analyze takes it, a report.json or its folder, a file of
    stepsplit baseline, or runs of a store: store:branch=main,last=10 or store:ID. Name 3 to 5 runs
    a side: one run does not tell its noise.
    """
    # What judges is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.regression.check_result import to_json
    from stepsplit.dashboard.commands.sides import runs_at
    from stepsplit.dashboard.commands.verdict_files import write_files

    store = cache(lambda: open_store(url, artifacts))
    before, own = runs_at(baselines, store), runs_at(candidates, store, run_file)
    verdict = _judged(own, before, budgets, across_setups, dashboard_url)
    write_files(verdict, files, _named(budgets, baselines))
    if any(run.id for run in own):
        _record(store(), own, verdict)
    if not put_json(verdict, to_json, json_file):
        _show(verdict)
    return EXITS[verdict.answer]


def _judged(
    candidate: Sequence[Run],
    baseline: Sequence[Run],
    budgets: Sequence[str],
    across_setups: bool,
    dashboard_url: str | None,
) -> Verdict:
    from msgspec.structs import replace

    from stepsplit.analyzer.regression.budgets import DEFAULT, budgets_of
    from stepsplit.analyzer.regression.judge import judge

    own = {run.id for run in candidate if run.id}
    others = [run for run in baseline if run.id not in own]
    sides = ([run.facts for run in candidate], [run.facts for run in others])
    verdict = judge(*sides, budgets_of(budgets or DEFAULT), across_setups)
    ids = [next((run.id for run in reversed(side) if run.id), None) for side in (others, candidate)]
    if dashboard_url is None or None in ids:
        return verdict
    address = f"{dashboard_url.rstrip('/')}/compare?baseline={ids[0]}&candidate={ids[1]}"
    return replace(verdict, compare_url=address)


def _named(budgets: Sequence[str], baselines: Sequence[str]) -> str:
    """The file that a reader of the verdict may want to change."""
    files = [one for one in (*budgets, *baselines) if Path(one).is_file()]
    return files[0] if files else "stepsplit"


def _record(store: Store, candidate: Sequence[Run], verdict: Verdict) -> None:
    """Keeps the answer beside the runs of the store that it is of."""
    from stepsplit.dashboard.reporters.verdict_words import headline

    for run in candidate:
        if run.id is not None:
            store.verdicts.record(run.id, verdict.answer, headline(verdict))


def _show(verdict: Verdict) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.github import workflow_commands
    from stepsplit.dashboard.reporters.verdict import screen

    Console(highlight=False).print(screen(verdict))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(verdict):
            click.echo(line)

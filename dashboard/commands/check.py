"""stepsplit check, baseline and compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError, unwritable, write
from stepsplit.dashboard.commands.common import (
    artifacts_option,
    cores,
    load_rules,
    open_store,
    put_json,
    rules_option,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.kernel_rules import Rules
    from stepsplit.analyzer.regression.checks import Verdict
    from stepsplit.analyzer.regression.compare import RunComparison
    from stepsplit.analyzer.regression.metrics import RunFacts
    from stepsplit.dashboard.store.runs import RunRow
    from stepsplit.dashboard.store.store import Store


# stepsplit check: candidate runs against a baseline -> a verdict, as a gate's exit status.

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
@click.option("--job", "job_file", metavar="job.toml",
              help="Hold the candidates against the model, for budgets such as step:model+20%; "
                   "auto: by what they tell.")  # fmt: skip
@rules_option
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
def check_command(
    candidates: tuple[str, ...],
    baselines: tuple[str, ...],
    budgets: tuple[str, ...],
    job_file: str | None,
    rules_file: Path | None,
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
    from stepsplit.analyzer.regression.checks import to_json

    store = cache(lambda: open_store(url, artifacts))
    rules = load_rules(rules_file)
    before = runs_at(baselines, store, None, rules)
    own = runs_at(candidates, store, job_file, rules)
    verdict = _judged(own, before, budgets, across_setups, dashboard_url)
    write_files(verdict, files, _named(budgets, baselines))
    if any(run.id for run in own):
        _record(store(), own, verdict)
    if not put_json(verdict, to_json, json_file):
        _show_check(verdict)
    return EXITS[verdict.answer]


def _judged(
    candidate: Sequence[SideRun],
    baseline: Sequence[SideRun],
    budgets: Sequence[str],
    across_setups: bool,
    dashboard_url: str | None,
) -> Verdict:
    from msgspec.structs import replace

    from stepsplit.analyzer.analysis import DEFAULT_BUDGETS
    from stepsplit.analyzer.regression.checks import budgets_of
    from stepsplit.analyzer.regression.judge import judge

    own = {run.id for run in candidate if run.id}
    others = [run for run in baseline if run.id not in own]
    sides = ([run.facts for run in candidate], [run.facts for run in others])
    verdict = judge(*sides, budgets_of(budgets or DEFAULT_BUDGETS), across_setups)
    ids = [next((run.id for run in reversed(side) if run.id), None) for side in (others, candidate)]
    if dashboard_url is None or None in ids:
        return verdict
    address = f"{dashboard_url.rstrip('/')}/compare?baseline={ids[0]}&candidate={ids[1]}"
    return replace(verdict, compare_url=address)


def _named(budgets: Sequence[str], baselines: Sequence[str]) -> str:
    """The file that a reader of the verdict may want to change."""
    files = [one for one in (*budgets, *baselines) if Path(one).is_file()]
    return files[0] if files else "stepsplit"


def _record(store: Store, candidate: Sequence[SideRun], verdict: Verdict) -> None:
    """Keeps the answer beside the runs of the store that it is of."""
    from stepsplit.dashboard.reporters.verdict import headline

    for run in candidate:
        if run.id is not None:
            store.verdicts.record(run.id, verdict.answer, headline(verdict))


def _show_check(verdict: Verdict) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.ci import workflow_commands
    from stepsplit.dashboard.reporters.verdict import verdict_screen

    Console(highlight=False).print(verdict_screen(verdict))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(verdict):
            click.echo(line)


# stepsplit baseline: runs -> a small file that a gate holds candidates against.

ADVISED = 3


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path),
              help="Where it goes, such as a JSON file beside the tests.")  # fmt: skip
@rules_option
@store_option
@artifacts_option
def baseline_command(
    places: tuple[str, ...], out: Path, rules_file: Path | None, url: str, artifacts: str
) -> None:
    """Keep what a gate needs of some runs in a small file, fit for git.

    RUN is as for check; an older baseline file may be among them. Name 3 to 5 runs: they tell the
    noise. They must be of one device, mesh, backend and world size.
    """
    from stepsplit.analyzer.errors import write
    from stepsplit.analyzer.regression.judge import check_setups
    from stepsplit.analyzer.regression.metrics import to_json

    store, rules = cache(lambda: open_store(url, artifacts)), load_rules(rules_file)
    runs = [run.facts for run in runs_at(places, store, None, rules)]
    for warning in check_setups(runs, (), across_setups=False):
        click.echo(f"warning: {warning}", err=True)
    write(out, to_json(runs))
    told = "" if len(runs) >= ADVISED else f"; {ADVISED} to 5 tell the noise better"
    click.echo(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}{told}")


# The runs of one side of a check: from files, or out of a store.

PREFIX = "store:"

LAST = 10
"""So many runs a query yields where it does not say how many."""

_EXAMPLE = f"write {PREFIX}branch=main,last=10 or {PREFIX}ID"

OpenStore = Callable[[], "Store"]


@dataclass(frozen=True, slots=True)
class SideRun:
    """A run to judge, or to judge by; id is its own in the store that it came from."""

    facts: RunFacts
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """Which runs of a store: the last ones that have all of these tags, or the one of an id."""

    tags: tuple[tuple[str, str], ...] = ()
    last: int = LAST
    id: str | None = None


def runs_at(
    places: Sequence[str], open_store: OpenStore, job: str | None, rules: Rules
) -> list[SideRun]:
    """The runs at the places, each a path as facts_at takes it or a query; run, rules as there.

    Raises StepsplitError, also for a query under rules of one's own.
    """
    from stepsplit.analyzer.readers.kernel_rules import BUILT_IN

    found: list[SideRun] = []
    for place in places:
        if place.startswith(PREFIX):
            if rules != BUILT_IN:
                raise UsageError(f"{place}: analyzed already; with rules name the recordings")
            found += _stored(open_store(), parse_query(place))
        else:
            found += _read(place, job, rules)
    return found


def _read(place: str, job: str | None, rules: Rules) -> list[SideRun]:
    from stepsplit.analyzer.analysis import facts_at
    from stepsplit.dashboard.reporters.terminal import reading_bar

    with reading_bar() as progress:
        return [SideRun(facts) for facts in facts_at(place, cores(), progress, job, rules)]


def parse_query(text: str) -> Query:
    """The query of "store:branch=main,last=10" or "store:ID". Raises UsageError."""
    words = [word.strip() for word in text.removeprefix(PREFIX).split(",")]
    if len(words) == 1 and words[0] and "=" not in words[0]:
        return Query(id=words[0])
    split = [word.partition("=") for word in words]
    tags = {key.strip(): value.strip() for key, _, value in split}
    if not all(key and value for key, value in tags.items()):
        raise UsageError(f"{text} asks for no run of the store; {_EXAMPLE}")
    last = tags.pop("last", str(LAST))
    if not last.isdecimal() or not 0 < int(last) < 10_000:
        raise UsageError(f"{text}: last is no number of runs; {_EXAMPLE}")
    return Query(tuple(tags.items()), int(last))


def _stored(store: Store, query: Query) -> list[SideRun]:
    """The runs that are done and meant, the oldest first. Raises UsageError where none is."""
    from stepsplit.analyzer.regression.metrics import facts_of

    done = [run for run in store.runs() if run.state == "done" and _meant(run, query)]
    if not done:
        asked = query.id or ", ".join(f"{key}={value}" for key, value in query.tags) or "any"
        raise UsageError(f"the store has no finished run for {asked}; see the list of runs")
    kept = reversed(done[: query.last])
    return [
        SideRun(facts_of(store.report(run.id), f"{run.name} ({run.id})"), run.id) for run in kept
    ]


def _meant(run: RunRow, query: Query) -> bool:
    if query.id is not None:
        return run.id == query.id
    tags = {(tag.key, tag.value) for tag in run.tags}
    return all(pair in tags for pair in query.tags)


# The files of a verdict, each for another reader.


def write_files(verdict: Verdict, files: Mapping[str, Path | None], named: str) -> None:
    """Writes what was asked for, by the option's name; named is the file that issues are told of.

    A step's summary is added to. Raises UsageError where a file cannot be written.
    """
    for option, path in files.items():
        if path is None:
            continue
        if option == "summary":
            _add(path, verdict)
        else:
            write(path, _content(option, verdict, named))


def _content(option: str, verdict: Verdict, named: str) -> bytes:
    from stepsplit.dashboard.reporters.ci import (
        bencher,
        benchmark_action,
        code_quality,
        junit,
        open_metrics,
    )
    from stepsplit.dashboard.reporters.verdict import markdown

    if option == "junit":
        return junit(verdict)
    if option == "markdown":
        return markdown(verdict).encode()
    if option == "codequality":
        return code_quality(verdict, named)
    if option == "openmetrics":
        return open_metrics(verdict).encode()
    if option == "bencher":
        return bencher(verdict)
    assert option == "benchmark_action", option
    return benchmark_action(verdict)


def _add(path: Path, verdict: Verdict) -> None:
    from stepsplit.collectors.run_spec import open_special
    from stepsplit.dashboard.reporters.ci import summary

    try:
        with open_special(path) or path.open("ab") as file:
            held_bytes = file.tell() if file.seekable() else 0
            file.write(summary(verdict, held_bytes).encode())
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from None


# stepsplit compare: two recordings or reports -> what differs between the runs.


@click.command()
@click.argument("baseline", metavar="BASELINE")
@click.argument("candidate", metavar="CANDIDATE")
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the comparison here; - for standard output, and nothing else there.",
)  # fmt: skip
@rules_option
def compare_command(
    baseline: str, candidate: str, json_file: str | None, rules_file: Path | None
) -> None:
    """Say what differs between two runs, and by how much.

    BASELINE and CANDIDATE are each a recording as analyze takes it (file, folder, archive or URL),
    a report.json, or a folder that holds one. Runs of another layout are compared too.
    """
    # What reads recordings is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.regression.compare import to_json

    found = _compared(baseline, candidate, rules_file)
    if not put_json(found, to_json, json_file):
        _show_compare(found)


def _compared(baseline: str, candidate: str, rules_file: Path | None) -> RunComparison:
    from stepsplit.analyzer.analysis import compare_runs
    from stepsplit.dashboard.reporters.terminal import reading_bar

    rules = load_rules(rules_file)
    with reading_bar() as progress:
        return compare_runs(baseline, candidate, cores(), progress, rules)


def _show_compare(found: RunComparison) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.compare import comparison_screen

    Console(highlight=False).print(comparison_screen(found))

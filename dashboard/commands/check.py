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


# stepsplit check: candidate runs against a baseline; the result is the exit status.

EXITS = {"pass": 0, "regressed": 1, "inconclusive": 3}

_EPILOG = (
    "Budgets: exposed_comm:5% (of the baseline), exposed_comm:2pt (percentage points of the step), "
    "step:5%,3ms (the larger of both), exposed_comm:<=10%, mfu:>=40%, step:model+20%, "
    "calls:exact. Exit status: 0 pass, 1 regressed, 2 bad input, 3 inconclusive."
)


def _file(flag: str, text: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.option(flag, metavar="FILE", type=click.Path(path_type=Path), help=text)


@click.command(epilog=_EPILOG)
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...")
@click.option("--baseline", "baselines", multiple=True, metavar="B",
              help="Runs to compare the candidate with; may be repeated.")  # fmt: skip
@click.option("--budget", "budgets", multiple=True, metavar="FILE|RULE",
              help="How much worse a metric may get; may be repeated. Default: calls and bytes "
                   "exact, exposed_comm and bubble 10%,1pt.")  # fmt: skip
@click.option("--job", "job_file", metavar="job.toml",
              help="Compare the candidates with the model of this job.toml, for budgets such as "
                   "step:model+20%; auto: infer it from the candidates.")  # fmt: skip
@rules_option
@click.option("--across-setups", is_flag=True,
              help="Allow runs that differ in device, mesh, backend or world size.")  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the result as JSON; - for standard output, without the screen.",
)  # fmt: skip
@_file("--junit", "Write a JUnit XML report.")
@_file("--summary", "Append markdown to this file, such as $GITHUB_STEP_SUMMARY.")
@_file("--markdown", "Write markdown for a pull request comment.")
@_file("--codequality", "Write GitLab's code quality JSON.")
@_file("--openmetrics", "Write OpenMetrics text for GitLab's metrics reports.")
@_file("--bencher", "Write Bencher's JSON.")
@_file("--benchmark-action", "Write github-action-benchmark's JSON (customSmallerIsBetter).")
@click.option("--dashboard", "dashboard_url", metavar="URL",
              help="Address of the dashboard that shows the store's runs, for links.")  # fmt: skip
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
    """Check runs against budgets: pass, regressed or inconclusive.

    CANDIDATE and B are each a recording as for analyze, a report.json or its folder, a file written
    by stepsplit baseline, or runs of a store: store:branch=main,last=10 or store:ID. Give 3 to 5
    runs per side: the run-to-run noise cannot be estimated from a single run.
    """
    # Imported here to keep `stepsplit --help` fast.
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
    """The file that issues point to: the first budget or baseline file, else "stepsplit"."""
    files = [one for one in (*budgets, *baselines) if Path(one).is_file()]
    return files[0] if files else "stepsplit"


def _record(store: Store, candidate: Sequence[SideRun], verdict: Verdict) -> None:
    """Records the result with the candidate runs that are in the store."""
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


# stepsplit baseline: writes the metrics of runs to a small file for check.

ADVISED = 3


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path),
              help="File to write, such as a JSON file next to the tests.")  # fmt: skip
@rules_option
@store_option
@artifacts_option
def baseline_command(
    places: tuple[str, ...], out: Path, rules_file: Path | None, url: str, artifacts: str
) -> None:
    """Write a baseline file for check from recorded runs.

    RUN is as for check, or an older baseline file. The file is small enough for git. Give 3 to 5
    runs, so that the run-to-run noise can be estimated. All runs must have the same device, mesh,
    backend and world size.
    """
    from stepsplit.analyzer.errors import write
    from stepsplit.analyzer.regression.judge import check_setups
    from stepsplit.analyzer.regression.metrics import to_json

    store, rules = cache(lambda: open_store(url, artifacts)), load_rules(rules_file)
    runs = [run.facts for run in runs_at(places, store, None, rules)]
    for warning in check_setups(runs, (), across_setups=False):
        click.echo(f"warning: {warning}", err=True)
    write(out, to_json(runs))
    told = "" if len(runs) >= ADVISED else f"; {ADVISED} to 5 runs estimate the noise better"
    click.echo(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}{told}")


# The runs of one side of a check, from files or from a store.

PREFIX = "store:"

LAST = 10
"""Number of runs that a query returns by default."""

_EXAMPLE = f"write {PREFIX}branch=main,last=10 or {PREFIX}ID"

OpenStore = Callable[[], "Store"]


@dataclass(frozen=True, slots=True)
class SideRun:
    """A candidate or baseline run; id is its id in the store, None if it is from a file."""

    facts: RunFacts
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """Selects runs of a store: the last ones that have all tags, or the one with the id."""

    tags: tuple[tuple[str, str], ...] = ()
    last: int = LAST
    id: str | None = None


def runs_at(
    places: Sequence[str], open_store: OpenStore, job: str | None, rules: Rules
) -> list[SideRun]:
    """Reads the runs at the places, each a path or a store query.

    Raises StepsplitError; also for a store query combined with custom rules, because stored runs
    are already analyzed.
    """
    from stepsplit.analyzer.readers.kernel_rules import BUILT_IN

    found: list[SideRun] = []
    for place in places:
        if place.startswith(PREFIX):
            if rules != BUILT_IN:
                raise UsageError(f"{place}: already analyzed; with --rules give recordings")
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
    """Parses "store:branch=main,last=10" or "store:ID". Raises UsageError."""
    words = [word.strip() for word in text.removeprefix(PREFIX).split(",")]
    if len(words) == 1 and words[0] and "=" not in words[0]:
        return Query(id=words[0])
    split = [word.partition("=") for word in words]
    tags = {key.strip(): value.strip() for key, _, value in split}
    if not all(key and value for key, value in tags.items()):
        raise UsageError(f"{text} is not a valid store query; {_EXAMPLE}")
    last = tags.pop("last", str(LAST))
    if not last.isdecimal() or not 0 < int(last) < 10_000:
        raise UsageError(f"{text}: last must be a number of runs; {_EXAMPLE}")
    return Query(tuple(tags.items()), int(last))


def _stored(store: Store, query: Query) -> list[SideRun]:
    """The finished runs that match the query, oldest first. Raises UsageError if none matches."""
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


# The output files of a check.


def write_files(verdict: Verdict, files: Mapping[str, Path | None], named: str) -> None:
    """Writes the output files, by option name. Code quality issues point to the last argument.

    The summary is appended to its file. Raises UsageError if a file cannot be written.
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


# stepsplit compare: the differences between two recordings or reports.


@click.command()
@click.argument("baseline", metavar="BASELINE")
@click.argument("candidate", metavar="CANDIDATE")
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the comparison as JSON; - for standard output, without the screen.",
)  # fmt: skip
@rules_option
def compare_command(
    baseline: str, candidate: str, json_file: str | None, rules_file: Path | None
) -> None:
    """Compare two runs: settings, buckets, calls and kernels.

    BASELINE and CANDIDATE are each a recording as for analyze (file, folder, archive or URL), a
    report.json, or a folder that contains one. The runs may have different layouts.
    """
    # Imported here to keep `stepsplit --help` fast.
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

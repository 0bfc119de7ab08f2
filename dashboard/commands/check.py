"""stepsplit check, baseline and compare."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError, make_write_error
from stepsplit.dashboard.commands.common import (
    artifacts_option,
    build_json_option,
    build_path_option,
    count_cores,
    load_rules,
    make_console,
    open_store,
    print_annotations,
    print_line,
    put_json,
    record_command,
    rules_option,
    runs_option,
    token_option,
    write_output,
)

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.kernel_rules import Rules
    from stepsplit.analyzer.regression.checks import CheckResult
    from stepsplit.analyzer.regression.metrics import RunMetrics
    from stepsplit.analyzer.regression.scaling import Work
    from stepsplit.dashboard.store.run_row import RunRow
    from stepsplit.dashboard.store.store import Store
    from stepsplit.dashboard.upload import RemoteRun, RemoteStore


# stepsplit check: candidate runs against a baseline; the result is the exit status.

EXIT_CODES = {"pass": 0, "regressed": 1, "inconclusive": 3}

EXIT_NO_FILE = 2
"""The runs pass, and a requested file could not be written."""

_EPILOG = (
    "Budgets: exposed_comm:5% (of the baseline), exposed_comm:2pt (percentage points of the step), "
    "step:5%,3ms (the larger of both), exposed_comm:<=10%, mfu:>=40%, step:model+20%, "
    "calls:exact. Exit status: 0 pass, 1 regressed, 2 bad input, 3 inconclusive."
)


class _CheckCommand(click.Command):
    """A command whose --baseline takes all runs that follow it, as a shell's glob gives them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            flag
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for flag in param.opts
        }
        words, rest, has_candidates = list[str](), deque(args), False
        while rest:
            words.append(word := rest.popleft())
            if word == "--":
                break
            if word in valued and rest:
                words.append(rest.popleft())
            has_candidates |= not word.startswith("-")
            if word.partition("=")[0] != "--baseline":
                continue
            following = list(takewhile(lambda word: not word.startswith("-"), rest))
            if has_candidates:
                for run in following:
                    rest.popleft()
                    words += ("--baseline", run)
            elif len(following) > 1:
                # Before all candidates: some of them may be of the baseline, some candidates.
                raise UsageError(
                    f"after --baseline stand {len(following) + 1} runs of both sides; name the "
                    "candidates before --baseline"
                )
        return super().parse_args(ctx, [*words, *rest])


@click.command(cls=_CheckCommand, epilog=_EPILOG)
@click.argument("candidates", nargs=-1, required=True, metavar="CANDIDATE...")
@click.option("--baseline", "baselines", multiple=True, metavar="B...",
              help="Runs to compare the candidates with.")  # fmt: skip
@click.option("--budget", "budgets", multiple=True, metavar="FILE|RULE",
              help="How much worse a metric may get; may be repeated. Default: calls and bytes "
                   "exact, exposed_comm and bubble 10%,1pt.")  # fmt: skip
@click.option("--job", "job_file", metavar="job.toml",
              help="Compare the candidates with the model of this job.toml, for budgets such as "
                   "step:model+20%; auto: infer it from the candidates.")  # fmt: skip
@rules_option
@click.option("--across-setups", is_flag=True,
              help="Allow runs that differ in device, mesh, backend or world size.")  # fmt: skip
@build_json_option("Write the result as JSON; - for standard output, without the screen.")
@build_path_option("--junit", metavar="FILE", help="Write a JUnit XML report.")
@build_path_option(
    "--summary", metavar="FILE", help="Append markdown to this file, such as $GITHUB_STEP_SUMMARY."
)
@build_path_option("--markdown", metavar="FILE", help="Write markdown for a pull request comment.")
@build_path_option("--codequality", metavar="FILE", help="Write GitLab's code quality JSON.")
@build_path_option(
    "--openmetrics", metavar="FILE", help="Write OpenMetrics text for GitLab's metrics reports."
)
@build_path_option("--bencher", metavar="FILE", help="Write Bencher's JSON.")
@build_path_option(
    "--benchmark-action",
    metavar="FILE",
    help="Write github-action-benchmark's JSON (customSmallerIsBetter).",
)
@click.option("--dashboard", "dashboard_url", metavar="URL",
              help="Address of the dashboard that shows the store's runs, for links.")  # fmt: skip
@runs_option
@artifacts_option
@token_option
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
    token: str | None,
    **files: Path | None,
) -> int:
    """Check runs against budgets: pass, regressed or inconclusive.

    CANDIDATE and B are each a recording as for analyze, a report.json or its folder, a file written
    by stepsplit baseline, or runs of a store: store:branch=main,last=10 or store:ID. Give 3 to 5
    runs per side: the run-to-run noise cannot be estimated from a single run.
    """
    from msgspec.structs import replace

    from stepsplit.analyzer.analysis import DEFAULT_BUDGETS
    from stepsplit.analyzer.regression.checks import parse_budgets, to_json
    from stepsplit.analyzer.regression.judge import check_candidate
    from stepsplit.dashboard.reporters.check_markdown import format_annotations
    from stepsplit.dashboard.reporters.verdict import build_verdict_screen

    store = cache(lambda: open_runs(url, artifacts, token))
    rules = load_rules(rules_file)
    baseline_runs = load_runs(baselines, store, None, rules)
    candidate_runs = load_runs(candidates, store, job_file, rules)
    shown_at = dashboard_url or (url if is_dashboard(url) else None)
    # A query for the last runs of a branch may find the candidates too.
    candidate_ids = {run.id for run in candidate_runs if run.id}
    baseline_runs = [run for run in baseline_runs if run.id not in candidate_ids]
    verdict = check_candidate(
        [run.facts for run in candidate_runs],
        [run.facts for run in baseline_runs],
        parse_budgets(budgets or DEFAULT_BUDGETS),
        across_setups,
    )
    newest_ids = [
        next((run.id for run in reversed(side) if run.id), None)
        for side in (baseline_runs, candidate_runs)
    ]
    if shown_at is not None and None not in newest_ids:
        pair = f"baseline={newest_ids[0]}&candidate={newest_ids[1]}"
        verdict = replace(verdict, compare_url=f"{shown_at.rstrip('/')}/compare?{pair}")
    if json_file != "-":
        make_console().print(build_verdict_screen(verdict))
        # There they appear next to the changed files of a pull request.
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print_annotations(format_annotations(verdict))
    # What issues of code quality point to: the first budget or baseline file.
    named = next((one for one in (*budgets, *baselines) if Path(one).is_file()), "stepsplit")
    outputs: list[Callable[[], object]] = [partial(put_json, verdict, to_json, json_file)]
    outputs += [
        partial(_write_file, option, path, verdict, named)
        for option, path in files.items()
        if path is not None
    ]
    # What fails here does not change the verdict; without a regression a missing file does.
    failed = [problem for output in outputs if (problem := _try_output(output)) is not None]
    record = partial(_record, store, candidate_runs, verdict)
    unrecorded = _try_output(record) if any(run.id for run in candidate_runs) else None
    for problem in (*failed, *filter(None, [unrecorded])):
        print_line(f"stepsplit: {problem}", err=True)
    return EXIT_CODES[verdict.answer] or (EXIT_NO_FILE if failed else 0)


def _try_output(output: Callable[[], object]) -> str | None:
    """What went wrong in one line; None if nothing did."""
    try:
        output()
    except StepsplitError as error:
        return str(error)
    return None


def _record(
    open_store: Callable[[], Store | RemoteStore],
    candidate: Sequence[SideRun],
    verdict: CheckResult,
) -> None:
    """Records the result with the candidate runs that are in the store."""
    from stepsplit.dashboard.reporters.verdict import format_headline
    from stepsplit.dashboard.upload import RemoteStore

    store, headline = open_store(), format_headline(verdict)
    for run in candidate:
        if run.id is None:
            continue
        if isinstance(store, RemoteStore):
            store.record_check(run.id, verdict.answer, headline)
        else:
            store.verdicts.record(run.id, verdict.answer, headline)
            record_command(store.audit, "check recorded", f"{run.id}: {verdict.answer}")


# stepsplit baseline: writes the metrics of runs to a small file for check.

# Of two runs the spread is hardly known.
RECOMMENDED_RUNS = 3


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path),
              help="File to write, such as a JSON file next to the tests.")  # fmt: skip
@build_path_option(
    "--budgets-out", metavar="FILE", help="Write budgets that such runs decide, for check --budget."
)
@rules_option
@runs_option
@artifacts_option
@token_option
def baseline_command(
    places: tuple[str, ...],
    out: Path,
    budgets_out: Path | None,
    rules_file: Path | None,
    url: str,
    artifacts: str,
    token: str | None,
) -> None:
    """Write a baseline file for check from recorded runs.

    RUN is as for check, or an older baseline file. The file is small enough for git. Give 3 to 5
    runs, so that the run-to-run noise can be estimated. All runs must have the same device, mesh,
    backend and world size.
    """
    from stepsplit.analyzer.analysis import DEFAULT_BUDGETS
    from stepsplit.analyzer.regression.checks import parse_budgets
    from stepsplit.analyzer.regression.judge import check_setups, list_incomplete
    from stepsplit.analyzer.regression.metrics import to_json
    from stepsplit.analyzer.regression.samples import propose_budgets

    store = cache(lambda: open_runs(url, artifacts, token))
    loaded = load_runs(places, store, None, load_rules(rules_file))
    runs = [run.facts for run in loaded]
    # Said when the file is written, and not with each check that uses it.
    for warning in (*check_setups(runs, (), across_setups=False), *list_incomplete((), runs)):
        print_line(f"warning: {warning}", err=True)
    if budgets_out is not None and len(runs) < RECOMMENDED_RUNS:
        raise UsageError(f"--budgets-out: {RECOMMENDED_RUNS} runs show the noise; got {len(runs)}")
    if budgets_out is not None and any(run.roles for run in runs):
        raise UsageError("--budgets-out: for the runs of one role; name their folders")
    write_output(out, to_json(runs))
    number = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    if any(run.roles for run in runs):
        print_line(f"{out}: {number} of several roles")
        return
    if len(runs) < RECOMMENDED_RUNS:
        print_line(f"{out}: {number}; {RECOMMENDED_RUNS} to 5 runs estimate the noise better")
        return
    print_line(f"{out}: {number}")
    # The budgets that as many equal runs would pass.
    budgets = propose_budgets(parse_budgets(DEFAULT_BUDGETS), runs)
    if budgets_out is not None:
        lines = [f'"{budget.metric}" = "{budget.text}"' for budget in budgets]
        write_output(budgets_out, "\n".join(["[budgets]", *lines, ""]).encode())
        print_line(f"{budgets_out}: budgets for check --budget {budgets_out}")
    rules = [f"{budget.metric}:{budget.text}" for budget in budgets]
    raised = [rule for rule in rules if rule not in DEFAULT_BUDGETS]
    if raised:
        print_line(
            f"at the noise of these runs, {len(runs)} runs per side cannot decide the default"
            f" budgets; proposed: {', '.join(raised)}"
        )


# The runs of one side of a check, from files or from a store.

STORE_PREFIX = "store:"

DEFAULT_LAST = 10
"""Number of runs that a query returns by default."""

_EXAMPLE = f"write {STORE_PREFIX}branch=main,last=10 or {STORE_PREFIX}ID"

OpenStore = Callable[[], "Store | RemoteStore"]


@dataclass(frozen=True, slots=True)
class SideRun:
    """A candidate or baseline run; id is its id in the store, None if it is from a file."""

    facts: RunMetrics
    id: str | None = None


def load_runs(
    places: Sequence[str], open_store: OpenStore, job: str | None, rules: Rules
) -> list[SideRun]:
    """Reads the runs at the places, each a path or a store query.

    Raises StepsplitError; also for a store query combined with custom rules, because stored runs
    are already analyzed.
    """
    from stepsplit.analyzer.analysis import read_run_metrics
    from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
    from stepsplit.analyzer.report.io import is_analyzed
    from stepsplit.analyzer.report.roles import ROLES_NAME
    from stepsplit.analyzer.watch.goodput import build_goodput_metrics
    from stepsplit.analyzer.watch.ledger import read_ledger
    from stepsplit.analyzer.watch.span_folders import describe_ledger_beside, is_span_folder
    from stepsplit.collectors.formats.file_names import is_watch
    from stepsplit.dashboard.reporters.progress import show_reading_bar

    runs: list[SideRun] = []
    for place in places:
        if place.startswith(STORE_PREFIX):
            if rules != BUILT_IN:
                raise UsageError(f"{place}: already analyzed; with --rules give recordings")
            runs += _load_stored_runs(open_store, place)
            continue
        is_report = is_analyzed(Path(place)) or (Path(place) / ROLES_NAME).is_file()
        if is_watch(place) or (not is_report and is_span_folder(place)):
            runs.append(SideRun(build_goodput_metrics(read_ledger(place))))
            continue
        with show_reading_bar() as progress:
            metrics = read_run_metrics(place, count_cores(), progress, job, rules)
        runs += map(SideRun, metrics)
        if hint := describe_ledger_beside(place):
            print_line(hint, err=True)
    return runs


def open_runs(url: str, artifacts: str, token: str | None) -> Store | RemoteStore:
    """Opens the store at the URL: a database, or a dashboard's address."""
    if not is_dashboard(url):
        return open_store(url, artifacts)
    from stepsplit.dashboard.connection import Connection
    from stepsplit.dashboard.upload import RemoteStore

    return RemoteStore(Connection(url, token))


def is_dashboard(url: str) -> bool:
    """Whether the URL of a store is a dashboard's address."""
    return url.startswith(("http://", "https://"))


def _load_stored_runs(open_store: OpenStore, query: str) -> list[SideRun]:
    """The finished runs of "store:branch=main,last=10", those with all tags, or of "store:ID",
    oldest first. Raises UsageError if none matches."""
    from stepsplit.analyzer.regression.metrics import extract_metrics
    from stepsplit.analyzer.report.io import from_json
    from stepsplit.dashboard.upload import RemoteStore

    store = open_store()
    words = [word.strip() for word in query.removeprefix(STORE_PREFIX).split(",")]
    run_id = words[0] if len(words) == 1 and "=" not in words[0] else ""
    pairs = [] if run_id else [word.partition("=") for word in words]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(key and value for key, value in values.items()):
        raise UsageError(f"{query} is not a valid store query; {_EXAMPLE}")
    last = values.pop("last", str(DEFAULT_LAST))
    if not last.isdecimal() or not 0 < int(last) < 10_000:
        raise UsageError(f"{query}: last must be a number of runs; {_EXAMPLE}")
    tags = tuple(values.items())
    done: Sequence[RunRow | RemoteRun | None]
    if isinstance(store, RemoteStore):
        done = [store.find_done(run_id)] if run_id else store.list_done(tags, int(last))
    else:
        rows = [store.find_run_or_role(run_id)] if run_id else store.list_runs()
        done = [run for run in rows if run and run.has_report and run.has_tags(tags)]
    runs = [run for run in done if run is not None][: int(last)]
    if not runs:
        wanted = run_id or ", ".join(f"{key}={value}" for key, value in tags) or "any"
        raise UsageError(f"the store has no finished run for {wanted}; see the list of runs")
    sides = []
    for run in reversed(runs):
        if isinstance(store, RemoteStore):
            # A dashboard gives the report alone, which has all that a check needs.
            report = from_json(store.fetch_report(run.id), f"the report of {run.id}")
        else:
            report = store.load_report(run.id)
        # The result of a role, whose id has a dot, is not that of its run.
        own_id = None if "." in run.id else run.id
        sides.append(SideRun(extract_metrics(report, f"{run.name} ({run.id})"), own_id))
    return sides


# The output files of a check.


def _write_file(option: str, path: Path, verdict: CheckResult, issue_path: str) -> None:
    """Writes the file of an option. Raises UsageError if it cannot be written."""
    from stepsplit.collectors.safe_io.atomic_file import open_special
    from stepsplit.dashboard.reporters import check_files, check_markdown

    formats: dict[str, Callable[[CheckResult], str | bytes]] = {
        "junit": check_files.format_junit,
        "markdown": check_markdown.format_markdown,
        "codequality": lambda one: check_files.format_code_quality(one, issue_path),
        "openmetrics": check_files.format_open_metrics,
        "bencher": check_files.format_bencher,
        "benchmark_action": check_files.format_benchmark_action,
    }
    if option in formats:
        content = formats[option](verdict)
        write_output(path, content if isinstance(content, bytes) else content.encode())
        return
    # The summary is appended, since other steps of the CI job write to the same file.
    try:
        with open_special(path) or path.open("ab") as file:
            existing_bytes = file.tell() if file.seekable() else 0
            file.write(check_markdown.format_summary(verdict, existing_bytes).encode())
    except (OSError, ValueError) as error:
        raise make_write_error(path, error) from None


# stepsplit compare: the differences between two recordings or reports, or the scaling of several.


@click.command()
@click.argument("runs", metavar="BASELINE CANDIDATE...", nargs=-1, required=True)
@build_json_option("Write the comparison as JSON; - for standard output, without the screen.")
@click.option(
    "--work", type=click.Choice(["tokens", "gpu", "step"]),
    help="What several runs have in common, for their efficiency: tokens are known of each by a "
    "job.toml; each gpu does the same work in a step; all GPUs together do in a step.",
)  # fmt: skip
@rules_option
def compare_command(
    runs: tuple[str, ...], json_file: str | None, work: Work | None, rules_file: Path | None
) -> None:
    """Compare two runs, or how a job scales over several.

    Of two runs: settings, buckets, calls and kernels. Of more, or with --work: the step, the
    efficiency of each run against the one with the fewest GPUs, and the buckets that cost it.

    Each run is a recording as for analyze (file, folder, archive or URL), a report.json, or a
    folder that contains one. The runs may have different layouts.
    """
    from stepsplit.analyzer.analysis import compare_runs, compare_scaling
    from stepsplit.analyzer.regression.compare import to_json
    from stepsplit.analyzer.regression.scaling import scaling_to_json
    from stepsplit.dashboard.reporters.compare import build_comparison_screen
    from stepsplit.dashboard.reporters.progress import show_reading_bar
    from stepsplit.dashboard.reporters.scaling import build_scaling_screen

    if len(runs) < 2:
        raise UsageError("give a baseline and a candidate, or more runs of a job")
    rules = load_rules(rules_file)
    if len(runs) > 2 or work:
        with show_reading_bar() as progress:
            scaling = compare_scaling(runs, work, count_cores(), progress, rules)
        if not put_json(scaling, scaling_to_json, json_file):
            make_console().print(build_scaling_screen(scaling))
        return
    with show_reading_bar() as progress:
        comparison = compare_runs(runs[0], runs[1], count_cores(), progress, rules)
    if not put_json(comparison, to_json, json_file):
        make_console().print(build_comparison_screen(comparison))

"""stepsplit runs, delete, edit and retry: the runs of a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.units import format_date
from stepsplit.dashboard.commands.common import (
    FiniteRange,
    artifacts_option,
    build_path_option,
    open_existing_store,
    open_store,
    parse_tag,
    print_line,
    record_command,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.run_row import RunRow

# stepsplit runs: what is in a store.


@click.command()
@click.option("--job", "job_key", metavar="KEY", help="Only runs of the job with this key.")
@click.option("--tag", "tags", metavar="KEY=VALUE", multiple=True,
              help="Only runs with this tag, such as branch=main; may be repeated.")  # fmt: skip
@click.option("--last", type=click.IntRange(min=1), default=50, show_default=True, metavar="N",
              help="The newest N of them.")  # fmt: skip
@store_option
@artifacts_option
def runs_command(
    job_key: str | None, tags: tuple[str, ...], last: int, url: str, artifacts: str
) -> None:
    """List the runs of a store, newest first.

    Each line has the run's id, date, state, the key of its job and its name. Runs of one job have
    the same world size, device, mesh and model; runs of an earlier stepsplit show theirs once a
    worker has read their reports.
    """
    pairs = [parse_tag(tag) for tag in tags]
    found = [
        run
        for run in open_existing_store(url, artifacts).list_runs()
        if run.has_tags(pairs) and job_key in (None, run.job_key)
    ]
    for run in found[:last]:
        # A job of several roles has no key: it is not one of one mesh and model.
        added, key = (
            format_date(run.created_unix_ns),
            run.job_key or ("-" if run.roles else "unknown"),
        )
        label = f"  ({run.job.label})" if run.job else f"  ({run.roles_words})" if run.roles else ""
        print_line(f"{run.id}  {added}  {run.state:9}  {key:8}  {run.name}{label}")


# stepsplit delete: frees the space of runs that are no longer needed.

_DAY_NS = 86_400 * 10**9


@click.command()
@click.argument("run_ids", nargs=-1, metavar="[ID]...")
@click.option("--older-than", type=FiniteRange(0, 36_500), metavar="DAYS",
              help="All runs that were added before that many days.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the runs without deleting them.")
@store_option
@artifacts_option
def delete_command(
    run_ids: tuple[str, ...], older_than: float | None, dry_run: bool, url: str, artifacts: str
) -> None:
    """Delete runs of a store, by id or by age, with their files.

    Runs that are being analyzed are deleted only by their id. The last part of a run's URL is its
    id.
    """
    if bool(run_ids) == (older_than is not None):
        raise UsageError("name the runs to delete: their ids, or --older-than DAYS")
    store = open_store(url, artifacts)
    if older_than is None:
        chosen = _select_ids(store.list_runs(), run_ids)
    else:
        before_ns = time.time_ns() - int(older_than * _DAY_NS)
        old = (run for run in store.list_runs() if run.created_unix_ns < before_ns)
        chosen = [run for run in old if not run.pending]
    for run in chosen:
        if not dry_run:
            store.delete(run.id)
            record_command(store.audit, "run deleted", run.label)
        verb = "would delete" if dry_run else "deleted"
        print_line(f"{verb} {run.id}  added {format_date(run.created_unix_ns)}  {run.name}")


def _select_ids(runs: Sequence[RunRow], run_ids: Sequence[str]) -> list[RunRow]:
    """The runs of the ids. Raises UsageError if one does not exist, before any is deleted."""
    known = {run.id: run for run in runs}
    for run_id in run_ids:
        if run_id not in known:
            raise UsageError(f"no run has the id {run_id}; a run's URL ends with its id")
    return [known[run_id] for run_id in dict.fromkeys(run_ids)]


# stepsplit edit: name, note and tags of a run.


@click.command()
@click.argument("run_id", metavar="ID")
@click.option("--name", metavar="NAME", help="New name.")
@click.option("--note", metavar="TEXT", help="New note; '' removes it.")
@click.option("--tag", "tags", metavar="KEY=VALUE", multiple=True,
              help="Add or change a tag, such as branch=main; may be repeated.")  # fmt: skip
@click.option("--untag", "untags", metavar="KEY", multiple=True,
              help="Remove a tag; may be repeated.")  # fmt: skip
@store_option
@artifacts_option
def edit_command(
    run_id: str,
    name: str | None,
    note: str | None,
    tags: tuple[str, ...],
    untags: tuple[str, ...],
    url: str,
    artifacts: str,
) -> None:
    """Change the name, note and tags of a run.

    The last part of a run's URL is its id.
    """
    added = dict(parse_tag(tag) for tag in tags)
    if name is None and note is None and not added and not untags:
        raise UsageError("say what to change: --name, --note, --tag or --untag")
    if name is not None and not name.strip():
        raise UsageError("--name is empty; write --name NAME")
    store = open_store(url, artifacts)
    from stepsplit.dashboard.store.run_row import RunEdit, Tag, describe_edit

    (run,) = _select_ids(store.list_runs(), [run_id])
    kept = {tag.key: tag.value for tag in run.tags if tag.key not in untags} | added
    changed = tuple(Tag(key, value) for key, value in kept.items())
    edit = RunEdit(name, note, changed if added or untags else None)
    store.edit(run.id, edit)
    record_command(store.audit, "run edited", describe_edit(run, edit))
    (run,) = _select_ids(store.list_runs(), [run_id])
    words = [f"{tag.key}={tag.value}" for tag in run.tags] + ([run.note] if run.note else [])
    print_line("  ".join([run.id, run.name, *words]))


# stepsplit retry: another analysis of what the store has of a run.


@click.command()
@click.argument("run_ids", nargs=-1, required=True, metavar="ID...")
@build_path_option(
    "--job", "job_file", metavar="FILE", help="Add this job.toml to the runs' files first."
)
@store_option
@artifacts_option
def retry_command(
    run_ids: tuple[str, ...], job_file: Path | None, url: str, artifacts: str
) -> None:
    """Queue runs for another analysis of their files.

    A worker of the dashboard analyzes them. The last part of a run's URL is its id.
    """
    store = open_store(url, artifacts)
    from stepsplit.dashboard.store.run_row import explain_no_retry

    job = None if job_file is None else job_file.read_bytes()
    for run in _select_ids(store.list_runs(), run_ids):
        if not (store.analyze_again(run.id) if job is None else store.attach_job(run.id, job)):
            raise UsageError(f"run {run.id} cannot be analyzed again: {explain_no_retry(run)}")
        action = "run queued" if job is None else "job attached"
        record_command(store.audit, action, run.label)
        print_line(f"queued {run.id}  {run.name}")

"""The list of runs as a table: its columns, filter and order, which the address chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dash import dcc, html

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.units import format_date, format_milliseconds, format_percent
from stepsplit.dashboard.pages.address import build_page_url, format_query
from stepsplit.dashboard.pages.components import (
    BUBBLE,
    COLLECTIVE,
    COMPUTE,
    build_check_pill,
    build_choice_link,
    build_share_bar,
)
from stepsplit.dashboard.pages.run_actions import build_tags
from stepsplit.dashboard.pages.tables import (
    Cell,
    build_count_cell,
    build_number_cell,
    build_share_cell,
    build_time_cell,
)
from stepsplit.dashboard.store.metrics import Headline, MedianStep
from stepsplit.dashboard.store.run_row import RunRow

# The columns.

Key = float | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list.

    Attributes:
        head: Its header.
        read: What it is sorted by; None sorts last, and is an empty cell.
        build: The cell of a run that has a value.
        is_common: Whether runs without metrics have it too.
        is_usual: Whether it is shown where the address chooses no columns.
        is_optional: Whether it is left out then if no run has a value.
        is_text: Whether the first click on the header sorts from the smallest on.
        is_sorted: Whether it can be sorted by.
    """

    head: str
    read: Callable[[RunRow], Key]
    build: Callable[[RunRow], Cell]
    is_common: bool = False
    is_usual: bool = True
    is_optional: bool = False
    is_text: bool = False
    is_sorted: bool = True


NAME = "name"
"""The column that is always shown, and the first one."""

TAG = "tag."
"""Begins the name of the column of a tag."""


def find_column(name: str) -> Column | None:
    """The column of this name; that of a tag is made of its key."""
    if name.startswith(TAG) and len(name) > len(TAG):
        return _build_tag_column(name.removeprefix(TAG))
    return COLUMNS.get(name)


def choose_columns(
    runs: Sequence[RunRow], asked: str | None = None, with_job: bool = True
) -> tuple[str, ...]:
    """The columns to show of these runs: those that are asked for, else the usual ones without
    those that are empty for all of the runs, and without the job if it is the same for all."""
    if asked is not None:
        wanted = [name for name in dict.fromkeys(asked.split(",")) if find_column(name)]
        tags = [name for name in wanted if name.startswith(TAG)]
        common = [name for name, one in COLUMNS.items() if one.is_common]
        others = [name for name, one in COLUMNS.items() if not one.is_common and name in wanted]
        # Those of runs without metrics come first: what such a run has instead is in the rest.
        return (*(one for one in common if one in (NAME, *wanted)), *tags, *others)
    hidden = {name for name, one in COLUMNS.items() if not one.is_usual}
    for name, one in COLUMNS.items():
        if one.is_optional and all(one.read(run) is None for run in runs):
            hidden.add(name)
    if not with_job or len({run.job_key for run in runs if run.headline is not None}) < 2:
        hidden.add("job")
    return tuple(name for name in COLUMNS if name not in hidden)


def list_tag_keys(runs: Iterable[RunRow]) -> list[str]:
    """The keys of all tags of the runs, but not those that would be two columns in an address."""
    return sorted({tag.key for run in runs for tag in run.tags if "," not in tag.key})


def build_cells(run: RunRow, columns: Sequence[str]) -> list[Cell]:
    """The cells of a run in these columns; of a run without metrics the common ones only."""
    cells = []
    for name in columns:
        column = find_column(name)
        if column is None or not (column.is_common or read_median_step(run)):
            continue
        is_number = not isinstance(column.read(run), str)
        known = column.read(run) is not None
        cells.append(column.build(run) if known else Cell(number=is_number and not column.is_text))
    return cells


def read_median_step(run: RunRow) -> MedianStep | None:
    """The median step of a run with metrics."""
    return run.headline.median_step if run.headline else None


def _build_tag_column(key: str) -> Column:
    def read(run: RunRow) -> Key:
        return next((tag.value for tag in run.tags if tag.key == key), None)

    return Column(key, read, lambda run: Cell(str(read(run))), is_common=True, is_text=True)


def _build_name(run: RunRow) -> Cell:
    link = dcc.Link(run.name, href=build_page_url(run.id), className="run-link")
    note = [html.Div(run.note, className="run-note")] if run.note else []
    tags = [html.Div(build_tags(run), className="run-tags")] if run.tags else []
    return Cell(html.Div([link, *tags, *note], className="run-cell"))


def _build_share_column(head: str, *buckets: str, is_usual: bool = True) -> Column:
    def read(run: RunRow) -> Key:
        middle = read_median_step(run)
        return None if middle is None else middle.sum_share(*buckets)

    def build(run: RunRow) -> Cell:
        middle = read_median_step(run)
        if middle is None:
            return Cell(number=True)
        # Rounded together, as on the page of the run.
        shares = zip(BUCKETS, round_shares(middle.mean.buckets_ns), strict=True)
        text = format_percent(sum(share for bucket, share in shares if bucket in buckets))
        return build_number_cell(text, middle.sum_share(*buckets), "ratio")

    return Column(head, read, build, is_usual=is_usual)


def _build_headline_column(
    head: str,
    read: Callable[[Headline], float | str | None],
    build: Callable[[Headline], Cell],
    *,
    is_usual: bool = False,
    is_optional: bool = False,
    is_text: bool = False,
) -> Column:
    def read_run(run: RunRow) -> Key:
        return None if run.headline is None else read(run.headline)

    def build_run(run: RunRow) -> Cell:
        return Cell() if run.headline is None else build(run.headline)

    return Column(head, read_run, build_run, False, is_usual, is_optional, is_text)


def _build_job(run: RunRow) -> Cell:
    if run.job is None:
        return Cell()
    url = "/" + format_query({"job": run.job.key})
    key, label = run.job.key, run.job.label
    return Cell(build_choice_link(key, url, "job", css="job-key", title=label, value=key))


def _build_finding(numbers: Headline) -> Cell:
    first = numbers.first_finding
    if first is None:
        return Cell()
    gain = html.B(format_milliseconds(first.gain_ns))
    words = html.Span([gain, " ", first.words], className="name", title=first.words)
    return Cell(words, value=first.gain_ns, unit="ns")


def _build_split(run: RunRow) -> Cell:
    middle = read_median_step(run)
    return Cell() if middle is None else Cell(build_share_bar(middle.shares))


COLUMNS = {
    NAME: Column("run", lambda run: run.name.lower(), _build_name, is_common=True, is_text=True),
    "added": Column(
        "added", lambda run: run.created_unix_ns,
        lambda run: Cell(html.Span(format_date(run.created_unix_ns), className="when")),
        is_common=True,
    ),
    "verdict": Column(
        "check", lambda run: run.verdict.answer if run.verdict else None,
        lambda run: Cell(build_check_pill(run)), is_common=True, is_optional=True,
    ),
    "job": Column("job", lambda run: run.job_key, _build_job, is_text=True),
    "world": _build_headline_column(
        "world", lambda one: one.world_size, lambda one: build_count_cell(one.world_size),
        is_usual=True,
    ),
    "mesh": _build_headline_column(
        "mesh", lambda one: one.mesh or None, lambda one: Cell(one.mesh or ""),
        is_usual=True, is_optional=True, is_text=True,
    ),
    "step": Column(
        "step", lambda run: middle.step_ns if (middle := read_median_step(run)) else None,
        lambda run: build_time_cell(one.step_ns) if (one := read_median_step(run)) else Cell(),
    ),
    "split": Column("time split", lambda run: "" if read_median_step(run) else None, _build_split,
                    is_text=True, is_sorted=False),
    "compute": _build_share_column("compute", *COMPUTE),
    "collective": _build_share_column("collective", *COLLECTIVE),
    "skew": _build_share_column("of which skew", "skew"),
    "bubble": _build_share_column("bubble", *BUBBLE),
    "p2p": _build_share_column("p2p", "p2p", is_usual=False),
    "copy": _build_share_column("copy", "copy", is_usual=False),
    "idle": _build_share_column("idle", "idle", is_usual=False),
    "pipeline": _build_headline_column(
        "pipeline bubble", lambda one: one.bubble_fraction,
        lambda one: build_share_cell(one.bubble_fraction or 0.0),
    ),
    "mfu": _build_headline_column(
        "MFU", lambda one: one.mfu, lambda one: build_share_cell(one.mfu or 0.0),
        is_usual=True, is_optional=True,
    ),
    "steps": _build_headline_column(
        "full steps", lambda one: one.steps, lambda one: build_count_cell(one.steps)
    ),
    "backend": _build_headline_column(
        "backend", lambda one: one.backend or None, lambda one: Cell(one.backend or ""),
        is_text=True,
    ),
    "warnings": _build_headline_column(
        "warnings", lambda one: one.warnings, lambda one: build_count_cell(one.warnings)
    ),
    "finding": _build_headline_column(
        "first finding", lambda one: one.first_finding.gain_ns if one.first_finding else None,
        _build_finding,
    ),
}  # fmt: skip
"""By name in addresses, in the order of the table: those of runs without metrics come first."""


# Filter and order.

NEWEST = "-added"


def filter_runs(runs: Sequence[RunRow], asked: str | None) -> list[RunRow]:
    """Runs that contain all words of the search in name, tags, mesh, backend, state, id, job, first
    finding or check result."""
    words, matches = (asked or "").lower().split(), []
    for run in runs:
        numbers = run.headline
        known = [] if numbers is None else [numbers.mesh or "", numbers.backend or ""]
        known += [numbers.first_finding.words] if numbers and numbers.first_finding else []
        known += [run.verdict.answer] if run.verdict else []
        known += [run.job.key, run.job.label] if run.job else []
        tags = [f"{tag.key}={tag.value}" for tag in run.tags]
        text = " ".join([run.name, run.state, run.id, *known, *tags]).lower()
        if all(word in text for word in words):
            matches.append(run)
    return matches


def sort_runs(runs: Sequence[RunRow], sort: str) -> list[RunRow]:
    """Runs sorted by a column, descending with a leading minus; runs without a value last."""
    column = find_column(sort.removeprefix("-"))
    if column is None or not column.is_sorted:
        column = COLUMNS["added"]
    keyed = [(column.read(run), run) for run in runs]
    known = sorted(
        ((key, run) for key, run in keyed if key is not None),
        key=lambda pair: (pair[0], pair[1].id),
        reverse=sort.startswith("-"),
    )
    return [run for _, run in known] + [run for key, run in keyed if key is None]


def split_tags(text: str | None) -> list[str]:
    """The tags of an address, KEY=VALUE separated by commas; a value may have commas too."""
    tags: list[str] = []
    for part in (text or "").split(","):
        if "=" in part or not tags:
            tags.append(part)
        else:
            tags[-1] += f",{part}"
    return [tag for tag in dict.fromkeys(tags) if "=" in tag]


def has_tags(run: RunRow, tags: Iterable[str]) -> bool:
    """Whether the run has all of these tags, each KEY=VALUE."""
    own = {f"{tag.key}={tag.value}" for tag in run.tags}
    return own >= set(tags)

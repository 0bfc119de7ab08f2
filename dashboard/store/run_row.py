"""A run in the list of runs, and changes of it. Without SQL, for pages and exports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from stepsplit.dashboard.store.metrics import CheckRow, Headline, JobFingerprint

_MOST_ROLES = 16
"""Roles that are named of a run in a list."""

State = Literal["uploading", "queued", "running", "done", "failed"]


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """A label of a run, such as branch = main."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class RunEdit:
    """New name, note and tags of a run; None leaves what it has. tags replace all of its tags."""

    name: str | None = None
    note: str | None = None
    tags: tuple[Tag, ...] | None = None


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs. error is set if it failed; headline if it is done. A run of Flight
    Recorder dumps has as its error what the job waits for, and one of several roles what to look at
    first: both have no report of their own.

    progress (0..1) and progress_note are set during the analysis, if known. queued_unix_ns: when
    its last analysis was queued, which tells one report of the run from the next; 0 if it was
    added with its report. job is None if it is unknown.
    """

    id: str
    name: str
    created_unix_ns: int
    state: State
    error: str | None
    headline: Headline | None
    tags: tuple[Tag, ...] = ()
    progress: float | None = None
    progress_note: str | None = None
    verdict: CheckRow | None = None
    note: str = ""
    queued_unix_ns: int = 0
    job: JobFingerprint | None = None
    roles: tuple[str, ...] = ()

    def has_tags(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Whether the run has all the tags, each a key and a value."""
        return {(tag.key, tag.value) for tag in self.tags} >= set(pairs)

    @property
    def job_key(self) -> str | None:
        """The key of its job; None if the job is unknown."""
        return None if self.job is None else self.job.key

    @property
    def label(self) -> str:
        """Id and name, as in the audit log."""
        return f"{self.id} {self.name}"

    @property
    def can_be_analyzed_again(self) -> bool:
        """Whether its last analysis has ended, unless it was added with its report."""
        return self.state in ("done", "failed") and self.queued_unix_ns > 0

    @property
    def is_hang(self) -> bool:
        """Whether it has Flight Recorder dumps and no traces: no report, but hang.json."""
        return self.state == "done" and self.error is not None and not self.has_roles

    @property
    def has_roles(self) -> bool:
        """Whether it is a job of several roles: roles.json, and a report of each role."""
        return self.state == "done" and bool(self.roles)

    @property
    def roles_words(self) -> str:
        """How many roles it has, and their names or the first of them."""
        more = len(self.roles) - _MOST_ROLES
        named = ", ".join(self.roles[:_MOST_ROLES]) + (f" and {more:,} more" if more > 0 else "")
        return f"{len(self.roles):,} role{'s' * (len(self.roles) > 1)}: {named}"

    @property
    def is_role(self) -> bool:
        """Whether it is one role of a run, and not a row of the store."""
        return "." in self.id

    @property
    def has_report(self) -> bool:
        """Whether it has a report, which can be shown, checked and compared."""
        return self.state == "done" and not self.is_hang and not self.has_roles

    def name_role(self, number: int) -> RunRow | None:
        """The role of this number as a run of its own, which cannot be changed; None without it."""
        if not self.has_roles or number >= len(self.roles):
            return None
        return replace(
            self,
            id=f"{self.id}.{number}",
            name=f"{self.name}: {self.roles[number]}",
            error=None,
            headline=None,
            tags=(),
            verdict=None,
            note="",
            roles=(),
        )

    @property
    def pending(self) -> bool:
        """Whether its analysis is queued or running."""
        return self.state in ("queued", "running")


def describe_edit(run: RunRow, edit: RunEdit) -> str:
    """The run and its changed fields, for the audit log."""
    name = [] if edit.name is None else [f"name {edit.name}"]
    note = [] if edit.note is None else [f"note {edit.note}" if edit.note else "no note"]
    pairs = " ".join(f"{tag.key}={tag.value}" for tag in edit.tags or ())
    tags = [] if edit.tags is None else [f"tags {pairs}" if pairs else "no tags"]
    return f"{run.label}: {', '.join([*name, *tags, *note])}"


def explain_no_retry(run: RunRow) -> str:
    """Why the run cannot be analyzed again."""
    if run.pending:
        return "its analysis has not ended yet"
    if run.state == "uploading":
        return "its upload is not finished"
    return "the store has only its report, not its files; upload the recording"

"""A run in the list of runs, and changes of it. Without SQL, for pages and exports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stepsplit.dashboard.store.metrics import CheckRow, Headline, JobFingerprint

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
    Recorder dumps has as its error what the job waits for.

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
        return self.state == "done" and self.error is not None

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

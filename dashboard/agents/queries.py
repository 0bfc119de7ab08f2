"""The arguments of the tools: their names, types, limits and meanings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

# Arguments come from an agent that may have read a stranger's recording: each has a limit. Times
# stay below 2**53, beyond which a JSON number of JavaScript loses digits.
Name = Annotated[str, Meta(min_length=1, max_length=1_000)]
Offset = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Whole = Annotated[int, Meta(ge=0, le=10_000_000)]
Time = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Names = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=20)]
Rules = Annotated[tuple[Name, ...], Meta(max_length=20)]


class ListQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of the list.

    Attributes:
        offset: first row to return; next_offset of the page before.
    """

    offset: Offset = 0


class RunQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """A recording.

    Attributes:
        recording: name from the tool recordings: a path, or run:ID.
    """

    recording: Name


class PagedQuery(RunQuery, frozen=True, forbid_unknown_fields=True):
    """A recording, and which part of a table.

    Attributes:
        offset: first row to return; next_offset of the page before.
    """

    offset: Offset = 0


class StepsQuery(PagedQuery, frozen=True, forbid_unknown_fields=True):
    """Steps of a recording.

    Attributes:
        rank: only this rank; default all.
        step: only this step number; default all.
    """

    rank: Whole | None = None
    step: Whole | None = None


class TimelineQuery(PagedQuery, frozen=True, forbid_unknown_fields=True):
    """A window of the timeline of one rank.

    Attributes:
        rank: global rank.
        start_ns: begin of the window, from the report's time 0; default: the begin of the step.
        end_ns: end of the window; default: the end of the step.
        step: step whose window is taken if start_ns or end_ns is left out; default: the slowest
            full step.
    """

    rank: Whole = 0
    start_ns: Time | None = None
    end_ns: Time | None = None
    step: Whole | None = None


class ModelQuery(PagedQuery, frozen=True, forbid_unknown_fields=True):
    """A recording, and the job to compare it with.

    Attributes:
        job: path of a job.toml below the allowed folders; "auto" to infer the job from the
            recording; "" (default) for the comparison that the report has.
    """

    job: Annotated[str, Meta(max_length=1_000)] = ""


class CompareQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Two recordings.

    Attributes:
        baseline: recording to compare with.
        candidate: recording to compare.
        offset: first row to return.
    """

    baseline: Name
    candidate: Name
    offset: Offset = 0


class CheckQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Runs to check against others.

    Attributes:
        candidate: recordings to check; three to five are recommended.
        baseline: recordings to compare with.
        budgets: limits such as "exposed_comm:5%" or "step:3ms"; default: the usual ones.
        across_setups: whether runs of another device, mesh or world size may be compared.
        offset: first row to return.
    """

    candidate: Names
    baseline: Names
    budgets: Rules = ()
    across_setups: bool = False
    offset: Offset = 0


class WhatIfQuery(PagedQuery, frozen=True, forbid_unknown_fields=True):
    """A recording, and changes to replay.

    Attributes:
        changes: such as "no-slow-ranks", "no-idle", "even", "overlap", "link:tp=2",
            "microbatches=16", "schedule=interleaved"; default: all common ones.
        hardware: preset to carry the run to, such as "b200-sxm"; "" (default) for none.
    """

    changes: Rules = ()
    hardware: Annotated[str, Meta(max_length=100)] = ""


class JobQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """A job.

    Attributes:
        job: path of a job.toml below the allowed folders, or the text of one with its tables
            [model], [parallel], [training] and [hardware].
        offset: first row to return.
    """

    job: Annotated[str, Meta(min_length=1, max_length=20_000)]
    offset: Offset = 0


class PlanQuery(JobQuery, frozen=True, forbid_unknown_fields=True):
    """A job to lay out.

    Attributes:
        gpus: number of GPUs.
        keep: keys of the job to keep, such as "tp" or "schedule"; default none.
    """

    gpus: Annotated[int, Meta(ge=1, le=1_000_000)] = 8
    keep: Rules = ()


class HangQuery(PagedQuery, frozen=True, forbid_unknown_fields=True):
    """Flight Recorder dumps of a job that hangs: a folder of them, or a recording."""


class ExplainQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """A number.

    Attributes:
        number: its name as an answer has it, such as "busbw_bytes_per_s" or "bubble_fraction".
        recording: recording whose terms are filled in; default none.
        offset: first row to return.
    """

    number: Name
    recording: Annotated[str, Meta(max_length=1_000)] = ""
    offset: Offset = 0

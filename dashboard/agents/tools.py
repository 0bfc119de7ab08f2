"""The tools: one entry each, from which the server lists and answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.report.meanings import read_meanings
from stepsplit.dashboard.agents import job_tools, queries, run_tools
from stepsplit.dashboard.agents.answers import ToolAnswer, mark_recorded, write_answer
from stepsplit.dashboard.agents.recordings import Recordings


@dataclass(frozen=True, slots=True)
class ToolEntry:
    """A tool.

    Attributes:
        query: the type of its arguments.
        answer: what answers it; raises StepsplitError.
        description: when to use it, for the agent.
        of_store: whether a dashboard offers it for the runs of its store: what reads traces or
            searches for minutes is for the machine of the one who asks.
    """

    query: type[Struct]
    answer: Callable[[Recordings, Any], ToolAnswer]
    description: str
    of_store: bool = True


_PAGED = queries.PagedQuery

TOOLS: Mapping[str, ToolEntry] = {
    "recordings": ToolEntry(
        queries.ListQuery,
        run_tools.list_recordings,
        "List the recordings and stored runs that can be opened. Begin here.",
    ),
    "recording": ToolEntry(
        queries.RunQuery,
        run_tools.describe_recording,
        "What was recorded: ranks, hosts, device, parallel layout, steps, warnings, and what the"
        " recording lacks. Read it before any conclusion.",
    ),
    "summary": ToolEntry(
        queries.RunQuery,
        run_tools.describe_step,
        "Where the time of the mean step goes: compute, collective, p2p, skew, bubble, copy, idle;"
        " by axis, with the worst rank.",
    ),
    "findings": ToolEntry(
        _PAGED,
        run_tools.list_findings,
        "Why it is slow: bottlenecks with the time that a fix saves per step, the ranks to blame"
        " and how each is known. Use it for 'which rank delays the job', 'what should I fix'.",
    ),
    "steps": ToolEntry(
        queries.StepsQuery,
        run_tools.list_steps,
        "Each step of each rank by bucket; outlier steps; kinds of steps (evaluation, checkpoint).",
    ),
    "waits": ToolEntry(
        _PAGED,
        run_tools.list_waits,
        "Who waits for whom and how long, and which rank caused it.",
    ),
    "collectives": ToolEntry(
        _PAGED,
        run_tools.list_collectives,
        "Collectives and messages by axis, op and size: calls per step, transfer and wait, bus"
        " bandwidth; exposed communication by axis and phase.",
    ),
    "critical_path": ToolEntry(
        _PAGED,
        run_tools.list_critical_path,
        "What the end of a step depends on, by bucket, axis, rank and kernel.",
    ),
    "pipeline": ToolEntry(
        _PAGED,
        run_tools.describe_pipeline,
        "The pipeline bubble of each stage against the schedule's ideal.",
    ),
    "kernels": ToolEntry(
        _PAGED,
        run_tools.list_kernels,
        "Compute by kernel family and rank; kernels that are slower on one rank than on its peers.",
    ),
    "parts": ToolEntry(
        _PAGED,
        run_tools.list_parts,
        "The step by layer and part of the model (attention, mlp, norm, head, optimizer, ...).",
    ),
    "idle": ToolEntry(
        _PAGED,
        run_tools.list_idle,
        "Why devices idle: data loading, launch-bound host work, synchronization, Python.",
    ),
    "memory": ToolEntry(
        _PAGED, run_tools.list_memory, "Peak memory of each rank by category, if recorded."
    ),
    "model_comparison": ToolEntry(
        queries.ModelQuery,
        job_tools.compare_with_model,
        "How long the step should take by the analytical model, and where the run differs; MFU;"
        " measured against nominal link bandwidth. job 'auto' infers the job from the recording.",
    ),
    "compare": ToolEntry(
        queries.CompareQuery,
        job_tools.compare_two,
        "What differs between two runs: settings, buckets, communication, kernels, findings.",
    ),
    "check": ToolEntry(
        queries.CheckQuery,
        job_tools.check_runs,
        "Whether runs regressed against others beyond the noise: pass, regressed, inconclusive.",
    ),
    "what_if": ToolEntry(
        queries.WhatIfQuery,
        job_tools.replay_changes,
        "The step time after a change: without stragglers, with a faster link, more microbatches,"
        " another schedule, on other hardware.",
        of_store=False,
    ),
    "predict": ToolEntry(
        queries.JobQuery,
        job_tools.predict_job,
        "Predict step time, memory and MFU of a job that need not have run, from its job.toml.",
    ),
    "plan": ToolEntry(
        queries.PlanQuery,
        job_tools.plan_job,
        "The fastest parallel layouts of a job on a number of GPUs that fit in memory.",
        of_store=False,
    ),
    "hang": ToolEntry(
        queries.HangQuery,
        job_tools.find_hang,
        "Which rank a hanging job waits for, from Flight Recorder dumps.",
    ),
    "timeline": ToolEntry(
        queries.TimelineQuery,
        run_tools.list_timeline,
        "The kernels and calls of one rank in a window of time, as rows.",
    ),
    "explain": ToolEntry(
        queries.ExplainQuery,
        run_tools.explain_number,
        "Where a number comes from: definition, formula, rows. Use it before you interpret one.",
    ),
}
"""Entries by the name of the tool, in the order of the list."""


def list_tool_names(recordings: Recordings) -> tuple[str, ...]:
    """The tools that are offered: without folders, those for runs of a store."""
    return tuple(name for name, one in TOOLS.items() if recordings.roots or one.of_store)


class ToolError(Exception):
    """A question that cannot be asked so, in one line for the agent."""


def build_input_schema(entry: ToolEntry) -> dict[str, Any]:
    """The JSON Schema of a tool's arguments."""
    (root,), parts = msgspec.json.schema_components([entry.query], ref_template="{name}")
    schema: dict[str, Any] = dict(parts[root["$ref"]])
    meanings = read_meanings(entry.query)
    schema["properties"] = {
        name: {**one, "description": meanings[name]} for name, one in schema["properties"].items()
    }
    return {key: one for key, one in schema.items() if key not in ("title", "description")}


def answer_tool(recordings: Recordings, name: str, arguments: Mapping[str, object]) -> str:
    """The answer of a tool as JSON text. Raises ToolError in one line, whatever was asked."""
    names = list_tool_names(recordings)
    if name not in names:
        raise ToolError(f"no tool {mark_recorded(name)}; there are {', '.join(names)}")
    entry = TOOLS[name]
    try:
        query = msgspec.convert(arguments, type=entry.query)
    except msgspec.ValidationError as error:
        takes = ", ".join(one.name for one in msgspec.structs.fields(entry.query)) or "nothing"
        raise ToolError(f"{name}: {mark_recorded(str(error))}; it takes {takes}") from None
    try:
        answer = entry.answer(recordings, query)
        return write_answer(answer, getattr(query, "offset", 0))
    except StepsplitError as error:
        hint = "" if isinstance(error, UsageError) else " (bad data)"
        raise ToolError(f"{name}{hint}: {_shorten(str(error))}") from None
    except RecursionError:
        raise ToolError(f"{name}: the recording is nested too deeply") from None
    except OSError as error:
        raise ToolError(f"{name}: {error.strerror or 'cannot be read'}") from None


_MAX_ERROR_CHARS, _MAX_ERROR_BYTES = 900, 1_500
"""A letter of another script may take a token of each of its bytes."""


def _shorten(text: str) -> str:
    # An error of ours quotes names of a recording, which may be anything.
    short = text.encode("utf-8", "replace")[:_MAX_ERROR_BYTES].decode("utf-8", "ignore")
    return mark_recorded(short, _MAX_ERROR_CHARS)

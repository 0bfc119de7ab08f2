"""What a recording cannot answer: each question with the reason and what would answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepsplit.analyzer import units
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.analyzer.trace import Lack
from stepsplit.dashboard.agents.answers import CannotAnswer, Reason, mark_recorded

Find = Callable[[Report], CannotAnswer | None]


@dataclass(frozen=True, slots=True)
class UnknownEntry:
    """A question that some recordings do not answer.

    Attributes:
        tools: the tools whose answers say so.
        find: says why this recording does not; None if it does.
    """

    tools: tuple[str, ...]
    find: Find


def list_unknowns(report: Report, tool: str) -> tuple[CannotAnswer, ...]:
    """What the recording cannot answer of what the tool is asked; what it has lost comes first."""
    lost = []
    for row in () if report.summary is None else report.summary.lacks:
        whose = (
            f"of ranks {units.format_number_list(row.ranks)}" if row.ranks else "of the recording"
        )
        lost.append(
            CannotAnswer(
                f"anything that rests on the lost part {whose}",
                "incomplete_recording",
                f"incomplete recording: {mark_recorded(row.lack)} {whose}",
                # A report of a later version may have lost what this one does not know.
                next(
                    (fix for lack, fix in _FIX.items() if lack == row.lack), "a complete recording"
                ),
            )
        )
    found = [entry.find(report) for entry in UNKNOWNS if tool in entry.tools]
    return (*lost, *(one for one in found if one is not None))


_FIX = {
    Lack.FILE: "the whole file: stop the profiler before the process ends",
    Lack.ENTRIES: "the undamaged file",
    Lack.RANKS: "traces of the missing ranks (stepsplit gather merges the folders of hosts)",
    Lack.STEPS: "a mark for each step: prof.step(), or stepsplit record",
    Lack.NO_DEVICE: "ProfilerActivity.CUDA, and rights to use CUPTI (stepsplit doctor)",
    Lack.DEVICE_END: "fewer steps in a recording, or a larger CUPTI buffer",
    Lack.KERNELS: "fewer steps in a recording, so that no device event is lost",
    Lack.CLOCK: "collectives that these hosts share within the recorded steps, or stepsplit record",
    Lack.MEMORY: "a memory history of fewer steps",
}


def _if(
    lacks: Callable[[Report], bool], question: str, reason: Reason, because: str, needed: str
) -> Find:
    """The same answer for every report of which the condition is true."""
    answer = CannotAnswer(question, reason, because, needed)
    return lambda report: answer if lacks(report) else None


def _find_no_steps(report: Report) -> CannotAnswer | None:
    if report.steps and any(row.kind == "full" for row in report.steps):
        return None
    what = "no complete step" if report.steps else "no step"
    return CannotAnswer(
        "how long a usual step takes and where its time goes",
        "too_few",
        f"the recording has {what}",
        "three complete steps or more, marked by prof.step() or recorded by stepsplit record",
    )


def _find_estimates(report: Report) -> CannotAnswer | None:
    rows = select_full_steps(report.steps)
    number = sum(row.estimated for row in rows)
    if not number:
        return None
    return CannotAnswer(
        "the exact part of waiting in the communication of these steps",
        "incomplete_recording",
        f"{number} of {len(rows)} steps of ranks are estimates: peers are not recorded, or the"
        " ranges of calls end late",
        "traces of all ranks of each group, of the same steps",
    )


def _find_no_link(report: Report) -> CannotAnswer | None:
    if report.gap is not None and any(row.link_bytes_per_s for row in report.gap.calls):
        return None
    if not report.collectives:
        return CannotAnswer(
            "how fast any link is",
            "not_recorded",
            "the recording has no communication between ranks",
            "a recording of a job of several ranks",
        )
    # Also said where a model is missing: a call without a size has no bandwidth at all.
    unmatched = sum(row.busbw_bytes_per_s is None for row in report.collectives)
    own = (
        f"{unmatched} of {len(report.collectives)} kinds of calls have no measured bandwidth"
        " (size unknown, or peers not recorded); " * bool(unmatched)
    )
    return CannotAnswer(
        "whether a link is slow for what it is",
        "needs_model",
        f"{own}the recording does not say how fast the link should be",
        "model_comparison with a job.toml that names the [hardware], compare with a healthy run, or"
        " nccl-tests on the same nodes",
    )


def _find_no_pipeline(report: Report) -> CannotAnswer | None:
    if report.pipeline is not None:
        return None
    mesh = report.run.mesh
    stages = next((one.size for one in mesh or () if one.axis == "pp"), 1)
    # That there is no pipeline is an answer, unlike a pipeline that was not recognized.
    if mesh is not None and stages == 1:
        return CannotAnswer(
            "the bubble of a pipeline",
            "not_recorded",
            "the job has no pipeline: pp is 1 in its mesh",
            "nothing: there is no such bubble",
        )
    return CannotAnswer(
        "the bubble of the schedule and its ideal",
        "not_known",
        "the microbatches of each stage are not recognized"
        if stages > 1
        else "no mesh is known, so it is not known whether there is a pipeline",
        "annotated forwards and backwards (stepsplit record), all stages, and the mesh",
    )


def _find_unexplained_waits(report: Report) -> CannotAnswer | None:
    total = sum(row.caused_ns for row in report.blame)
    # The schedule's ideal bubble is explained, and has no rank.
    own = sum(row.caused_ns for row in report.blame if row.rank is None and row.cause != "schedule")
    if not total or own / total < _LEAST_UNEXPLAINED:
        return None
    return CannotAnswer(
        f"who caused {units.format_percent(own / total)} of the waiting",
        "not_known",
        "it is variation between steps, or its cause is not in the recording",
        "more steps, and traces of all ranks",
    )


_LEAST_UNEXPLAINED = 0.05


def _find_unknown_idle(report: Report) -> CannotAnswer | None:
    total = sum(row.idle_ns for row in report.idle)
    own = sum(row.idle_ns for row in report.idle if row.cause == "unknown")
    if report.idle and (not total or own / total < _LEAST_UNEXPLAINED):
        return None
    return CannotAnswer(
        "why the device idles" if not total else "why the device idles in the rows 'unknown'",
        "not_recorded",
        "the recording has no host events for it",
        "ProfilerActivity.CPU in the profiler, or stepsplit record",
    )


def _find_no_parts(report: Report) -> CannotAnswer | None:
    evidence = report.part_evidence
    unplaced = 1.0 if evidence is None else evidence.unplaced_share
    if unplaced < _LEAST_UNPLACED and evidence is not None and evidence.layers:
        return None
    return CannotAnswer(
        "the layer or part of all of the time",
        "not_recorded",
        "the recording has no ranges of modules"
        if evidence is None or not evidence.layers
        else f"{units.format_percent(unplaced)} of the step cannot be placed in a part",
        "ranges of modules: with_modules or with_stack of the profiler, or stepsplit record",
    )


_LEAST_UNPLACED = 0.2


_ON_WAITS = ("summary", "waits", "steps")

UNKNOWNS = (
    UnknownEntry(
        ("recording", "summary", "findings", "steps", "waits", "critical_path"), _find_no_steps
    ),
    UnknownEntry(
        ("recording", "summary", "waits", "collectives"),
        _if(
            # With a single rank nothing is left to ask.
            lambda report: report.run.mesh is None and report.run.world_size != 1,
            "which axis of the parallel layout (tp, pp, dp, cp, ep) a call, a wait or a rank is of",
            "not_known",
            "no mesh is stated, and the recording does not show one",
            "analyze --mesh pp=2,dp=2,tp=2 with the job's layout, or stepsplit record",
        ),
    ),
    UnknownEntry(("recording", *_ON_WAITS, "collectives"), _find_estimates),
    UnknownEntry(("collectives",), _find_no_link),
    UnknownEntry(
        ("recording", "summary"),
        _if(
            lambda report: report.prediction is None,
            "MFU, tokens per second, and how long the step should take",
            "needs_model",
            "the report has no model comparison",
            "model_comparison (job 'auto' or a job.toml)",
        ),
    ),
    UnknownEntry(
        ("summary", "model_comparison"),
        _if(
            # Without a prediction the entry above says more.
            lambda report: report.prediction is not None and report.mfu is None,
            "MFU",
            "not_known",
            "the peak of this device at the training's dtype is not known",
            "[hardware] with the peak FLOP/s in a job.toml",
        ),
    ),
    UnknownEntry(
        ("recording", "memory"),
        _if(
            lambda report: not report.memory,
            "memory of any rank",
            "not_recorded",
            "the recording has no memory",
            "stepsplit record, or a memory snapshot (torch.cuda.memory._dump_snapshot) with the"
            " traces",
        ),
    ),
    UnknownEntry(("pipeline",), _find_no_pipeline),
    UnknownEntry(("waits", "findings"), _find_unexplained_waits),
    UnknownEntry(("idle",), _find_unknown_idle),
    UnknownEntry(
        ("findings", "kernels"),
        _if(
            lambda report: any(row.shapes is None for row in report.slow_kernels),
            "whether a slow rank has a slow device or more work, for kernels without shapes",
            "not_recorded",
            "input shapes and grids of these kernels were not recorded",
            "stepsplit record --shapes, or record_shapes=True",
        ),
    ),
    UnknownEntry(("parts",), _find_no_parts),
    UnknownEntry(
        ("recording",),
        _if(
            lambda report: report.run.profiling_slowdown is None,
            "how much the profiler itself slows the steps",
            "not_recorded",
            "step times without the profiler are not recorded",
            "stepsplit record, which keeps the times of steps before and after",
        ),
    ),
    UnknownEntry(
        ("recording",),
        _if(
            lambda report: True,
            "loss, accuracy, and power or temperature of a device",
            "not_recorded",
            "a recording of where time goes has none of them; of clocks it has what findings say",
            "the training's own logs, and nvidia-smi or DCGM while it runs",
        ),
    ),
    UnknownEntry(
        ("findings",),
        _if(
            lambda report: not report.findings,
            "what a fix would save",
            "not_known",
            "no cause with a saving of 1 % of the step or more was found in what is recorded;"
            " this is no proof that there is none",
            "summary and idle for the largest parts; a recording with --shapes and of all ranks",
        ),
    ),
)
"""Entries in the order in which they are said."""

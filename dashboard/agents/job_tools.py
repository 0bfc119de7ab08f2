"""The answers that compare: with a model, with other runs, with other settings; and hangs."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.dashboard.agents.answers import CannotAnswer, Own, ToolAnswer, pick
from stepsplit.dashboard.agents.queries import (
    CheckQuery,
    CompareQuery,
    HangQuery,
    JobQuery,
    ModelQuery,
    PlanQuery,
    WhatIfQuery,
)
from stepsplit.dashboard.agents.recordings import Recordings
from stepsplit.dashboard.agents.unknowns import list_unknowns

AUTO = "auto"

# A run against its model.


def compare_with_model(recordings: Recordings, query: ModelQuery) -> ToolAnswer:
    """Measured against predicted."""
    from stepsplit.analyzer.analysis import examine

    opened = recordings.open(query.recording)
    report = opened.report
    # Analyzed again: the report that was opened may have no model, or another one.
    if query.job and opened.path is not None:
        job = query.job if query.job == AUTO else recordings.find_job(query.job)
        report = examine([opened.path], job=job).report
    elif query.job:
        raise UsageError(f"{query.recording}: a run of the store keeps the job of its analysis")
    gap = report.gap
    if gap is None:
        unknown = CannotAnswer(
            "how long the step should take, MFU, and which part is slower than it should be",
            "needs_model",
            "the report has no model comparison",
            'job "auto", or a job.toml with what cannot be inferred ([model], [hardware])',
        )
        return ToolAnswer("no comparison with a model", cannot_answer=(unknown,))
    shown = gap.shown
    values = {
        "stage": gap.stage,
        "measured_step_ns": shown.measured.step_ns,
        "predicted_step_ns": shown.predicted.step_ns,
        **pick(
            gap,
            predicted_low_ns="low_ns",
            predicted_high_ns="high_ns",
            confidence="confidence",
            caveats="notes",
        ),
        **pick(report, "mfu", "hfu"),
        "calls_not_as_predicted": [
            pick(row, "axis", "op", "count", "predicted_count")
            for row in gap.calls
            if not row.equal
        ],
        "links": [pick(row, "axis", "op", *_RATES) for row in gap.calls],
    }
    rows = [(row.bucket, row.cause, row.axis, row.ns, row.message) for row in gap.rows]
    about = "parts of measured - predicted step; they add up; negative: faster than predicted"
    unknowns = [*list_unknowns(report, "model_comparison")]
    # With a low confidence the model may be what is wrong.
    if gap.confidence == "low":
        unknowns.append(
            CannotAnswer(
                "which of both is wrong, the run or the model, where they differ",
                "not_known",
                "the model's confidence is low; see caveats",
                "stepsplit calibrate on runs of this machine",
            )
        )
    return ToolAnswer(
        about, values, ("bucket", "cause", "axis", "difference_ns", "message"), rows, (*unknowns,)
    )


_RATES = ("busbw_bytes_per_s", "predicted_busbw_bytes_per_s", "link_bytes_per_s")

# Runs against runs.


def compare_two(recordings: Recordings, query: CompareQuery) -> ToolAnswer:
    """The differences of two runs."""
    from stepsplit.analyzer.regression.compare import compare_reports

    baseline, candidate = (
        recordings.open(name).report for name in (query.baseline, query.candidate)
    )
    one = compare_reports(baseline, candidate)
    values = {
        "baseline_median_ns": one.baseline.median_ns,
        "candidate_median_ns": one.candidate.median_ns,
        **pick(one, "difference_ns", "ratio", "within_noise"),
        "settings_that_differ": [
            pick(row, "name", "baseline", "candidate") for row in one.settings
        ],
        "findings": [
            pick(
                row,
                finding="message",
                baseline_gain_ns="baseline_ns",
                candidate_gain_ns="candidate_ns",
            )
            for row in one.findings
        ],
        "buckets": [pick(row, "bucket", "difference_ns") for row in one.buckets],
    }
    rows: list[tuple[object, ...]] = [
        ("exposed", row.bucket, row.axis, row.baseline_ns, row.candidate_ns) for row in one.exposed
    ]
    rows += [
        ("kernels", row.family, None, row.baseline_ns, row.candidate_ns) for row in one.kernels
    ]
    unknowns: tuple[CannotAnswer, ...] = ()
    # A single step has no spread: any difference may be chance.
    if one.within_noise is None:
        unknowns = (
            CannotAnswer(
                "whether the difference is more than noise",
                "too_few",
                "a side has fewer than two full steps",
                "more steps, or check with several runs on each side",
            ),
        )
    about = (
        "candidate against baseline: medians of the step; within_noise: whether the difference is"
        " within the spread of the steps of these two runs, though runs of a job may differ by more"
        " (check with several runs on each side); buckets are means per step and rank and add up to"
        " the difference of the mean step; rows: exposed communication and kernels"
    )
    columns = ("of", "name", "axis", "baseline_ns", "candidate_ns")
    return ToolAnswer(about, values, columns, rows, unknowns)


def check_runs(recordings: Recordings, query: CheckQuery) -> ToolAnswer:
    """Whether runs stay within budgets."""
    from stepsplit.analyzer.analysis import DEFAULT_BUDGETS
    from stepsplit.analyzer.regression.checks import keep_last, parse_budget
    from stepsplit.analyzer.regression.judge import check_candidate
    from stepsplit.analyzer.regression.metrics import extract_metrics

    # The command line also takes files of rules; here a rule is never taken for the path of one.
    budgets = keep_last(map(parse_budget, query.budgets or DEFAULT_BUDGETS))
    sides = [
        [extract_metrics(recordings.open(name).report, name) for name in side]
        for side in (query.candidate, query.baseline)
    ]
    one = check_candidate(sides[0], sides[1], budgets, query.across_setups)
    values = {
        "answer": one.answer,
        "likely_causes": [str(getattr(row, "message", row)) for row in one.causes],
        "other_changes": [row.metric for row in one.others],
        "warnings": list(one.warnings),
        "single_run_on_a_side": one.low_confidence,
    }
    columns = ("metric", "budget", "answer", "baseline", "candidate", "harm", "allowed",
               "harm_low", "harm_high", "runs_needed", "note")  # fmt: skip
    rows = [
        tuple(getattr(row, name) for name in (*columns[:7], "low", "high", "runs_needed", "note"))
        for row in one.gated
    ]
    unknowns = tuple(
        CannotAnswer(
            f"whether {row.metric} regressed",
            "too_few",
            "the noise of these runs does not decide" + (f": {row.note}" if row.note else ""),
            f"{row.runs_needed} runs on each side" if row.runs_needed else "more runs on each side",
        )
        for row in one.gated
        if row.answer == "inconclusive"
    )
    about = (
        "each metric against its budget, in the metric's unit (ns, bytes, bytes/s, or a share);"
        " regressed: worse than allowed beyond the noise; inconclusive: the runs do not decide"
    )
    return ToolAnswer(about, values, columns, rows, unknowns)


# A run with something changed.


def replay_changes(recordings: Recordings, query: WhatIfQuery) -> ToolAnswer:
    """The step after a change."""
    from stepsplit.analyzer.diagnose.what_if import what_if

    if recordings.open(query.recording).path is None:
        unknown = CannotAnswer(
            "the step after a change",
            "needs_trace",
            "a replay reads the traces, which are not read from the store",
            "the recording's folder, with stepsplit mcp FOLDER",
        )
        return ToolAnswer("no replay", cannot_answer=(unknown,))
    # The path is checked first, so that the answer does not say what lies outside of the folders.
    if query.hardware.endswith(".toml"):
        recordings.find_path(query.hardware)
        raise UsageError("hardware: name a preset, such as b200-sxm")
    path = recordings.find_path(query.recording)
    one = what_if(path, changes=query.changes, hardware=query.hardware or None)
    values: dict[str, object] = {
        "step_ns": one.step_ns,
        "slowdown_by_stragglers": one.slowdown,
    }
    if one.carried is not None:
        shown = ("source", "target", "step_ns", "low_ns", "high_ns", "host_ns", "limits")
        values["on_other_hardware"] = pick(one.carried, *shown)
    rows = [(str(row.change), row.step_ns, row.gain_ns) for row in one.changes]
    about = (
        "mean step after each change alone, by a replay of the recorded dependencies; gain_ns below"
        " 0: longer. Gains do not add up"
    )
    return ToolAnswer(about, values, ("change", "step_ns", "gain_ns"), rows)


# A job that need not have run.


def _read_job(recordings: Recordings, job: str) -> tuple[JobConfig, Path | None]:
    from stepsplit.analyzer.model.config_decode import parse_table
    from stepsplit.analyzer.model.config_file import decode_job, list_referenced_files, read_job

    # A TOML text has a table; the path of a file has no bracket.
    if "[" not in job:
        path = recordings.find_job(job)
        return read_job(path), path
    # A text that names a file would have it read from wherever the server runs.
    table = parse_table("the job", job.encode())
    if list_referenced_files(table):
        raise UsageError("the job names files; give the path of a job.toml below a folder instead")
    return decode_job(table), None


def predict_job(recordings: Recordings, query: JobQuery) -> ToolAnswer:
    """What a step should take."""
    from stepsplit.analyzer.model.predict import predict, read_rates

    job, path = _read_job(recordings, query.job)
    one = predict(job, read_rates(path, job.hardware) if path else None)
    values = {
        "step_ns": one.split.step_ns,
        **pick(one, "low_ns", "high_ns", "confidence"),
        "caveats": one.notes,
        **pick(one, "mfu", "hfu", "tokens_per_s_per_gpu", "fits", "bubble_fraction", "parameters"),
        "not_stated": [
            {"key": row.key, "taken": row.value, "low": row.low, "high": row.high}
            for row in one.unstated
        ],
    }
    rows = [
        (
            stage,
            split.step_ns,
            split.compute_ns,
            split.exposed_comm_ns,
            split.bubble_ns,
            memory.total_bytes,
        )
        for stage, (split, memory) in enumerate(zip(one.splits, one.memory, strict=True))
    ]
    about = "predicted step of the slowest stage with its band, and each stage; not measured"
    columns = ("stage", "step_ns", "compute_ns", "exposed_comm_ns", "bubble_ns", "peak_bytes")
    return ToolAnswer(about, values, columns, rows)


def plan_job(recordings: Recordings, query: PlanQuery) -> ToolAnswer:
    """The fastest layouts that fit."""
    from stepsplit.analyzer.model.plan import plan
    from stepsplit.analyzer.model.predict import read_rates

    job, path = _read_job(recordings, query.job)
    rates = read_rates(path, job.hardware) if path else None
    one = plan(job, query.gpus, frozenset(query.keep), rates=rates)
    found = [(one.best, "")] + [
        (row.candidate, f"{units.format_milliseconds(row.behind_ns)} slower")
        for row in one.runners_up
    ]
    layout = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "ep", "zero", "schedule",
              "micro_batch", "recompute")  # fmt: skip
    cost = ("step_ns", "peak_bytes", "mfu")
    rows = [
        (*pick(each.choice, *layout).values(), *pick(each, *cost).values(), Own(note))
        for each, note in found
    ]
    columns = (*layout, *cost, "note")
    values = {"gpus": one.gpus, "confidence": one.best.confidence}
    about = "predicted fastest layouts that fit in memory, best first; predictions, not measured"
    return ToolAnswer(about, values, columns, rows)


# A job that hangs.


def find_hang(recordings: Recordings, query: HangQuery) -> ToolAnswer:
    """Which rank a job waits for."""
    one = recordings.open_hang(query.recording)
    values = {
        **pick(one, "condition", "verdict", "note"),
        "ranks": Own(units.format_number_list(one.ranks)),
        "culprits": [pick(row, "ranks", "cause", "message") for row in one.culprits],
        "mismatches": [
            {"group": row.group.in_words, "seq": row.seq, "what": row.what}
            for row in one.mismatches
        ],
        "warnings": [row.message for row in one.warnings],
    }
    rows = [
        (
            row.group.in_words,
            row.op,
            row.seq,
            row.message_bytes,
            list(row.waiting),
            [each.rank for each in row.missing],
            list(row.waits_for),
        )
        for row in one.stuck
    ]
    unknowns: tuple[CannotAnswer, ...] = ()
    # A missing dump is not an innocent rank.
    if one.no_dump:
        unknowns = (
            CannotAnswer(
                "where the ranks without a dump are",
                "incomplete_recording",
                f"no dump of ranks {units.format_number_list(one.no_dump)}",
                "their Flight Recorder dumps, or stepsplit hang on the running job",
            ),
        )
    about = "calls that do not end, and who is missing; if the condition is clear, no call is open"
    columns = ("group", "op", "seq", "message_bytes", "waiting", "missing", "waits_for")
    return ToolAnswer(about, values, columns, rows, unknowns)

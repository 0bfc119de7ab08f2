"""The whole pipeline: files in; report, comparison or check result out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.diagnose.diagnosis import diagnose
from stepsplit.analyzer.diagnose.rl_windows import JobRole
from stepsplit.analyzer.diagnose.role_times import (
    build_role_job,
    explain_other_roles,
    find_rl_step,
    forget_other_roles,
    group_programs,
    join_programs,
)
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.parts.breakdown import break_down
from stepsplit.analyzer.readers.file_kinds import FileRole
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.recording import Recording, read_recording, read_recording_files
from stepsplit.analyzer.readers.recording_files import RecordingFiles, open_recording
from stepsplit.analyzer.readers.roles import find_other_roles, split_by_role
from stepsplit.analyzer.readers.workers import Progress, Workers, ignore_progress
from stepsplit.analyzer.report.build import build_report
from stepsplit.analyzer.report.io import is_analyzed, is_report, read_report
from stepsplit.analyzer.report.report import NO_MODEL, Report, WarningRow
from stepsplit.analyzer.report.roles import ROLES_NAME, RoleJob, roles_from_json
from stepsplit.analyzer.report.tables import Tables, build_tables
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.split_recording import split_recording
from stepsplit.collectors.formats.run_spec import Mesh, is_role
from stepsplit.collectors.safe_io.regular_file import read_regular

if TYPE_CHECKING:
    from stepsplit.analyzer.diagnose.hang.result import Hang
    from stepsplit.analyzer.gap.config_from_trace import JobDraft
    from stepsplit.analyzer.regression.checks import CheckResult
    from stepsplit.analyzer.regression.compare import RunComparison
    from stepsplit.analyzer.regression.metrics import RunMetrics
    from stepsplit.analyzer.regression.scaling import Scaling, Work

_ModelComparison = Callable[[Report, Recording, RunSplit], Report]

_JobDrafter = Callable[[Recording, RunSplit], "JobDraft"]


class Analysis(Struct, frozen=True):
    """The result of `examine`: a report and its detail tables.

    Attributes:
        report: Splits, groups, findings and warnings of the run; what report.json contains.
        tables: Segments, pipeline slots, waits and kernel slices; what tables/ contains.
        job_draft: A job.toml inferred from the recording, if it was asked for. Default: None.
    """

    report: Report
    tables: Tables
    job_draft: JobDraft | None = None


def analyze(
    *places: str | Path,
    job: str | Path | None = None,
    rules: Rules = BUILT_IN,
    mesh: Mesh | None = None,
) -> Report:
    """Analyzes a recording: where the time of each step went on each rank.

    Args:
        places: Files, folders, archives or URLs that contain the traces of one run, one trace per
            rank (torch.profiler traces or Nsight Systems SQLite exports).
        job: Path of a job.toml that describes the job, or "auto" to infer the job from the
            recording. Keys missing in the file are inferred. With it the report contains a
            prediction and its gap to the measurement; default None: no prediction.
        rules: Which kernels communicate and which compute; by default the built-in rules. See
            `read_rules`.
        mesh: The parallel layout of the job, if you know it; default None: that of run.json, else
            inferred. A layout that contradicts the recording is a warning.

    Returns:
        The report. Times are integer nanoseconds, sizes bytes, ratios 0..1. There is one row in
        `report.steps` per rank and step, whose seven buckets add up to `step_ns`.

    Raises:
        DataError: A place is missing, a named file cannot be read, or no trace was found.
        UsageError: With job: the model needs a key that neither the file nor the recording gives.

    Examples:
        >>> report = analyze("sample_traces/pp2_m2")
        >>> row = report.steps[0]
        >>> row.rank, row.step, row.step_ns, row.split.exposed_comm_ns
        (0, 22, 125605700, 880903)
    """
    return examine(places, rules=rules, job=job, mesh=mesh).report


def examine(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
    job: str | Path | None = None,
    mesh: Mesh | None = None,
) -> Analysis:
    """Analyzes a recording as `analyze` does, and returns the detail tables as well.

    Args:
        places: Files, folders, archives or URLs that contain the traces of one run.
        workers: The most processes that read files at the same time; default 1. Small recordings
            are read by one process in any case.
        progress: Called with (bytes read, bytes in total) after each part of a file.
        rules: Which kernels communicate and which compute; by default the built-in rules.
        job: Path of a job.toml, or "auto" to infer the job from the recording; default None: the
            report contains no prediction.
        mesh: The parallel layout of the job, if you know it; default None: that of run.json, else
            inferred.

    Returns:
        The report and its tables.

    Raises:
        DataError: A place is missing, a named file cannot be read, or no trace was found.
        UsageError: With job: the model needs a key that neither the file nor the recording gives.

    Examples:
        >>> analysis = examine(["sample_traces/pp2_m2"], workers=4)
        >>> analysis.report.run.ranks, len(analysis.tables.segments.start_ns)
        ((0, 1), 4438)
    """
    compare = _make_comparison(job)
    recording = read_recording(places, workers, progress, rules)
    return _build_analysis(recording, places, compare, mesh)


def examine_or_find_hang(
    places: Sequence[str | Path],
    workers: Workers = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
    job: str | Path | None = None,
    mesh: Mesh | None = None,
    draft_job: bool = False,
) -> Analysis | Hang:
    """As `examine`; if there are no traces but Flight Recorder dumps, states of ranks or logs of a
    hang, returns what they show of it. workers may be a cluster. With draft_job the analysis has a
    job.toml of the recording."""
    compare, draft = _make_comparison(job), _make_draft(job) if draft_job else None
    with open_recording(places) as files:
        found = _read_or_find_hang(files, places, workers, progress, rules)
    if not isinstance(found, Recording):
        return found
    return _build_analysis(found, places, compare, mesh, draft)


class RoleAnalysis(Struct, frozen=True):
    """The result of `examine_roles_or_run` for a job of several roles: the whole on one clock, and
    the analysis of each role by its name."""

    job: RoleJob
    analyses: Mapping[str, Analysis]


def examine_roles_or_run(
    places: Sequence[str | Path],
    workers: Workers = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
    job: str | Path | None = None,
    mesh: Mesh | None = None,
    draft_job: bool = False,
) -> Analysis | Hang | RoleAnalysis:
    """As `examine_or_find_hang`, but a recording of several roles is analyzed role by role, without
    job and mesh, which are of one program."""
    compare = _make_comparison(job)

    def build(recording: Recording) -> Analysis:
        draft = _make_draft(job) if draft_job else None
        return _build_analysis(recording, places, compare, mesh, draft)

    return _examine_by_role(places, workers, progress, rules, build)


def _examine_by_role(
    places: Sequence[str | Path],
    workers: Workers,
    progress: Progress,
    rules: Rules,
    build: Callable[[Recording], Analysis],
) -> Analysis | Hang | RoleAnalysis:
    """What build makes of a recording of one program, or what the roles of one of several do."""
    lacks: list[str] = []
    recordings: dict[str, Recording] = {}
    failed: list[DataError] = []
    with open_recording(places) as files:
        found = split_by_role(files)
        if not found.by_role:
            whole = _read_or_find_hang(files, places, workers, progress, rules)
        else:
            for error in files.refused:
                raise error
        for role, own in found.by_role.items():
            try:
                recordings[role] = read_recording_files(own, workers, progress, rules)
            except DataError as error:
                failed.append(error)
                lacks.append(f"what {role} did: {error}")
    if not found.by_role:
        if not isinstance(whole, Recording):
            return whole
        return build(whole)
    if not recordings:
        raise failed[0]
    if found.strays:
        named = ", ".join(found.strays[:_MOST_STRAYS])
        more = len(found.strays) - _MOST_STRAYS
        named += f" and {more} more" if more > 0 else ""
        lacks.append(f"which role these traces are of, as they lie in the folder of none: {named}")
    return _analyze_roles(
        recordings, {role: own.places[0] for role, own in found.by_role.items()}, lacks
    )


_MOST_STRAYS = 3


def _analyze_roles(
    recordings: Mapping[str, Recording], places: Mapping[str, str], lacks: list[str]
) -> RoleAnalysis:
    """The analysis of these roles; lacks gets what is missing of them."""
    own_splits: dict[str, RunSplit] = {}
    failed: list[DataError] = []
    for role, recording in recordings.items():
        try:
            own_splits[role] = split_recording(forget_other_roles(recording))
        except DataError as error:
            failed.append(error)
            lacks.append(f"what {role} did: {error}")
    if not own_splits:
        raise failed[0]
    recordings = {role: recordings[role] for role in own_splits}
    ranks = {role: [t.rank for t in one.traces] for role, one in recordings.items()}
    programs, doubts = group_programs(recordings)
    analyses, roles = {}, []
    for number, own in enumerate(programs):
        joined = (
            split_recording(join_programs([recordings[role] for role in own]))
            if len(own) > 1
            else None
        )
        for role in own:
            others = {other: ranks[other] for other in own if other != role}
            split = explain_other_roles(own_splits.pop(role), role, others)
            analyses[role] = _build_from_split(recordings[role], split)
            whole = joined or split
            chosen = tuple(rank for rank in whole.ranks if rank.trace.rank in ranks[role])
            roles.append(JobRole(role, number, whole, chosen, analyses[role].report, places[role]))
    roles.sort(key=lambda role: role.name)
    run = next(iter(recordings.values())).name
    return RoleAnalysis(build_role_job(run, roles, [*lacks, *doubts]), analyses)


def examine_with_inferred_job(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = ignore_progress,
    mesh: Mesh | None = None,
    job: str | Path | None = None,
) -> Analysis | Hang | RoleAnalysis:
    """As `examine_roles_or_run` with job "auto" or a partial job.toml; keys that cannot be inferred
    give a warning, not an error. The analysis has the job.toml, completed by what was inferred."""
    compare, draft = _make_comparison(job or "auto"), _make_draft(job)

    def tried(report: Report, recording: Recording, split: RunSplit) -> Report:
        try:
            return compare(report, recording, split)
        except UsageError as error:
            warning = WarningRow(NO_MODEL, str(error))
            return replace(report, warnings=(*report.warnings, warning))

    def build(recording: Recording) -> Analysis:
        return _build_analysis(recording, places, tried, mesh, draft)

    return _examine_by_role(places, workers, progress, BUILT_IN, build)


def _read_or_find_hang(
    files: RecordingFiles,
    places: Sequence[str | Path],
    workers: Workers,
    progress: Progress,
    rules: Rules,
) -> Recording | Hang:
    if not files.list_files(FileRole.TRACE):
        from stepsplit.analyzer.diagnose.hang.find import read_calls
        from stepsplit.analyzer.diagnose.hang.rank_states import read_states

        # Dumps, states of ranks, logs of watchdogs or an answer of NCCL's RAS; without any, and
        # without a trace, reading the recording says what is missing. What is wrong with a dump
        # or a state says more than that.
        has_dumps = bool(files.list_files(FileRole.FLIGHT))
        states = None if has_dumps else read_states(places)
        with nullcontext() if has_dumps or states else suppress(DataError):
            return read_calls(places, states)
    return read_recording_files(files, workers, progress, rules)


def _build_analysis(
    recording: Recording,
    places: Sequence[str | Path],
    compare: _ModelComparison,
    mesh: Mesh | None = None,
    draft: _JobDrafter | None = None,
) -> Analysis:
    recording = forget_other_roles(recording)
    split = split_recording(recording, mesh)
    if recording.spec is not None and recording.spec.role:
        is_folder = len(places) == 1 and Path(places[0]).is_dir()
        others = find_other_roles(Path(places[0]), recording.spec.name) if is_folder else {}
        split = explain_other_roles(split, recording.spec.role, others)
    return _build_from_split(recording, split, compare, draft)


def _build_from_split(
    recording: Recording,
    split: RunSplit,
    compare: _ModelComparison = lambda report, *_: report,
    draft: _JobDrafter | None = None,
) -> Analysis:
    breakdown = break_down(split)
    report = build_report(recording, split, diagnose(split, recording.records), breakdown)
    if (rl_step := find_rl_step(split, report)) is not None:
        report = replace(report, rl_step=rl_step)
    job_draft = None if draft is None else draft(recording, split)
    tables = build_tables(split, breakdown, recording.memories)
    return Analysis(compare(report, recording, split), tables, job_draft)


def _make_comparison(job: str | Path | None) -> _ModelComparison:
    """The function that adds the model comparison to a report; without a job, it adds nothing."""
    if job is None:
        return lambda report, *_: report
    # Imported here because the model takes time to load and is rarely used.
    from stepsplit.analyzer.gap.gap import compare_to_model, read_job_table

    return partial(compare_to_model, job_table=read_job_table(job))


def _make_draft(job: str | Path | None) -> _JobDrafter:
    """The function that infers a job.toml, completed by the values of job."""
    from stepsplit.analyzer.gap.config_from_trace import draft_job
    from stepsplit.analyzer.gap.gap import AUTO, read_job_table

    job_table = None if job is None or str(job) == AUTO else read_job_table(job)
    return lambda recording, split: draft_job(recording.spec, split, job_table)


def compare_runs(
    baseline: str | Path,
    candidate: str | Path,
    workers: int = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
) -> RunComparison:
    """Compares two runs: which bucket, collective or kernel family changed, and by how much.

    Args:
        baseline: A report.json, a folder that contains one, or a recording (file, folder, archive
            or URL), which is then analyzed.
        candidate: The run to compare with it, in any of these forms.
        workers: The most processes that read a recording at the same time; default 1.
        progress: Called with (bytes read, bytes in total) after each part of a file.
        rules: Which kernels communicate and which compute. Rules other than the built-in ones
            require recordings, because an existing report cannot be classified anew.

    Returns:
        The comparison. Its bucket differences, candidate minus baseline in ns per step, add up to
        the difference of the mean step time.

    Raises:
        DataError: A place is missing or cannot be read.
        UsageError: A run has no full step to compare, or rules were given with a report.

    Examples:
        >>> comparison = compare_runs("sample_traces/pp2_m2", "sample_traces/pp2_m8")
        >>> difference_ns = comparison.candidate.mean.step_ns - comparison.baseline.mean.step_ns
        >>> sum(row.difference_ns for row in comparison.buckets) == difference_ns
        True
    """
    from stepsplit.analyzer.regression.compare import compare_reports

    baseline_report, candidate_report = (
        load_report(place, workers, progress, rules) for place in (baseline, candidate)
    )
    return compare_reports(baseline_report, candidate_report)


def compare_scaling(
    places: Sequence[str | Path],
    work: Work | None = None,
    workers: int = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
) -> Scaling:
    """Compares runs of one job on several numbers of GPUs or in several layouts.

    Args:
        places: Two runs or more, in any of the forms that compare_runs takes.
        work: What the runs have in common: "tokens" are known of each (by a job.toml), "gpu": each
            GPU does the same work in a step (weak scaling), "step": all GPUs together do (strong
            scaling). None (default): tokens, where each run has a job; else no efficiency.
        workers: The most processes that read a recording at the same time; default 1.
        progress: Called with (bytes read, bytes in total) after each part of a file.
        rules: Which kernels communicate and which compute, as for compare_runs.

    Returns:
        The runs, fewest GPUs first, with their efficiency against the first of them, and by how
        much each bucket adds to the GPU time of the same work.

    Raises:
        DataError: A place is missing or cannot be read.
        UsageError: A run has no full step to compare, or "tokens" are asked for and one has no job.

    Examples:
        >>> scaling = compare_scaling(["sample_traces/pp2_m2", "sample_traces/tp2_pp2"], "gpu")
        >>> [run.gpus for run in scaling.runs]
        [2, 4]
    """
    from stepsplit.analyzer.regression.scaling import build_scaling

    return build_scaling([load_report(place, workers, progress, rules) for place in places], work)


def load_report(
    place: str | Path,
    workers: int = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
) -> Report:
    """Reads the report.json at the place or in the folder; analyzes a recording that has none, or
    whose traces are newer.

    With rules other than the built-in ones, the recording is always analyzed. Raises DataError, and
    UsageError for such rules with a report.json.
    """
    path = Path(place)
    if (path / ROLES_NAME).is_file() and not is_analyzed(path):
        raise DataError(path, "the analysis of several roles", "name the folder of one in it")
    if is_report(path):
        if rules != BUILT_IN:
            raise UsageError(
                f"{path}: rules do not apply to an existing report; name its recording"
            )
        return read_report(path)
    if rules == BUILT_IN and is_analyzed(path):
        return read_report(path)
    return examine([place], workers, progress, rules).report


DEFAULT_BUDGETS = ("calls:exact", "bytes:exact", "exposed_comm:10%,1pt", "bubble:10%,1pt")
"""The budgets of a check by default."""


def check_runs(
    candidate: Sequence[str | Path],
    baseline: Sequence[str | Path],
    budgets: Sequence[str] = DEFAULT_BUDGETS,
    across_setups: bool = False,
    rules: Rules = BUILT_IN,
) -> CheckResult:
    """Checks whether the candidate's runs stay within budgets relative to the baseline's runs.

    The Python form of `stepsplit check`.

    Args:
        candidate: The runs to check, one or more; three to five are recommended. Each is a
            recording (file, folder, archive or URL), a report.json, a folder that contains one, or
            a file of `stepsplit baseline`, which may contain several runs.
        baseline: The runs to compare with, in the same forms.
        budgets: "METRIC:LIMIT" texts such as "exposed_comm:5%" or "step:3ms", or paths of TOML
            files of budgets; by default exact calls and bytes, and 10 % or 1 point of exposed
            communication and bubble.
        across_setups: Whether runs of a different device, mesh or world size may be compared;
            default False.
        rules: Which kernels communicate and which compute, for recordings; by default the
            built-in rules. A baseline file keeps the rules of its analysis.

    Returns:
        The result: `answer` is "pass", "regressed" or "inconclusive"; `gated` has a row per metric
        with a budget, `causes` what explains a regression.

    Raises:
        DataError: A place is missing or cannot be read.
        UsageError: A budget is invalid, or the setups of the runs differ.

    Examples:
        >>> runs = ["sample_traces/dp4"]
        >>> result = check_runs(candidate=runs, baseline=runs, budgets=["calls:exact"])
        >>> result.answer, [row.metric for row in result.gated]
        ('pass', ['calls'])
    """
    from stepsplit.analyzer.regression.checks import parse_budgets
    from stepsplit.analyzer.regression.judge import check_candidate

    candidate_metrics, baseline_metrics = (
        [one for place in side for one in read_run_metrics(place, rules=rules)]
        for side in (candidate, baseline)
    )
    return check_candidate(
        candidate_metrics, baseline_metrics, parse_budgets(budgets), across_setups
    )


def read_run_metrics(
    place: str | Path,
    workers: int = 1,
    progress: Progress = ignore_progress,
    job: str | Path | None = None,
    rules: Rules = BUILT_IN,
) -> tuple[RunMetrics, ...]:
    """Reads the metrics that a check compares, of each run at the place.

    Args:
        place: A recording (file, folder, archive or URL), a report.json, a folder that contains
            one, or a baseline file, which may contain several runs.
        workers: The most processes that read a recording at the same time; default 1.
        progress: Called with (bytes read, bytes in total) after each part of a file.
        job: Path of a job.toml, or "auto", to compare a recording with the model as well; default
            None.
        rules: Which kernels communicate and which compute, for recordings. A baseline file keeps
            the rules of its analysis.

    Returns:
        The metrics, one item per run.

    Raises:
        DataError: The place is missing or cannot be read.
        UsageError: Rules were given with a report, or the model needs a key that is missing.

    Examples:
        >>> for metrics in read_run_metrics("ci/baseline.json"):
        ...     print(metrics)
    """
    from stepsplit.analyzer.regression.metrics import (
        extract_metrics,
        extract_role_metrics,
        is_baseline,
        read_baseline,
    )

    path = Path(place)
    if is_baseline(path):
        return read_baseline(path)
    if job is not None:
        return (extract_metrics(examine([place], workers, progress, rules, job).report, place),)
    if rules == BUILT_IN and (path / ROLES_NAME).is_file():
        whole = roles_from_json(read_regular(path / ROLES_NAME), path / ROLES_NAME)
        # A role's name is a folder's: what a stranger has written there instead is refused.
        names = [one.name for one in whole.roles]
        if all(map(is_role, names)) and all(is_analyzed(path / one) for one in names):
            reports = {one: read_report(path / one) for one in names}
            return (extract_role_metrics(whole, reports, place),)
    if is_report(path) or (rules == BUILT_IN and is_analyzed(path)):
        return (extract_metrics(load_report(place, workers, progress, rules), place),)
    analysis = examine_roles_or_run([place], workers, progress, rules)
    if isinstance(analysis, RoleAnalysis):
        reports = {role: one.report for role, one in analysis.analyses.items()}
        return (extract_role_metrics(analysis.job, reports, place),)
    if not isinstance(analysis, Analysis):
        # Dumps alone: reading them as a recording says what is missing of one.
        analysis = examine([place], workers, progress, rules)
    return (extract_metrics(analysis.report, place),)

"""Reads a recording: the traces of its ranks, and what its other files add to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers import event_store
from stepsplit.analyzer.readers.compression import is_url
from stepsplit.analyzer.readers.event_store import EventStore
from stepsplit.analyzer.readers.file_kinds import FileRole
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.reader import estimate_bytes
from stepsplit.analyzer.readers.memory_snapshot import MemoryRecord
from stepsplit.analyzer.readers.open_calls import complete_open_calls
from stepsplit.analyzer.readers.rank_traces import TraceCandidate, TraceReading, assign_ranks
from stepsplit.analyzer.readers.recording_files import RecordingFiles, open_recording
from stepsplit.analyzer.readers.roles import check_one_role
from stepsplit.analyzer.readers.workers import Progress, Workers, ignore_progress
from stepsplit.analyzer.trace import Group, Lack, Note, ProbedClock, RankTrace
from stepsplit.collectors.formats.json_decode import replace_surrogates
from stepsplit.collectors.formats.rank_record import ClockProbe, RankRecord, build_spec
from stepsplit.collectors.formats.run_spec import RunSpec


class Recording(Struct, frozen=True):
    """The traces of a run in rank order, with its run.json if there is one.

    records are the rank records; they replace a missing run.json. memories are the recordings of
    memory, by file.
    """

    name: str
    spec: RunSpec | None
    traces: tuple[RankTrace, ...]
    notes: tuple[Note, ...]
    records: tuple[RankRecord, ...] = ()
    memories: tuple[MemoryRecord, ...] = ()


def read_recording(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
) -> Recording:
    """Reads the recording in the files, folders, archives and URLs, with up to `workers` processes.

    rules classify the kernels. Raises DataError if a place is missing, a named file cannot be read,
    or no trace is found.
    """
    with open_recording(places) as files:
        return read_recording_files(files, workers, progress, rules)


def read_recording_files(
    files: RecordingFiles, workers: Workers, progress: Progress, rules: Rules
) -> Recording:
    """As read_recording, for files that are already listed."""
    for error in files.refused:
        raise error
    check_one_role(files)
    dumps, notes = files.read_files(FileRole.FLIGHT)
    flights = {dump.rank: [one for one in dump.entries if not one.is_p2p] for dump in dumps}
    # The events of a large recording go to a store on disk; others fit into memory.
    large = [
        (kind.unpacked_ratio, source)
        for kind, source in files.list_files(FileRole.TRACE)
        if kind.unpacked_ratio
    ]
    is_large = (
        len(large) >= event_store.LEAST_FILES
        and sum(ratio * estimate_bytes(source) for ratio, source in large)
        >= event_store.LEAST_BYTES
    )
    store = EventStore() if is_large else None
    reading = TraceReading(workers, progress, rules, store, flights)
    candidates: list[TraceCandidate] = []
    trace_notes: list[Note] = []
    for kind in files.list_kinds(FileRole.TRACE):
        assert kind.read_ranks is not None
        sources = files.by_kind[kind]
        for source, read in zip(sources, kind.read_ranks(sources, reading), strict=True):
            if isinstance(read, DataError):
                trace_notes.append(files.note_unreadable(kind, source, read))
            else:
                candidates += read
    # A record replaces run.json if a job was killed before rank 0 wrote it.
    found, record_notes = files.read_files(FileRole.RECORD)
    records: list[RankRecord] = sorted(found, key=lambda record: record.rank.rank)
    # What a memory snapshot lacks is said with the recording.
    memories, memory_notes = files.read_files(FileRole.MEMORY)
    record_notes += [*memory_notes, *(note for memory in memories for note in memory.notes)]
    spec = _read_spec(files) or (build_spec(records) if records else None)
    notes = [*files.notes, *notes, *trace_notes, *record_notes]
    for record in records:
        if record.device_stopped_step is not None:
            text = (
                f"the profiler's GPU buffers were full in step {record.device_stopped_step}: from"
                " then on kernels are missing and steps are partial; record fewer steps, or set a"
                " larger ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB"
            )
            notes.append(Note("device_stopped", text, record.rank.rank, Lack.DEVICE_END))
    if not candidates:
        raise files.explain_no_trace(notes)
    ranked, guessed = assign_ranks(candidates)
    notes += [*guessed, *_check_mixed_runs(ranked)]
    if spec:
        name = spec.name
    elif is_url(files.places[0]):
        name = PurePosixPath(files.places[0]).name
    else:
        # Without run.json a recording has the name of its folder.
        place = Path(files.places[0])
        name = (place if place.is_dir() else place.parent).resolve().name
    traces, stale = _drop_stale_ranks(_fill_group_members(ranked), spec)
    traces = complete_open_calls(_complete_traces(traces, records, spec))
    traces, unplaced = _place_clocks(traces)
    notes += [*stale, *unplaced]
    ranks = {trace.rank for trace in traces}
    return Recording(
        replace_surrogates(name),
        spec,
        tuple(traces),
        tuple(replace(note, message=replace_surrogates(note.message)) for note in notes),
        tuple(record for record in records if record.rank.rank in ranks),
        tuple(memories),
    )


def _read_spec(files: RecordingFiles) -> RunSpec | None:
    """The content of the run.json nearest to the top folder."""
    runs = files.list_files(FileRole.RUN)
    if not runs:
        return None
    kind, nearest = min(runs, key=lambda run: len(run[1].inner.parts))
    spec: RunSpec | None = kind.read(nearest)
    return spec


def _check_mixed_runs(traces: Sequence[RankTrace]) -> list[Note]:
    """Notes on signs that the traces are from several runs, or of several programs of one job, such
    as a trainer and its rollouts."""
    notes = []
    devices = {trace.device for trace in traces if trace.device}
    if len(devices) > 1:
        text = f"traces of different devices ({', '.join(sorted(devices))}): are they from one run?"
        notes.append(Note("mixed_devices", text))
    by_size: dict[int, list[RankTrace]] = defaultdict(list)
    for trace in traces:
        # Without one of them, a size is the smallest that the rank and its groups allow.
        if trace.states_size and trace.world_size > trace.rank + 1:
            by_size[trace.world_size].append(trace)
    # The ranks of the groups on which each trace has calls.
    called = {
        trace.rank: {
            trace.groups[group].ranks
            for group in set(trace.calls.group_id[trace.calls.group_id >= 0].tolist())
        }
        - {()}
        for trace in traces
    }
    for rank, groups in called.items():
        if groups and not any(rank in ranks for ranks in groups):
            inner = units.format_number_list(sorted({one for ranks in groups for one in ranks}))
            text = (
                f"it calls collectives of the ranks {inner}, to which it does not belong: its"
                " number is not its rank, or it is of another program of the job (trainer,"
                " rollouts), which belongs in a folder of its own"
            )
            notes.append(Note("rank_outside_groups", text, rank))
    if len(by_size) > 1:
        sides = "; ".join(
            f"{size} by rank {units.format_number_list([trace.rank for trace in own])}"
            for size, own in sorted(by_size.items())
        )
        text = (
            f"traces of different world sizes ({sides}): of two programs, such as a trainer and its"
            " rollouts, or of two runs; analyze each one's traces by themselves"
        )
        notes.append(Note("mixed_world_sizes", text))
    # In a single step the call that joins them may be outside of the recording, and one without
    # arguments may join them.
    elif (
        not any(((trace.calls.group_id < 0) & ~trace.calls.is_message).any() for trace in traces)
        and (text := _describe_parts(called))
        and all(trace.events.match_prefix("ProfilerStep#").sum() > 1 for trace in traces)
    ):
        notes.append(Note("separate_ranks", text))
    return notes


def _describe_parts(called: Mapping[int, Collection[tuple[int, ...]]]) -> str:
    """What is known of ranks that fall into parts without a common group; "" if all have one, or
    some communicate with no other rank, as independent ones do."""
    parts: list[set[int]] = []
    for groups in called.values():
        for ranks in groups:
            joined = [part for part in parts if part & {*ranks}]
            parts = [part for part in parts if part not in joined]
            parts.append({*ranks}.union(*joined))
    recorded = sorted(sorted(part & {*called}) for part in parts if len(part) > 1)
    recorded = [part for part in recorded if part]
    if len(recorded) < 2 or len({rank for part in recorded for rank in part}) < len(called):
        return ""
    sides = "; ".join(f"ranks {units.format_number_list(part)}" for part in recorded)
    return (
        f"no call joins these parts of the recording ({sides}): their steps are compared by their"
        " numbers; of two programs, analyze each one's traces by themselves"
    )


def _drop_stale_ranks(
    traces: Sequence[RankTrace], spec: RunSpec | None
) -> tuple[Sequence[RankTrace], list[Note]]:
    """The traces without stale files of an earlier, larger run in the same folder."""
    if spec is None:
        return traces, []
    text = f"its rank is outside this run of {spec.world_size} ranks: file of an older run, ignored"
    notes = [
        Note("stale_rank", f"{trace.source.name}: {text}", trace.rank)
        for trace in traces
        if trace.rank >= spec.world_size
    ]
    return [trace for trace in traces if trace.rank < spec.world_size], notes


def _fill_group_members(traces: Sequence[RankTrace]) -> Sequence[RankTrace]:
    """The traces, with ranks filled in for groups that are known only by identity.

    Such a group (an NCCL communicator in an Nsight export) has the same name on all its members, so
    its ranks are known if the traces of all ranks are present.
    """
    # With a rank missing, the members that are here may not be all.
    if len(traces) < max(trace.world_size for trace in traces):
        return traces
    members: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        for name in {group.name for group in trace.groups if not group.ranks}:
            members[name].append(trace.rank)
    filled = []
    for trace in traces:
        if not all(group.ranks for group in trace.groups):
            groups = tuple(
                group if group.ranks else Group(group.name, tuple(sorted(members[group.name])), "")
                for group in trace.groups
            )
            trace = replace(trace, groups=groups)
        filled.append(trace)
    return filled


_DRIFT = 20e-6
"""The drift of two hosts' clocks that is allowed for: quartz is specified to 10 ppm or so each."""


def _complete_traces(
    traces: Sequence[RankTrace], records: Sequence[RankRecord], spec: RunSpec | None
) -> list[RankTrace]:
    """The traces with what their records know of the end of the recording and of the hosts' clocks,
    with the role of run.json, and with its hosts if they name none, as those of torch before 2.12.
    """
    record_of = {record.rank.rank: record for record in records}
    host_of = {rank.rank: rank.host for rank in spec.ranks} if spec else {}
    # One rank of each host probed the clock of rank 0's, which is 0 from itself.
    probe_of = {record.rank.host: record.clocks[-1] for record in records if record.clocks}
    if probe_of and 0 in record_of:
        probe_of.setdefault(record_of[0].rank.host, ClockProbe(0, 0, 0))
    completed = []
    for trace in traces:
        changes: dict[str, Any] = {"role": spec.role if spec else ""}
        if record := record_of.get(trace.rank):
            changes["device_stopped_step"] = record.device_stopped_step
            changes["end_step"] = record.end_step
        if not trace.host:
            changes["host"] = host_of.get(trace.rank, "")
        if probe := probe_of.get(changes.get("host", trace.host)):
            # The answer left rank 0 somewhere within the round trip, and clocks drift since then.
            since_ns = abs(trace.t0_unix_ns - probe.at_unix_ns) if probe.round_trip_ns else 0
            within_ns = probe.round_trip_ns // 2 + round(since_ns * _DRIFT)
            changes["probed_clock"] = ProbedClock(probe.offset_ns, within_ns)
        completed.append(replace(trace, **changes))
    return completed


_FARTHEST_APART_NS = 10**16
"""About 116 days: clocks of one run that differ by more do not count from the same time."""


def _place_clocks(traces: Sequence[RankTrace]) -> tuple[Sequence[RankTrace], list[Note]]:
    """Traces whose times count from 0, because their file lacks the time base that others have,
    begin where the others do."""
    latest_ns = max(trace.t0_unix_ns for trace in traces)
    lacking = {t.rank for t in traces if latest_ns - t.t0_unix_ns > _FARTHEST_APART_NS}
    if not lacking:
        return traces, []
    others_ns = min(trace.t0_unix_ns for trace in traces if trace.rank not in lacking)
    shift_ns = others_ns - min(trace.t0_unix_ns for trace in traces if trace.rank in lacking)
    text = "the times of the file count from 0, unlike those of other ranks: its begin is a guess"
    placed = [
        replace(trace, t0_unix_ns=trace.t0_unix_ns + shift_ns) if trace.rank in lacking else trace
        for trace in traces
    ]
    return placed, [Note("no_clock", text, rank, Lack.CLOCK) for rank in sorted(lacking)]

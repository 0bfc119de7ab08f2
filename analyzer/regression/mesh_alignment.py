"""Runs whose meshes were inferred from their calls, and differ because the calls do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from stepsplit.analyzer.regression.compare import CallKind, map_axes, rename_group
from stepsplit.analyzer.regression.metrics import (
    BucketTime,
    CallMetrics,
    RunMetrics,
    Value,
    has_stated_mesh,
)
from stepsplit.analyzer.regression.samples import BANDWIDTH
from stepsplit.collectors.formats.run_spec import Mesh


def align_meshes(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> tuple[list[RunMetrics], list[RunMetrics]]:
    """Both sides with the axes of one run, in which groups of the same ranks are on the same axis.

    A mesh that is stated or named is that of the job, else the baseline's is. Runs with another
    stated mesh, or with an axis whose groups are not those of an axis of it, stay as they are.
    """
    runs = [*baseline, *candidate]
    known = [run for run in runs if run.setup.mesh is not None]
    reference = next((run for run in known if has_stated_mesh(run.setup)), next(iter(known), None))
    if reference is None:
        return list(baseline), list(candidate)
    aligned = [
        run
        if run.setup.mesh == reference.setup.mesh or has_stated_mesh(run.setup)
        else _take_axes(run, reference)
        for run in runs
    ]
    return aligned[: len(baseline)], aligned[len(baseline) :]


def _take_axes(run: RunMetrics, reference: RunMetrics) -> RunMetrics:
    """The run with the reference's mesh, if the groups of all its axes are those of axes of it."""
    words = (reference.setup.mesh or "").split()
    mesh = Mesh.of(dict(zip(words[::2], map(int, words[1::2]), strict=True)))
    if run.setup.world_size != mesh.world_size or not run.groups:
        return run
    names = map_axes(mesh, run.groups)
    if names is None:
        return run
    # Several axes of the run may be one of the reference: their rows are added up.
    times: dict[tuple[str, str | None], int] = defaultdict(int)
    for row in run.times:
        times[row.bucket, names.get(row.axis or "", row.axis)] += row.mean_ns
    same: dict[CallKind, list[CallMetrics]] = defaultdict(list)
    for call in run.calls or ():
        kind = (names.get(call.axis, call.axis), call.op, call.dtype, call.message_bytes)
        same[kind].append(call)
    calls = tuple(
        CallMetrics(
            *kind,
            sum(one.calls for one in rows),
            any(one.varies for one in rows),
            int(median(one.transfer_ns for one in rows)),
            int(median(one.wait_ns for one in rows)),
        )
        for kind, rows in same.items()
    )
    values: dict[str, float] = {}
    for value in run.values:
        metric, *rest = value.metric.split(".")
        name = ".".join((metric, *(names.get(part, part) for part in rest)))
        if name in values and metric == BANDWIDTH:  # a rate: the slower one limits the axis
            values[name] = min(values[name], value.value)
        else:
            values[name] = values.get(name, 0.0) + value.value
    return replace(
        run,
        setup=replace(run.setup, mesh=reference.setup.mesh),
        calls=None if run.calls is None else calls,
        times=tuple(BucketTime(*key, mean_ns) for key, mean_ns in times.items()),
        values=tuple(Value(*each) for each in values.items()),
        blame=tuple(replace(row, axis=names.get(row.axis or "", row.axis)) for row in run.blame),
        groups=tuple(replace(group, **rename_group(group, names, mesh)) for group in run.groups),
    )

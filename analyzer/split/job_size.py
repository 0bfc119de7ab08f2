"""The number of ranks of a job: stated, recorded, or only bounded from below."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.trace import RankTrace
from stepsplit.collectors.formats.run_spec import Mesh, RunSpec


class JobSize(Struct, frozen=True):
    """The number of ranks of a job; the least that the recording allows unless it is known."""

    ranks: int
    is_known: bool


def find_job_size(
    spec: RunSpec | None, traces: Sequence[RankTrace], mesh: Mesh | None = None
) -> JobSize:
    """The size that run.json says, else that of the traces that say it, else of the stated mesh.

    Without any of them, traces that are numbered from 0 without a gap, and call no group of others,
    are taken for all. Raises UsageError if the stated mesh is of another size, or a smaller one
    than the recording allows.
    """
    if spec is not None:
        size, is_stated = spec.world_size, True
    else:
        size = max(trace.world_size for trace in traces)
        is_stated = any(trace.states_size for trace in traces)
    if mesh is not None and (mesh.world_size < size or (is_stated and mesh.world_size != size)):
        why = f"the job has {size}; state a mesh of {size}, or none"
        if not is_stated:
            why = (
                f"the numbers in the recording need {size}; state a mesh of at least {size}, or"
                " name the files by their ranks in the mesh"
            )
        raise UsageError(f"stated mesh {mesh.format()} has {mesh.world_size} ranks, but {why}")
    if mesh is not None:
        return JobSize(mesh.world_size, True)
    return JobSize(size, is_stated or {trace.rank for trace in traces}.issuperset(range(size)))

"""Whether a RUN.toml is of the recording, and what of a recording the model does not mean."""

from __future__ import annotations

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import Layout
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.report import ComparedStage
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors.run_spec import RunSpec

_DATA = ("dp_replicate", "dp_shard")


def disagreements(
    layout: Layout, spec: RunSpec | None, found: RunSplit, where: str
) -> tuple[str, ...]:
    """Where the layout of the RUN.toml is another than the recording's, in a line.

    where names the RUN.toml. Raises UsageError for one of other ranks or stages: nothing of it
    could be held against the recording.
    """
    _same_ranks(layout, spec, found, where)
    _same_stages(layout, found, where)
    mesh = found.layout.mesh
    if mesh is None:
        return ()
    data = mesh.size(_DATA[0]) * mesh.size(_DATA[1])
    ran = {"tp": mesh.size("tp"), "cp": mesh.size("cp"), "dp": data}
    stated = {axis: int(getattr(layout, axis)) for axis in ran}
    odd = [axis for axis in ran if ran[axis] != stated[axis]]
    if not odd:
        return ()
    return (f"{where} has {_sizes(stated, odd)}, the recording {_sizes(ran, odd)} (by "
            f"{found.layout.source}): the model is of another layout than what ran",)  # fmt: skip


def doubts(found: RunSplit, prediction: Prediction, stages: int, shown: ComparedStage) -> list[str]:
    """What the recording cannot tell of the shown step and of as many stages as it has."""
    said = []
    if shown.kind != "full":
        said.append(f"stage {shown.stage} has no full step: step {shown.step} of rank "
                    f"{shown.rank}, which is {shown.kind}, stands in for one")  # fmt: skip
    if stages < len(prediction.splits):
        said.append(f"{stages} of {len(prediction.splits)} stages are in the recording")
    estimated = [step.estimated for rank in found.ranks for step in rank.steps]
    if any(estimated):
        said.append(f"{sum(estimated)} of {len(estimated)} splits are estimated for want of ranks: "
                    "what their calls moved and waited is told by calls like them")  # fmt: skip
    return said


def _same_ranks(layout: Layout, spec: RunSpec | None, found: RunSplit, where: str) -> None:
    """A trace alone that communicates and names no ranks may be of any number of them."""
    ran = spec.world_size if spec else max(rank.trace.world_size for rank in found.ranks)
    stated = layout.world_size
    communicates = any(len(rank.trace.calls) for rank in found.ranks)
    if stated == ran or (spec is None and ran == 1 and communicates):
        return
    raise UsageError(f"{where} is of {_ranks(stated)} ({_axes(layout)}), the recording of {ran}: "
                     "mend [parallel]")  # fmt: skip


def _same_stages(layout: Layout, found: RunSplit, where: str) -> None:
    ran = 1 + max(found.layout.stage_of.values(), default=0)
    if layout.pp != ran:
        told = f"shows {ran}" if ran > 1 else "shows no pipeline"
        raise UsageError(f"{where} has {layout.pp} stages, the recording {told}: mend pp in "
                         "[parallel], or record a run.json that states the mesh")  # fmt: skip


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _axes(layout: Layout) -> str:
    sizes = {axis: int(getattr(layout, axis)) for axis in ("tp", "pp", "cp", "dp")}
    return _sizes(sizes, [axis for axis in sizes if sizes[axis] > 1 or axis == "dp"])


def _sizes(sizes: dict[str, int], axes: list[str]) -> str:
    return " ".join(f"{axis} {sizes[axis]}" for axis in axes)

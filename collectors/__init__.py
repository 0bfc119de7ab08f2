"""In or beside the training job: what ran, and the record of it. Python and torch suffice."""

from typing import TYPE_CHECKING, Any

from stepsplit.collectors.run_spec import Mesh, ModelSpec, RunSpec, Training

if TYPE_CHECKING:
    from stepsplit.collectors.profiler import ProfiledRun, profile_run

__all__ = ["Mesh", "ModelSpec", "ProfiledRun", "RunSpec", "Training", "profile_run"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and readers of run.json do without it.
    if name in ("ProfiledRun", "profile_run"):
        from stepsplit.collectors import profiler

        return getattr(profiler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

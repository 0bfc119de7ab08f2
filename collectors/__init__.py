"""Recording of a training job: `profile_run` and the types of run.json.

Needs only the standard library and torch.
"""

from typing import TYPE_CHECKING, Any

from stepsplit.collectors.formats.run_spec import (
    GroupInfo,
    HostInfo,
    Mesh,
    ModelSpec,
    RankInfo,
    RunSpec,
    Training,
)

if TYPE_CHECKING:
    from stepsplit.collectors.probes.spans import mark
    from stepsplit.collectors.profiler import ProfiledRun, profile_run

__all__ = [
    "GroupInfo",
    "HostInfo",
    "Mesh",
    "ModelSpec",
    "ProfiledRun",
    "RankInfo",
    "RunSpec",
    "Training",
    "mark",
    "profile_run",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and readers of run.json do not need it.
    if name in ("ProfiledRun", "profile_run"):
        from stepsplit.collectors import profiler

        return getattr(profiler, name)
    if name == "mark":
        from stepsplit.collectors.probes.spans import mark

        return mark
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The environment of a recorded command: the agent, NCCL's logs, the Flight Recorder and Kineto."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.probes.nccl_log import (
    build_inspector_environment,
    build_log_environment,
    find_inspector_plugin,
    find_installed_version,
)
from stepsplit.collectors.record.plan import PLAN_VARIABLE, RecordPlan

_FLIGHT_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The size of torch's Flight Recorders; the first name is of torch 2.8 and overrides the second."""

_FLIGHT_ENTRIES = "20000"


@dataclass(frozen=True, slots=True)
class NcclLogs:
    """NCCL logs to enable besides the startup log: a line per call, and NCCL's Inspector."""

    calls: bool = False
    inspector: bool = False


def build_environment(
    existing: Mapping[str, str], plan: RecordPlan, nccl: NcclLogs
) -> dict[str, str]:
    """Variables to add to the job's environment; variables set by the user are not changed."""
    out, version = Path(plan.out), find_installed_version()
    variables = build_log_environment(out, version, nccl.calls)
    if not set(_FLIGHT_SIZES) & set(existing):
        variables[_choose_flight_size()] = _FLIGHT_ENTRIES
    variables |= build_kineto_environment(existing)
    if nccl.inspector:
        plugin = find_inspector_plugin(existing)
        if plugin is None:
            raise CollectError(
                "libnccl-profiler-inspector.so was not found; add its folder to LD_LIBRARY_PATH"
            )
        variables |= build_inspector_environment(out, version, plugin)
    # The user reads these logs: where they go and what is in them stays as it is.
    if "NCCL_DEBUG" in existing:
        variables = {name: value for name, value in variables.items() if "NCCL_DEBUG" not in name}
    # An empty part of the user's path is the current folder.
    path = [str(SITE), *filter(None, [existing.get("PYTHONPATH")])]
    added = {name: value for name, value in variables.items() if name not in existing}
    return added | {PLAN_VARIABLE: plan.format_json(), "PYTHONPATH": os.pathsep.join(path)}


def _choose_flight_size() -> str:
    """The variable that this Python's torch reads: before 2.8 it ignores the new name."""
    try:
        version = _parse_version(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return _FLIGHT_SIZES[0]
    return _FLIGHT_SIZES[version < _RENAMED_FLIGHT_SIZE]


# torch 2.8 reads TORCH_FR_BUFFER_SIZE, and the name before as well.
_RENAMED_FLIGHT_SIZE = (2, 8)

SITE = Path(__file__).parents[1] / "site"

_SYSTEM_KINETO_CONFIG = Path("/etc/libkineto.conf")

# Before CUDA 12.6, CUDA graphs crash when CUPTI is detached.
_SAFE_TEARDOWN = (12, 6)


def build_kineto_environment(
    existing: Mapping[str, str], cuda: str | None = None
) -> dict[str, str]:
    """Variables for Kineto, unless the user has set them or has a tool that would suffer.

    KINETO_CONFIG: larger buffers for GPU records. It is read when the first profiler of a process
    is prepared; with KINETO_USE_DAEMON, Kineto takes the daemon's configuration only without it.

    TEARDOWN_CUPTI, for CUDA 12.6 and later (`cuda` is torch's version): CUPTI is detached after the
    recording. Otherwise steps can stay 10 to 20 % slower for the rest of the job
    (pytorch/pytorch#144455); before 12.6, CUDA graphs crash when it is detached. Not if another
    tool is injected, which would lose CUPTI too.
    """
    variables = {}
    configured = {"KINETO_CONFIG", "KINETO_USE_DAEMON"} & set(existing)
    if not configured and not _SYSTEM_KINETO_CONFIG.exists():
        variables["KINETO_CONFIG"] = str(SITE / "kineto.conf")
    taken = {"TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT", "CUDA_INJECTION64_PATH"} & set(existing)
    if not taken and _parse_version(cuda) >= _SAFE_TEARDOWN:
        variables["TEARDOWN_CUPTI"] = "1"
    return variables


def _parse_version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(".") if part.isdecimal())

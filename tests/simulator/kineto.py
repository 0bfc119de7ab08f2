"""The traces that torch.profiler would write of a simulated run, one file a rank."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.program import Job, ProcessGroup, Scenario
from simulator.ran import RankRun, Run
from simulator.recorded import recorded
from simulator.run_json import write_run_json
from simulator.style import WHOLE, Style
from simulator.trace_events import START_NS as START_NS, TraceEvents

BASE_NS = 1_790_000_000_000_000_000
_Entry = dict[str, Any]


def write_recording(
    scenario: Scenario,
    run: Run,
    folder: Path,
    style: Style = WHOLE,
    ranks: Collection[int] | None = None,
) -> tuple[Path, ...]:
    """Writes rank{rank}_trace.json.gz of these ranks (None: of all), by the clocks of their hosts.

    Returns the traces; run.json, if the style has it, lies beside them. The same run gives the same
    bytes. A batch of several messages is one kernel that states nothing; record_param_comms before
    its launch tell of them, as torch does it.
    """
    scenario = replace(scenario, job=_described(scenario.job, style))
    left = recorded(run, style, scenario.seed)
    paths = []
    for rank in range(len(left.ranks)) if ranks is None else sorted(ranks):
        path = folder / f"rank{rank}_trace.json.gz"
        body = _body(scenario, rank, left.ranks[rank], style)
        path.write_bytes(gzip.compress(json.dumps(body).encode(), 1, mtime=0))
        paths.append(path)
    if style.run_json:
        write_run_json(scenario.job, folder)
    return tuple(paths)


def _described(job: Job, style: Style) -> Job:
    if style.descriptions == "as_is":
        return job
    return replace(job, groups=tuple(replace(g, description="undefined") for g in job.groups))


def _body(scenario: Scenario, rank: int, ran: RankRun, style: Style) -> _Entry:
    return {
        "schemaVersion": 1,
        "distributedInfo": _distributed(scenario.job, rank, style),
        "deviceProperties": [{"id": 0, "name": "Simulated GPU"}],
        "host_name": scenario.job.hosts[rank],
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": TraceEvents(scenario, rank, ran, style).all(),
    }


def _distributed(job: Job, rank: int, style: Style) -> _Entry:
    """The rank's groups; where nothing is said of calls, only the default group."""
    own = [group for group in job.groups if rank in group.ranks]
    if style.missing == "no_args":
        own = [group for group in own if len(group.ranks) == len(job.programs)][:1]
    return {
        "backend": "nccl",
        "rank": rank,
        "world_size": len(job.programs),
        "pg_config": [_config(group) for group in own],
    }


def _config(group: ProcessGroup) -> _Entry:
    return {"pg_name": group.name, "pg_desc": group.description, "ranks": list(group.ranks)}

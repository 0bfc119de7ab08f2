"""run.json of a simulated job: what the collectors would have seen of it."""

from __future__ import annotations

import json
from pathlib import Path

from simulator.program import Job


def write_run_json(job: Job, folder: Path) -> Path:
    """Writes run.json, which states the mesh, the groups and the schedule, into the folder."""
    training = {"microbatches": job.microbatches or None, "schedule": job.schedule or None}
    body = {
        "schema": "stepsplit.run/1",
        "name": job.name,
        "world_size": len(job.programs),
        "backend": "nccl",
        "mesh": [{"axis": axis, "size": size} for axis, size in job.mesh],
        "training": training,
        "groups": [
            {"name": group.name, "description": group.description, "ranks": list(group.ranks)}
            for group in job.groups
        ],
    }
    path = folder / "run.json"
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path

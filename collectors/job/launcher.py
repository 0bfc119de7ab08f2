"""What the launcher of a job (torchrun, Slurm, MPI) says of this process, from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
"""Slurm's tasks of each node, as in "8(x3),4"; SLURM_NODEID is the number of this one."""

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

_JOB = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank of a job, and its place on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started the process as a rank."""
    return any(environment.get(name, "").isdigit() for name in _RANK)


def read_identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """The identity set by torchrun, Slurm or MPI, in this order; else a job of one rank."""
    world_size = max(1, _read_number(environment, _SIZE, 1))
    local_size = _read_number(environment, _LOCAL_SIZE, 0)
    return Identity(
        rank=_read_number(environment, _RANK, 0),
        world_size=world_size,
        local_rank=_read_number(environment, _LOCAL_RANK, 0),
        local_world_size=local_size or _count_slurm_tasks(environment, world_size) or world_size,
    )


def count_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started the ranks of the job again."""
    return _read_number(environment, ("TORCHELASTIC_RESTART_COUNT",), 0)


def read_job_name(environment: Mapping[str, str] = os.environ) -> str:
    """A name that all ranks of the job share and other jobs do not have."""
    parts = [environment[name] for name in _JOB if environment.get(name)]
    return ":".join(parts) or f"pid {os.getpid()}"


_LABEL_VARIABLES = ("SLURM_JOB_ID",)
_LABEL_ATTRIBUTES = re.compile(r"nemo\.run\.id|dl\.[\w.-]+")
"""NeMo-Run's name of a run and OpenTelemetry's of a training, such as dl.tensor_parallel.size."""

_MOST_LABELS, _LABEL_LENGTH = 16, 200


def read_labels(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """(name, value) of what a scheduler or OpenTelemetry calls the job, by which a run is
    found again in other tools: SLURM_JOB_ID, nemo.run.id and dl.*.

    The resource is that of OTEL_RESOURCE_ATTRIBUTES: "key=value,other=value", percent-encoded.
    """
    pairs = [(name, environment.get(name, "")) for name in _LABEL_VARIABLES]
    for part in environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, _, value = part.partition("=")
        if _LABEL_ATTRIBUTES.fullmatch(name.strip()):
            pairs.append((name.strip(), unquote(value.strip())))
    labels = {name[:_LABEL_LENGTH]: value[:_LABEL_LENGTH] for name, value in pairs if value}
    return tuple(labels.items())[:_MOST_LABELS]


def _count_slurm_tasks(environment: Mapping[str, str], world_size: int) -> int:
    """Slurm's tasks on this node; 0 if they are not the ranks of the job, or not known."""
    text = next((environment[name] for name in _TASKS_PER_NODE if environment.get(name)), "")
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    counts = [int(p[1]) for p in parts if p for _ in range(int(p[2] or 1))]
    node = _read_number(environment, ("SLURM_NODEID",), 0)
    # Under torchrun Slurm has one task for each node, which starts the ranks: its tasks are then no
    # ranks.
    return counts[node] if sum(counts) == world_size and node < len(counts) else 0


def _read_number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    values = (environment.get(name, "") for name in names)
    return next((int(each) for each in values if each.isdigit()), default)

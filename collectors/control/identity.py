"""Which rank of which job this process is, by what its launcher has put into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_JOB = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank of a job, and its place on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def identity(environment: Mapping[str, str] = os.environ) -> Identity:
    """As torchrun, Slurm or MPI tell, in this order; the only rank where none does."""
    world_size = max(1, _number(environment, _SIZE, 1))
    return Identity(
        rank=_number(environment, _RANK, 0),
        world_size=world_size,
        local_rank=_number(environment, _LOCAL_RANK, 0),
        local_world_size=max(1, _number(environment, _LOCAL_SIZE, world_size)),
    )


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has made the process a rank."""
    return any(environment.get(name, "").isdigit() for name in _RANK)


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """What the ranks of a job have in common, and those of another do not."""
    told = [environment[name] for name in _JOB if environment.get(name)]
    return ":".join(told) or f"pid {os.getpid()}"


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    told = (environment.get(name, "") for name in names)
    return next((int(each) for each in told if each.isdigit()), default)

"""This process's place in torch's process groups."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import distributed

from stepsplit.collectors.formats.run_spec import GroupInfo
from stepsplit.collectors.job.launcher import read_identity


def read_job() -> tuple[int, int, str]:
    """(rank, world_size, backend) of this process; backend "none" without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        # Take the rank from the launcher's environment, so that file names do not collide.
        identity = read_identity()
        return identity.rank, identity.world_size, "none"
    return distributed.get_rank(), distributed.get_world_size(), _find_backend()


def _find_backend() -> str:
    """The backend for the device that this rank trains on, such as "gloo".

    torch calls it "undefined" if the script named none, or "cpu:gloo,cuda:nccl" if it named two.
    """
    stated = str(distributed.get_backend())
    get_config = getattr(distributed, "get_backend_config", None)
    if get_config is None or (stated != "undefined" and ":" not in stated):
        return stated
    pairs = (pair.partition(":") for pair in str(get_config()).split(","))
    backends = {device: backend for device, _, backend in pairs if backend}
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    return backends.get(device) or next(iter(backends.values()), stated)


def list_groups() -> tuple[GroupInfo, ...]:
    """The process groups of this rank; empty if torch has moved its private registry."""
    world = getattr(getattr(distributed, "distributed_c10d", None), "_world", None)
    names = getattr(world, "pg_names", {})
    members = getattr(world, "pg_group_ranks", {})
    return tuple(
        GroupInfo(str(name), str(getattr(group, "group_desc", "")), tuple(members[group]))
        for group, name in names.items()
        if members.get(group)
    )


def count_calls() -> int:
    """The collectives called so far on this rank, the sum of its groups' sequence numbers."""
    world = getattr(getattr(distributed, "distributed_c10d", None), "_world", None)
    groups = [group for group, ranks in getattr(world, "pg_group_ranks", {}).items() if ranks]
    calls = 0
    for group in groups:
        read = getattr(group, "_get_sequence_number_for_group", None)
        # Some backends keep no sequence numbers, and raise.
        with suppress(RuntimeError):
            calls += 0 if read is None else int(read())
    return calls

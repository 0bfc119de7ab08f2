"""The description of each rank of a job, exchanged through its store instead of by collectives."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stepsplit.collectors.formats.run_spec import GroupInfo, HostInfo, RankInfo, decode_group
from stepsplit.collectors.job.job_store import get_store, open_own_store
from stepsplit.collectors.job.launcher import read_identity
from stepsplit.collectors.job.process_groups import list_groups, read_job

_PRESENCE_POLL_S = 0.1

# Keys of one multi_get of the store.
_RANKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RankDescription:
    """One rank's description: its place, its host, and the groups of which it is first member."""

    rank: RankInfo
    groups: tuple[GroupInfo, ...]
    machine: HostInfo


def describe_rank() -> RankDescription:
    """The description of this rank."""
    rank, _, _ = read_job()
    device = "cpu"
    # Do not initialize CUDA in a job that trains on the CPU.
    if torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        device = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    info = RankInfo(rank, read_identity().local_rank, socket.gethostname(), os.getpid(), device)
    # Only a group's first member describes it: at 10,000 ranks, all members would send 1 GB.
    led = tuple(group for group in list_groups() if group.ranks[0] == rank)
    return RankDescription(info, led, read_host_info())


def publish(run: str, description: RankDescription) -> None:
    """Writes the description to the job's store, if it has one."""
    store = get_store()
    if store is not None:
        store.set(_build_store_key(run, description.rank.rank), json.dumps(asdict(description)))


def has_other_ranks() -> bool:
    """Whether other ranks may publish descriptions."""
    return get_store() is not None and read_job()[1] > 1


def collect_descriptions(
    run: str, known: Sequence[RankDescription], world_size: int, timeout_s: float
) -> tuple[RankDescription, ...]:
    """The known descriptions and those published within the timeout, sorted by rank.

    For background threads and the end of the job: it uses a separate connection to the store, and
    asks for many ranks at once.
    """
    descriptions = {each.rank.rank: each for each in known}
    missing = [rank for rank in range(world_size) if rank not in descriptions]
    store, deadline = open_own_store() or get_store(), time.monotonic() + timeout_s
    while store is not None and missing:
        for first in range(0, len(missing), _RANKS_AT_ONCE):
            batch = missing[first : first + _RANKS_AT_ONCE]
            descriptions |= _fetch_descriptions(store, run, batch)
        missing = [rank for rank in missing if rank not in descriptions]
        if time.monotonic() >= deadline:
            break
        if missing:
            time.sleep(_PRESENCE_POLL_S)
    return tuple(descriptions[rank] for rank in sorted(descriptions))


def _fetch_descriptions(store: Any, run: str, ranks: Sequence[int]) -> dict[int, RankDescription]:
    """Those of the ranks that have published theirs: two calls if all have, else by halves.

    check() never blocks the store, unlike a get of a missing key.
    """
    keys = [_build_store_key(run, rank) for rank in ranks]
    if store.check(keys):
        values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        found = {}
        for rank, text in zip(ranks, values, strict=True):
            body = json.loads(text)
            groups = tuple(map(decode_group, body["groups"]))
            machine = HostInfo(**body["machine"])
            found[rank] = RankDescription(RankInfo(**body["rank"]), groups, machine)
        return found
    if len(ranks) == 1:
        return {}
    # check() says only whether all keys are there: by halves, the missing ones of many ranks are
    # found in few calls.
    half = len(ranks) // 2
    return _fetch_descriptions(store, run, ranks[:half]) | _fetch_descriptions(
        store, run, ranks[half:]
    )


def _build_store_key(run: str, rank: int) -> str:
    return f"stepsplit/{run}/{rank}"


# The host of a rank.


def read_host_info() -> HostInfo:
    """This host; its GPUs are read only if the process already uses CUDA."""
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return HostInfo(
        host=socket.gethostname(),
        # ARM has no model name there.
        cpu=next(models, platform.machine()),
        cores=os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=torch.cuda.get_device_name() if gpus else None,
        gpus=gpus,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
    )

"""Which ranks run where and in which groups: told through the job's store, not by collectives."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed

from stepsplit.collectors.driver import driver_version
from stepsplit.collectors.machine import machine
from stepsplit.collectors.run_spec import GroupInfo, HostInfo, RankInfo, group_of

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Presence:
    """What one rank tells of itself: where it runs, on what, and the groups that it leads."""

    rank: RankInfo
    groups: tuple[GroupInfo, ...]
    machine: HostInfo


def job() -> tuple[int, int, str]:
    """(rank, world_size, backend) of this process; backend "none" without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        # Under a launcher the environment still tells ranks apart, so that files never collide.
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), "none"
    return distributed.get_rank(), distributed.get_world_size(), str(distributed.get_backend())


def presence() -> Presence:
    """What this rank tells of itself."""
    rank, _, _ = job()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    info = RankInfo(rank, local_rank, socket.gethostname(), os.getpid(), _device())
    # Its first member tells of a group: at 10,000 ranks, all members would tell a gigabyte.
    led = tuple(group for group in groups() if group.ranks[0] == rank)
    return Presence(info, led, machine())


def publish(run: str, told: Presence) -> None:
    """Leaves word in the store of the job, where it has one."""
    store = _store()
    if store is not None:
        store.set(_key(run, told.rank.rank), json.dumps(asdict(told)))


def collect(run: str, own: Presence, world_size: int, timeout_s: float) -> tuple[Presence, ...]:
    """What the ranks told, by rank; those that tell nothing within the timeout are absent."""
    store, deadline = _store(), time.monotonic() + timeout_s
    told = {own.rank.rank: own}
    missing = [rank for rank in range(world_size) if rank not in told]
    while store is not None and missing:
        # Asking whether a key is there, again and again, never holds the store's lock for long.
        for rank in [rank for rank in missing if store.check([_key(run, rank)])]:
            told[rank] = _read(store.get(_key(run, rank)))
        missing = [rank for rank in missing if rank not in told]
        if time.monotonic() >= deadline:
            break
        if missing:
            time.sleep(_POLL_S)
    return tuple(told[rank] for rank in sorted(told))


def tell(key: str, word: str) -> None:
    """Leaves a word for other ranks to hear, where the job has a store."""
    store = _store()
    if store is not None:
        store.set(f"stepsplit/{key}", word)


def next_number(key: str) -> int:
    """1 for who asks first in the job, 2 for the next. Raises RuntimeError without a store."""
    store = _own_store()
    if store is None:
        raise RuntimeError("the job has no store")
    return int(store.add(f"stepsplit/{key}", 1))


def heard(key: str, timeout_s: float, poll_s: float) -> str | None:
    """The word left under the key; None where nobody leaves one in time.

    For threads beside the training: it asks over a connection of its own.
    """
    store, deadline = _own_store(), time.monotonic() + timeout_s
    while store is not None and time.monotonic() < deadline:
        if store.check([f"stepsplit/{key}"]):
            return str(store.get(f"stepsplit/{key}").decode())
        time.sleep(poll_s)
    return None


def versions() -> tuple[tuple[str, str], ...]:
    """The versions of what ran."""
    seen = [("python", platform.python_version()), ("torch", str(torch.__version__))]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        seen += [("cuda", str(torch.version.cuda)), ("nccl", nccl)]
        driver = driver_version()
        seen += [] if driver is None else [("driver", driver)]
    return tuple(seen)


def _device() -> str:
    # A job that trains on its CPU beside a GPU never wakes it.
    if not torch.cuda.is_initialized():
        return "cpu"
    index = torch.cuda.current_device()
    return f"cuda:{index} {torch.cuda.get_device_name(index)}"


def groups() -> tuple[GroupInfo, ...]:
    """The groups that this rank is in; none where torch has moved its private registry."""
    world = getattr(getattr(distributed, "distributed_c10d", None), "_world", None)
    names = getattr(world, "pg_names", {})
    members = getattr(world, "pg_group_ranks", {})
    return tuple(
        GroupInfo(str(name), str(getattr(group, "group_desc", "")), tuple(members[group]))
        for group, name in names.items()
        if members.get(group)
    )


def _store() -> Any | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def _own_store() -> Any | None:
    """The store over a connection that no other thread waits on; None where it can have none."""
    clone = getattr(_store(), "clone", None)
    return None if clone is None else clone()


def _key(run: str, rank: int) -> str:
    return f"stepsplit/{run}/{rank}"


def _read(text: bytes) -> Presence:
    body = json.loads(text)
    led = tuple(map(group_of, body["groups"]))
    return Presence(RankInfo(**body["rank"]), led, HostInfo(**body["machine"]))

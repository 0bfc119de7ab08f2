"""Information on the job of a rank: ranks, hosts and groups."""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from stepsplit.collectors.launcher import read_identity
from stepsplit.collectors.run_spec import GroupInfo, HostInfo, RankInfo, decode_group

# Hosts and groups of all ranks, exchanged through the job's store instead of collectives.

_PRESENCE_POLL_S = 0.1

_RANKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RankDescription:
    """One rank's description: its place, its host, and the groups of which it is first member."""

    rank: RankInfo
    groups: tuple[GroupInfo, ...]
    machine: HostInfo


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


def describe_rank() -> RankDescription:
    """The description of this rank."""
    rank, _, _ = read_job()
    info = RankInfo(
        rank, read_identity().local_rank, socket.gethostname(), os.getpid(), _describe_device()
    )
    # Only a group's first member describes it: at 10,000 ranks, all members would send 1 GB.
    led = tuple(group for group in list_groups() if group.ranks[0] == rank)
    return RankDescription(info, led, read_host_info())


def publish(run: str, description: RankDescription) -> None:
    """Writes the description to the job's store, if it has one."""
    store = _store()
    if store is not None:
        store.set(_build_store_key(run, description.rank.rank), json.dumps(asdict(description)))


def has_other_ranks() -> bool:
    """Whether other ranks may publish descriptions."""
    return _store() is not None and read_job()[1] > 1


def collect_descriptions(
    run: str, known: Sequence[RankDescription], world_size: int, timeout_s: float
) -> tuple[RankDescription, ...]:
    """The known descriptions and those published within the timeout, sorted by rank.

    For background threads and the end of the job: it uses a separate connection to the store, and
    asks for many ranks at once.
    """
    descriptions = {each.rank.rank: each for each in known}
    missing = [rank for rank in range(world_size) if rank not in descriptions]
    store, deadline = _own_store() or _store(), time.monotonic() + timeout_s
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
        return dict(zip(ranks, map(_decode_description, values), strict=True))
    if len(ranks) == 1:
        return {}
    half = len(ranks) // 2
    return _fetch_descriptions(store, run, ranks[:half]) | _fetch_descriptions(
        store, run, ranks[half:]
    )


def set_store_value(key: str, value: str) -> None:
    """Sets a value in the job's store for other ranks, if the job has a store."""
    store = _store()
    if store is not None:
        store.set(f"stepsplit/{key}", value)


def increment_counter(key: str) -> int:
    """Increments a counter of the job: 1 for the first call. Raises RuntimeError without store."""
    store = _own_store()
    if store is None:
        raise RuntimeError("the job has no store")
    return int(store.add(f"stepsplit/{key}", 1))


def claim_value(key: str, value: str, is_free: Callable[[str], bool]) -> str:
    """Sets the key unless its value is taken, in one operation, and returns its value then.

    Of ranks that claim it at the same moment one wins, and the others get its value. A job without
    a store that can do this gets its own value. is_free: whether an earlier value may be replaced.
    """
    store, name = _own_store(), f"stepsplit/{key}"
    if store is None:
        return value
    earlier = store.get(name).decode() if store.check([name]) else ""
    if earlier and not is_free(earlier):
        return str(earlier)
    try:
        return str(store.compare_set(name, earlier, value).decode())
    except NotImplementedError:
        return value


def wait_for_value(key: str, timeout_s: float, poll_s: float) -> str | None:
    """Waits for the value of the key in the job's store; None if it is not set in time.

    For background threads: it uses a separate connection to the store.
    """
    found = wait_for_first((key,), timeout_s, poll_s)
    return None if found is None else found[1]


def wait_for_first(keys: Sequence[str], timeout_s: float, poll_s: float) -> tuple[str, str] | None:
    """Waits until one of the keys is set; it and its value, the first in order if several are."""
    store, deadline = _own_store(), time.monotonic() + timeout_s
    while store is not None and time.monotonic() < deadline:
        with _GUARD.poll() as may_ask:
            if not may_ask:
                break
            for key in keys:
                if store.check([f"stepsplit/{key}"]):
                    return key, str(store.get(f"stepsplit/{key}").decode())
        _GUARD.ending.wait(poll_s)
    return None


class SharedValues:
    """Values that the ranks share through the job's store, over a connection of its own.

    For one background thread. No call waits for another rank. Raises RuntimeError if the job has
    no store that can be used from a thread.
    """

    def __init__(self) -> None:
        store = _own_store()
        if store is None:
            raise RuntimeError("the job's store cannot be read from a thread")
        self._store: Any = store

    def write(self, key: str, value: str) -> None:
        """Sets a value; it replaces the earlier one."""
        with _GUARD.poll() as may_ask:
            if may_ask:
                self._store.set(f"stepsplit/{key}", value)

    def read(self, key: str) -> str | None:
        """The value; None if it is not set."""
        name = f"stepsplit/{key}"
        with _GUARD.poll() as may_ask:
            is_set = may_ask and self._store.check([name])
            return str(self._store.get(name).decode()) if is_set else None


def _describe_device() -> str:
    # Do not initialize CUDA in a job that trains on the CPU.
    if not torch.cuda.is_initialized():
        return "cpu"
    index = torch.cuda.current_device()
    return f"cuda:{index} {torch.cuda.get_device_name(index)}"


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
    return sum(_read_sequence_number(group) for group in groups)


def _read_sequence_number(group: Any) -> int:
    read = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return 0 if read is None else int(read())
    except RuntimeError:
        # The backend keeps no sequence numbers.
        return 0


def _store() -> Any | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def _own_store() -> Any | None:
    """The store over a connection of its own; None if the store cannot be cloned."""
    clone = getattr(_store(), "clone", None)
    return None if clone is None else clone()


class _ExitGuard:
    """Keeps threads that poll the store out of it while the process ends.

    A thread that is in torch's C++ when Python ends never gets Python's lock back: it is ended
    there, and C++ aborts the process ("terminate called without an active exception"), after the
    training has finished. At exit this waits a moment for calls in progress, and lets none begin.
    """

    def __init__(self) -> None:
        self.ending = threading.Event()
        self._changed = threading.Condition()
        self._calls = 0
        self._is_registered = False

    @contextmanager
    def poll(self) -> Iterator[bool]:
        """A call of the store by a background thread; whether it may begin."""
        with self._changed:
            if not self._is_registered:
                self._is_registered = True
                atexit.register(self._close)
            may_begin = not self.ending.is_set()
            self._calls += may_begin
        try:
            yield may_begin
        finally:
            with self._changed:
                self._calls -= may_begin
                self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self.ending.set()
            self._changed.wait_for(lambda: not self._calls, _LAST_CALLS_S)


_LAST_CALLS_S = 2.0

_GUARD = _ExitGuard()


def _build_store_key(run: str, rank: int) -> str:
    return f"stepsplit/{run}/{rank}"


def _decode_description(text: bytes) -> RankDescription:
    body = json.loads(text)
    led = tuple(map(decode_group, body["groups"]))
    return RankDescription(RankInfo(**body["rank"]), led, HostInfo(**body["machine"]))


# The host of a rank.


def read_host_info() -> HostInfo:
    """This host; its GPUs are read only if the process already uses CUDA."""
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return HostInfo(
        host=socket.gethostname(),
        cpu=_read_cpu_name(),
        cores=os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=torch.cuda.get_device_name() if gpus else None,
        gpus=gpus,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
    )


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

"""Information on the job of a rank: ranks, hosts, groups, GPU, driver and clock."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from stepsplit.collectors.rank_record import ClockProbe, GpuState
from stepsplit.collectors.run_spec import GroupInfo, HostInfo, RankInfo, group_of

# Hosts and groups of all ranks, exchanged through the job's store instead of collectives.

_PRESENCE_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Presence:
    """One rank's description: its place, its host, and the groups of which it is first member."""

    rank: RankInfo
    groups: tuple[GroupInfo, ...]
    machine: HostInfo


def job() -> tuple[int, int, str]:
    """(rank, world_size, backend) of this process; backend "none" without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        # Take the rank from the launcher's environment, so that file names do not collide.
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), "none"
    return distributed.get_rank(), distributed.get_world_size(), str(distributed.get_backend())


def presence() -> Presence:
    """The description of this rank."""
    rank, _, _ = job()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    info = RankInfo(rank, local_rank, socket.gethostname(), os.getpid(), _device())
    # Only a group's first member describes it: at 10,000 ranks, all members would send 1 GB.
    led = tuple(group for group in groups() if group.ranks[0] == rank)
    return Presence(info, led, machine())


def publish(run: str, told: Presence) -> None:
    """Writes the description to the job's store, if it has one."""
    store = _store()
    if store is not None:
        store.set(_key(run, told.rank.rank), json.dumps(asdict(told)))


def collect(run: str, own: Presence, world_size: int, timeout_s: float) -> tuple[Presence, ...]:
    """The descriptions published within the timeout, sorted by rank."""
    store, deadline = _store(), time.monotonic() + timeout_s
    told = {own.rank.rank: own}
    missing = [rank for rank in range(world_size) if rank not in told]
    while store is not None and missing:
        # Polling for keys never blocks the store for long, unlike a blocking get.
        for rank in [rank for rank in missing if store.check([_key(run, rank)])]:
            told[rank] = _read(store.get(_key(run, rank)))
        missing = [rank for rank in missing if rank not in told]
        if time.monotonic() >= deadline:
            break
        if missing:
            time.sleep(_PRESENCE_POLL_S)
    return tuple(told[rank] for rank in sorted(told))


def tell(key: str, word: str) -> None:
    """Sets a value in the job's store for other ranks, if the job has a store."""
    store = _store()
    if store is not None:
        store.set(f"stepsplit/{key}", word)


def next_number(key: str) -> int:
    """Increments a counter of the job: 1 for the first call. Raises RuntimeError without store."""
    store = _own_store()
    if store is None:
        raise RuntimeError("the job has no store")
    return int(store.add(f"stepsplit/{key}", 1))


def heard(key: str, timeout_s: float, poll_s: float) -> str | None:
    """Waits for the value of the key in the job's store; None if it is not set in time.

    For background threads: it uses a separate connection to the store.
    """
    store, deadline = _own_store(), time.monotonic() + timeout_s
    while store is not None and time.monotonic() < deadline:
        if store.check([f"stepsplit/{key}"]):
            return str(store.get(f"stepsplit/{key}").decode())
        time.sleep(poll_s)
    return None


def versions() -> tuple[tuple[str, str], ...]:
    """The versions of Python, torch, CUDA, NCCL and the GPU driver."""
    seen = [("python", platform.python_version()), ("torch", str(torch.__version__))]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        seen += [("cuda", str(torch.version.cuda)), ("nccl", nccl)]
        driver = driver_version()
        seen += [] if driver is None else [("driver", driver)]
    return tuple(seen)


def _device() -> str:
    # Do not initialize CUDA in a job that trains on the CPU.
    if not torch.cuda.is_initialized():
        return "cpu"
    index = torch.cuda.current_device()
    return f"cuda:{index} {torch.cuda.get_device_name(index)}"


def groups() -> tuple[GroupInfo, ...]:
    """The process groups of this rank; empty if torch has moved its private registry."""
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
    """The store over a connection of its own; None if the store cannot be cloned."""
    clone = getattr(_store(), "clone", None)
    return None if clone is None else clone()


def _key(run: str, rank: int) -> str:
    return f"stepsplit/{run}/{rank}"


def _read(text: bytes) -> Presence:
    body = json.loads(text)
    led = tuple(map(group_of, body["groups"]))
    return Presence(RankInfo(**body["rank"]), led, HostInfo(**body["machine"]))


# The host of a rank.


def machine() -> HostInfo:
    """This host; its GPUs are read only if the process already uses CUDA."""
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return HostInfo(
        host=socket.gethostname(),
        cpu=_cpu(),
        cores=os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=torch.cuda.get_device_name() if gpus else None,
        gpus=gpus,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if gpus else 0,
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


# The version of the GPU driver, from /proc and /sys.

PLACES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))

_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)*\b")


def driver_version(places: Sequence[Path] = PLACES) -> str | None:
    """The driver version from the first of the files that has one; None without a driver."""
    for place in places:
        with suppress(OSError, ValueError):
            found = _VERSION.search(place.read_text())
            if found is not None:
                return found[0]
    return None


# NVML readings of this rank's GPU: clock, throttling, link errors.

_MOST_LINKS = 18


def gpu_state() -> GpuState | None:
    """A reading taken now; None without a GPU in use or without pynvml (nvidia-ml-py)."""
    if not torch.cuda.is_initialized():
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(_uuid())
    except Exception:  # noqa: BLE001 - the reading is optional, so no warning
        return None
    return GpuState(
        at_unix_ns=time.time_ns(),
        sm_clock_mhz=_asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        throttle_reasons=_asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        link_errors=_link_errors(nvml, handle),
    )


def _uuid() -> str:
    """The UUID of the GPU: CUDA_VISIBLE_DEVICES renumbers GPUs for torch but not for NVML."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _link_errors(nvml: Any, handle: Any) -> int | None:
    """The number of replays of all NVLinks together; None if the GPU has no NVLink."""
    kind = getattr(nvml, "NVML_NVLINK_ERROR_DL_REPLAY", None)
    ask = nvml.nvmlDeviceGetNvLinkErrorCounter
    counts = [_asked(partial(ask, handle, link, kind)) for link in range(_MOST_LINKS)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _asked(question: Callable[[], Any]) -> int | None:
    """The result of an NVML query; None if this GPU or driver does not support it."""
    try:
        return int(question())
    except Exception:  # noqa: BLE001 - NVML has an error class per reason
        return None


# The offset of this host's clock from rank 0's, measured with a few datagrams.

_ROUNDS = 20

_MOST_LOST = 3

_TIMEOUT_S = 0.5

_PATIENCE_S = 30.0

_CLOCK_POLL_S = 0.5


class HostClock:
    """Clock probes: one rank per host probes rank 0; a job on one host needs no probes."""

    def __init__(self, key: str, rank: int, host: str) -> None:
        self._key, self._probes = f"{key}/clock", list[ClockProbe]()
        local, world = (int(os.environ.get(n, "1")) for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if local >= world:
            return
        if rank == 0:
            tell(self._key, f"{host}:{answer()}")
        elif os.environ.get("LOCAL_RANK") == "0":
            threading.Thread(target=self._ask, name="stepsplit-clock", daemon=True).start()

    def probes(self) -> tuple[ClockProbe, ...]:
        """The probes measured so far."""
        return tuple(self._probes)

    def _ask(self) -> None:
        address = heard(self._key, _PATIENCE_S, _CLOCK_POLL_S)
        if address is None:
            return
        host, _, port = address.rpartition(":")
        found = probe(host, int(port))
        if found is not None:
            self._probes.append(found)


def answer() -> int:
    """Answers datagrams with this host's time in a background thread; returns the port."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", 0))
    threading.Thread(target=_serve, args=(server,), name="stepsplit-clock", daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def _serve(server: socket.socket) -> None:
    while True:
        asked, sender = server.recvfrom(64)
        server.sendto(asked[:16] + b" " + str(time.time_ns()).encode(), sender)


def probe(host: str, port: int) -> ClockProbe | None:
    """The clock offset from the given host by the fastest round trip; None without an answer."""
    best: ClockProbe | None = None
    lost = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(_TIMEOUT_S)
        for number in range(_ROUNDS):
            found = _round(client, (host, port), number)
            lost += found is None
            if lost >= _MOST_LOST:
                break
            if found and (best is None or found.round_trip_ns < best.round_trip_ns):
                best = found
    return best


def _round(client: socket.socket, address: tuple[str, int], number: int) -> ClockProbe | None:
    sent = time.time_ns()
    try:
        client.sendto(str(number).encode(), address)
        told, _, there = client.recvfrom(64)[0].partition(b" ")
    except OSError:
        return None
    back = time.time_ns()
    if told != str(number).encode() or not there.isdigit():
        return None
    return ClockProbe((sent + back) // 2 - int(there), back - sent, back)

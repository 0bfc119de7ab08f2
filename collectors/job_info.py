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
from stepsplit.collectors.run_spec import GroupInfo, HostInfo, RankInfo, decode_group

# Hosts and groups of all ranks, exchanged through the job's store instead of collectives.

_PRESENCE_POLL_S = 0.1


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
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), "none"
    return distributed.get_rank(), distributed.get_world_size(), str(distributed.get_backend())


def describe_rank() -> RankDescription:
    """The description of this rank."""
    rank, _, _ = read_job()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    info = RankInfo(rank, local_rank, socket.gethostname(), os.getpid(), _describe_device())
    # Only a group's first member describes it: at 10,000 ranks, all members would send 1 GB.
    led = tuple(group for group in list_groups() if group.ranks[0] == rank)
    return RankDescription(info, led, read_host_info())


def publish(run: str, description: RankDescription) -> None:
    """Writes the description to the job's store, if it has one."""
    store = _store()
    if store is not None:
        store.set(_build_store_key(run, description.rank.rank), json.dumps(asdict(description)))


def collect_descriptions(
    run: str, own: RankDescription, world_size: int, timeout_s: float
) -> tuple[RankDescription, ...]:
    """The descriptions published within the timeout, sorted by rank."""
    store, deadline = _store(), time.monotonic() + timeout_s
    descriptions = {own.rank.rank: own}
    missing = [rank for rank in range(world_size) if rank not in descriptions]
    while store is not None and missing:
        # Polling for keys never blocks the store for long, unlike a blocking get.
        for rank in [rank for rank in missing if store.check([_build_store_key(run, rank)])]:
            descriptions[rank] = _decode_description(store.get(_build_store_key(run, rank)))
        missing = [rank for rank in missing if rank not in descriptions]
        if time.monotonic() >= deadline:
            break
        if missing:
            time.sleep(_PRESENCE_POLL_S)
    return tuple(descriptions[rank] for rank in sorted(descriptions))


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


def wait_for_value(key: str, timeout_s: float, poll_s: float) -> str | None:
    """Waits for the value of the key in the job's store; None if it is not set in time.

    For background threads: it uses a separate connection to the store.
    """
    store, deadline = _own_store(), time.monotonic() + timeout_s
    while store is not None and time.monotonic() < deadline:
        if store.check([f"stepsplit/{key}"]):
            return str(store.get(f"stepsplit/{key}").decode())
        time.sleep(poll_s)
    return None


def read_versions() -> tuple[tuple[str, str], ...]:
    """The versions of Python, torch, CUDA, NCCL and the GPU driver."""
    versions_found = [("python", platform.python_version()), ("torch", str(torch.__version__))]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions_found += [("cuda", str(torch.version.cuda)), ("nccl", nccl)]
        driver = read_driver_version()
        versions_found += [] if driver is None else [("driver", driver)]
    return tuple(versions_found)


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


def _store() -> Any | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def _own_store() -> Any | None:
    """The store over a connection of its own; None if the store cannot be cloned."""
    clone = getattr(_store(), "clone", None)
    return None if clone is None else clone()


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


# The version of the GPU driver, from /proc and /sys.

PLACES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))

_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)*\b")


def read_driver_version(places: Sequence[Path] = PLACES) -> str | None:
    """The driver version from the first of the files that has one; None without a driver."""
    for place in places:
        with suppress(OSError, ValueError):
            found = _VERSION.search(place.read_text())
            if found is not None:
                return found[0]
    return None


# NVML readings of this rank's GPU: clock, throttling, link errors.

_MAX_LINKS = 18


def read_gpu_state() -> GpuState | None:
    """A reading taken now; None without a GPU in use or without pynvml (nvidia-ml-py)."""
    if not torch.cuda.is_initialized():
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(_read_gpu_uuid())
    except Exception:  # noqa: BLE001 - the reading is optional, so no warning
        return None
    return GpuState(
        at_unix_ns=time.time_ns(),
        sm_clock_mhz=_query_or_none(
            lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        ),
        throttle_reasons=_query_or_none(
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        ),
        link_errors=_sum_link_errors(nvml, handle),
    )


def _read_gpu_uuid() -> str:
    """The UUID of the GPU: CUDA_VISIBLE_DEVICES renumbers GPUs for torch but not for NVML."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _sum_link_errors(nvml: Any, handle: Any) -> int | None:
    """The number of replays of all NVLinks together; None if the GPU has no NVLink."""
    kind = getattr(nvml, "NVML_NVLINK_ERROR_DL_REPLAY", None)
    ask = nvml.nvmlDeviceGetNvLinkErrorCounter
    counts = [_query_or_none(partial(ask, handle, link, kind)) for link in range(_MAX_LINKS)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _query_or_none(question: Callable[[], Any]) -> int | None:
    """The result of an NVML query; None if this GPU or driver does not support it."""
    try:
        return int(question())
    except Exception:  # noqa: BLE001 - NVML has an error class per reason
        return None


# The offset of this host's clock from rank 0's, measured with a few datagrams.

_MAX_ROUNDS = 20

_MAX_LOST = 3

_TIMEOUT_S = 0.5

_ADDRESS_TIMEOUT_S = 30.0

_CLOCK_POLL_S = 0.5


class HostClock:
    """Clock probes: one rank per host probes rank 0; a job on one host needs no probes."""

    def __init__(self, key: str, rank: int, host: str) -> None:
        self._key, self._probes = f"{key}/clock", list[ClockProbe]()
        local, world = (int(os.environ.get(n, "1")) for n in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if local >= world:
            return
        if rank == 0:
            set_store_value(self._key, f"{host}:{serve_clock()}")
        elif os.environ.get("LOCAL_RANK") == "0":
            threading.Thread(target=self._probe_rank0, name="stepsplit-clock", daemon=True).start()

    def list_probes(self) -> tuple[ClockProbe, ...]:
        """The probes measured so far."""
        return tuple(self._probes)

    def _probe_rank0(self) -> None:
        address = wait_for_value(self._key, _ADDRESS_TIMEOUT_S, _CLOCK_POLL_S)
        if address is None:
            return
        host, _, port = address.rpartition(":")
        measured = probe_clock(host, int(port))
        if measured is not None:
            self._probes.append(measured)


def serve_clock() -> int:
    """Answers datagrams with this host's time in a background thread; returns the port."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", 0))
    threading.Thread(
        target=_serve_requests, args=(server,), name="stepsplit-clock", daemon=True
    ).start()
    port: int = server.getsockname()[1]
    return port


def _serve_requests(server: socket.socket) -> None:
    while True:
        request, sender = server.recvfrom(64)
        server.sendto(request[:16] + b" " + str(time.time_ns()).encode(), sender)


def probe_clock(host: str, port: int) -> ClockProbe | None:
    """The clock offset from the given host by the fastest round trip; None without an answer."""
    best: ClockProbe | None = None
    lost = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(_TIMEOUT_S)
        for number in range(_MAX_ROUNDS):
            measured = _measure_round_trip(client, (host, port), number)
            lost += measured is None
            if lost >= _MAX_LOST:
                break
            if measured and (best is None or measured.round_trip_ns < best.round_trip_ns):
                best = measured
    return best


def _measure_round_trip(
    client: socket.socket, address: tuple[str, int], number: int
) -> ClockProbe | None:
    sent_ns = time.time_ns()
    try:
        client.sendto(str(number).encode(), address)
        echo, _, remote_ns = client.recvfrom(64)[0].partition(b" ")
    except OSError:
        return None
    received_ns = time.time_ns()
    if echo != str(number).encode() or not remote_ns.isdigit():
        return None
    return ClockProbe(
        (sent_ns + received_ns) // 2 - int(remote_ns), received_ns - sent_ns, received_ns
    )

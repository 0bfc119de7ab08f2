"""What is installed on this machine and what torch can do on it, for stepsplit doctor.

`read_environment` never raises: what cannot be read is None or "". No text holds a home folder, a
user or a host name, because reports of faults include it.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from stepsplit.collectors.safe_io.helper_process import PYTHON, build_helper_environment

# Importing torch from a cold network disk takes half a minute. The first time after an installation
# took more than a minute on a machine that others used too.
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package of stepsplit's own metadata, and what is installed of it.

    extra: "" if it is always needed. least: the lowest version, "" for any. installed: None if it
    is missing. error: why it cannot be imported, "" if it can. is_late: its import had not ended
    when the time was up, so whether it can is not known.
    """

    name: str
    extra: str
    least: str
    installed: str | None
    error: str = ""
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class TorchState:
    """What torch reports of itself, and what it could do here.

    activities: what torch.profiler can record, such as "CUDA". host_events and device_events: those
    of a test recording of one addition. errors: what failed, by name: import, profiler, gpu, gloo.
    is_late: all of this had not ended when the time was up; only the version is known.
    """

    version: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    cupti: str = ""
    gpus: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    activities: tuple[str, ...] = ()
    flight_recorders: tuple[str, ...] = ()
    host_events: int = 0
    device_events: int = 0
    errors: tuple[tuple[str, str], ...] = ()
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class FolderState:
    """Whether a folder can be written; its file system, such as "ext4", and free space."""

    writable: bool
    file_system: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """The facts of this machine.

    requirements: None if stepsplit has no metadata. torch: None if it is not installed. cache: None
    if it is switched off. smi_gpus: the GPUs that nvidia-smi lists. variables: environment
    variables that change what is recorded; of a path only the name. sockets_error: why the folder
    of the agents' sockets cannot be used. remote_debug: whether this Python starts code in another
    process, None if it is older than 3.14. ptrace_scope: Yama's, None without it.
    """

    stepsplit: str
    python: str
    system: str
    cores: int
    requirements: tuple[Requirement, ...] | None
    torch: TorchState | None
    smi_gpus: tuple[str, ...] = ()
    driver: str = ""
    has_pynvml: bool = False
    current: FolderState = field(default_factory=lambda: FolderState(True))
    cache: FolderState | None = None
    temporary: FolderState = field(default_factory=lambda: FolderState(True))
    shared_memory_bytes: int | None = None
    sockets_error: str = ""
    remote_debug: bool | None = None
    ptrace_scope: int | None = None
    may_trace: bool = False
    clock_source: str = ""
    variables: tuple[tuple[str, str], ...] = ()


# Reads the facts. Each one is read by itself: what cannot be read is not known.

FactT = TypeVar("FactT")


def read_environment() -> Environment:
    """Reads the facts of this machine, in some seconds; torch and the packages are imported in
    processes of their own, which may crash or hang."""
    requirements = _read_or(lambda: parse_requirements(metadata.requires("stepsplit") or ()), None)
    # torch and the packages at once: each of these imports takes seconds.
    with ThreadPoolExecutor(2) as pool:
        torch = pool.submit(_read_or, _probe_torch, TorchState(errors=(("import", "unknown"),)))
        checked = pool.submit(_read_or, lambda: _import_all(requirements or ()), requirements)
        listed = _read_or(_list_nvidia_smi, None) or ()
        environment = Environment(
            stepsplit=_read_or(lambda: metadata.version("stepsplit"), ""),
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 0,
            requirements=None if requirements is None else checked.result(),
            torch=torch.result(),
            smi_gpus=tuple(name for name, _ in listed),
            driver=listed[0][1] if listed else "",
            has_pynvml=_read_or(lambda: bool(metadata.version("nvidia-ml-py")), False),
            current=_examine_folder(Path.cwd),
            cache=_read_or(_examine_cache, None),
            temporary=_examine_folder(lambda: Path(tempfile.gettempdir())),
            shared_memory_bytes=_read_or(lambda: shutil.disk_usage("/dev/shm").total, None),
            sockets_error=_read_or(_find_sockets_error, "unknown"),
            # None before Python 3.14, which has no remote debugging.
            remote_debug=getattr(sys, "is_remote_debug_enabled", lambda: None)(),
            ptrace_scope=_read_or(
                lambda: int(_read_line("/proc/sys/kernel/yama/ptrace_scope")), None
            ),
            may_trace=_read_or(_may_trace, False),
            clock_source=_read_or(lambda: _read_line(_CLOCK_SOURCE), ""),
            # A value that may be a path is not kept.
            variables=tuple(
                (name, value if _SHOWN_VALUE.fullmatch(value) or not value else "set")
                for name in _VARIABLES
                if (value := os.environ.get(name)) is not None
            ),
        )
    return _hide_private(environment)


_CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"

# linux/capability.h.
_CAP_SYS_PTRACE = 19


def _read_or(read: Callable[[], FactT], unknown: FactT) -> FactT:
    """The fact, or `unknown` if it cannot be read."""
    try:
        return read()
    except Exception:  # noqa: BLE001 - a broken machine is what this is for
        return unknown


def _read_line(path: str) -> str:
    return Path(path).read_text().strip()


_NAME = re.compile(r"[\w.-]+")

_LEAST = re.compile(r">=\s*([\w.]+)")

_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")

_OTHER_EXTRAS = ("dev", "test", "test-without-torch")
"""What only contributors need."""


def parse_requirements(lines: Iterable[str]) -> tuple[Requirement, ...]:
    """The packages of the lines of Requires-Dist, and what is installed of them."""
    found = []
    for line in lines:
        package, _, marker = line.partition(";")
        name, least, extra = _NAME.match(package), _LEAST.search(package), _EXTRA.search(marker)
        known = name[0] if name else package
        one = Requirement(
            known, extra[1] if extra else "", least[1] if least else "", _find_version(known)
        )
        if one.extra not in _OTHER_EXTRAS:
            found.append(one)
    return tuple(found)


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_MODULES = {"PyYAML": "yaml", "traceinsight": "hta"}
"""Packages whose module has another name."""


def find_module(package: str) -> str:
    """The name by which a package is imported."""
    return _MODULES.get(package, package.lower().replace("-", "_"))


_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = ""
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    print("\\n" + json.dumps([name, error]), flush=True)
"""


def _import_all(requirements: tuple[Requirement, ...]) -> tuple[Requirement, ...]:
    """Imports what is installed, except torch, and adds the errors."""
    modules = {
        one.name: find_module(one.name)
        for one in requirements
        if one.installed is not None and one.name != "torch"
    }
    errors: dict[str, str] = {}
    waiting, is_late = list(modules.values()), False
    while waiting and not is_late:
        results, is_late = _run_probe(_IMPORT, *waiting)
        errors |= dict(results)
        # Results are flushed one by one: the first that is missing has ended the process.
        waiting = [name for name in waiting if name not in errors]
        if waiting and not is_late:
            errors[waiting.pop(0)] = "the import crashed"
    return tuple(
        replace(one, error=_shorten(errors.get(module, "")), is_late=module in waiting)
        for one in requirements
        for module in [modules.get(one.name, "")]
    )


def _shorten(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def _run_probe(program: str, *arguments: str) -> tuple[list[Any], bool]:
    """Runs a program in this Python, from which a file torch.py in this folder is not imported.

    Returns the JSON lists and objects that it printed, and whether it was ended for its time.
    """
    is_late = False
    try:
        done = subprocess.run(
            [*PYTHON, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
            env=build_helper_environment(),
        )
        printed: str = done.stdout
    except subprocess.TimeoutExpired as late:
        # What it printed before counts.
        is_late = True
        printed = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
    results = []
    for line in printed.splitlines():
        if line.startswith(("[", "{")):
            with suppress(ValueError):
                results.append(json.loads(line))
    return results, is_late


_TORCH = "from stepsplit.dashboard.environment import print_torch; print_torch()"


def _probe_torch() -> TorchState | None:
    """What torch reports; None if it is not installed."""
    version = _find_version("torch")
    if version is None:
        return None
    results, is_late = _run_probe(_TORCH)
    body = next((one for one in results if isinstance(one, dict)), None)
    if body is None:
        crashed = () if is_late else (("import", "the import crashed"),)
        return TorchState(version=version, errors=crashed, is_late=is_late)
    lists = {name: tuple(value) for name, value in body.items() if isinstance(value, list)}
    errors = tuple((name, _shorten(text)) for name, text in body["errors"])
    return TorchState(**body | lists | {"errors": errors})


def print_torch() -> None:
    """Prints what torch reports as a line of JSON, for a process of its own."""
    errors: list[tuple[str, str]] = []

    def attempt(what: str, read: Callable[[], FactT], unknown: FactT) -> FactT:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - the message is the result
            errors.append((what, f"{type(error).__name__}: {error}"))
            return unknown

    state = attempt("import", _read_torch, TorchState())
    if not errors:
        host, device = attempt("profiler", _record_addition, (0, 0))
        state = replace(
            state,
            gpus=attempt("gpu", _list_gpus, ()),
            host_events=host,
            device_events=device,
        )
        attempt("gloo", _reduce_with_gloo, None)
    # A library may have printed the beginning of a line.
    print("\n" + json.dumps(asdict(replace(state, errors=tuple(errors)))))  # noqa: T201


def _read_torch() -> TorchState:
    torch: Any = importlib.import_module("torch")
    software = importlib.import_module("stepsplit.collectors.probes.versions")
    distributed: Any = importlib.import_module("torch.distributed")
    c10d = getattr(torch._C, "_distributed_c10d", None)
    recorders = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
    versions = dict(software.read_versions())
    return TorchState(
        version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        nccl=versions.get("nccl", ""),
        cupti=versions.get("cupti", ""),
        backends=tuple(
            name
            for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
            if distributed.is_available()
            and getattr(distributed, f"is_{name}_available", lambda: False)()
        ),
        activities=tuple(sorted(one.name for one in torch.profiler.supported_activities())),
        flight_recorders=tuple(name for name, dump in recorders.items() if hasattr(c10d, dump)),
    )


def _list_gpus() -> tuple[str, ...]:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            # It says why, such as a driver that is too old; without a GPU that is no fault.
            torch.cuda.init()
        return ()
    return tuple(torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count()))


def _record_addition() -> tuple[int, int]:
    """The events of the host and of the device in a recording of one addition."""
    torch: Any = importlib.import_module("torch")
    with torch.profiler.profile() as profiler:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        (torch.ones(64, device=device) + 1).sum().item()
    host = [event.device_type == torch.autograd.DeviceType.CPU for event in profiler.events()]
    return sum(host), len(host) - sum(host)


def _reduce_with_gloo() -> None:
    """A job of one rank: gloo finds the address of this host."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    if distributed.is_available() and distributed.is_gloo_available():
        # In memory: another job may have the usual port.
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        distributed.all_reduce(torch.ones(1))
        distributed.destroy_process_group()


def _list_nvidia_smi() -> tuple[tuple[str, str], ...] | None:
    """The name and the driver's version of each GPU, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    # From the end: only a name may have a comma.
    rows = (line.rpartition(",") for line in done.stdout.splitlines() if "," in line)
    return tuple((name.strip(), driver.strip()) for name, _, driver in rows)


def _examine_folder(find: Callable[[], Path]) -> FolderState:
    """The state of a folder, or of the nearest one above it that exists."""
    from stepsplit.collectors.record.scratch_disk import read_file_system

    try:
        folder = find()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        writable = True
    except OSError:
        writable = False
    return FolderState(
        writable,
        _read_or(lambda: read_file_system(folder), ""),
        _read_or(lambda: shutil.disk_usage(folder).free, None),
    )


def _examine_cache() -> FolderState | None:
    from stepsplit.analyzer.readers.kineto.cache import cache_folder

    folder = cache_folder()
    return None if folder is None else _examine_folder(lambda: folder)


def _find_sockets_error() -> str:
    from stepsplit.collectors.safe_io.private_folder import make_meeting_folder

    try:
        make_meeting_folder()
    except OSError:
        # Not the reasons, which name folders: an attach says them.
        return "no folder for the agents' sockets is this user's alone"
    return ""


def _may_trace() -> bool:
    """Whether this process has CAP_SYS_PTRACE."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_PTRACE & 1)


_VARIABLES = (
    "CUDA_INJECTION64_PATH", "CUDA_LAUNCH_BLOCKING", "KINETO_CONFIG", "KINETO_USE_DAEMON",
    "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "SLURM_TMPDIR", "STEPSPLIT_CACHE",
    "STEPSPLIT_SCRATCH", "TEARDOWN_CUPTI", "TMPDIR", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE",
)  # fmt: skip

_SHOWN_VALUE = re.compile(r"[A-Z0-9_,]{1,40}|off")

_LEAST_LETTERS = 2
"""One letter says nothing of a user or a host, and a home folder / nothing at all."""


def _hide_private(environment: Environment) -> Environment:
    """The facts without the home folder, the host's names and the user's."""
    host = _read_or(socket.gethostname, "")
    homes = [str(Path.home()), os.environ.get("HOME", "")]
    hidden = {home: "~" for home in homes if len(home) >= _LEAST_LETTERS}
    hidden |= dict.fromkeys((host, host.partition(".")[0]), "HOST")
    hidden |= {os.environ.get(name, ""): "USER" for name in ("USER", "LOGNAME")}
    # The longest first, or a user's name within that of the host would be all that is hidden.
    words = sorted((word for word in hidden if len(word) >= _LEAST_LETTERS), key=len, reverse=True)

    def hide(text: str) -> str:
        for word in words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", hidden[word], text)
        return text

    torch = environment.torch
    if torch is not None:
        torch = replace(torch, errors=tuple((name, hide(text)) for name, text in torch.errors))
    requirements = environment.requirements
    if requirements is not None:
        requirements = tuple(replace(one, error=hide(one.error)) for one in requirements)
    return replace(environment, torch=torch, requirements=requirements)

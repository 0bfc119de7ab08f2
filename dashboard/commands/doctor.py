"""stepsplit doctor: what works on this machine, what would fail, and the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import click

from stepsplit.dashboard.commands.common import build_json_option, make_console, put_json
from stepsplit.dashboard.environment import (
    PROBE_TIMEOUT_S,
    Environment,
    FolderState,
    read_environment,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


COMMANDS = ("analyze", "attach", "dashboard", "record")
"""The commands that are judged; the others need what one of these needs."""


FAILS_STATUS = 1

UNKNOWN_STATUS = 3


@click.command()
@click.argument("commands", nargs=-1, type=click.Choice(COMMANDS), metavar="[COMMAND]...")
@build_json_option("Write what was found here; - for standard output.")
@click.pass_context
def doctor_command(
    context: click.Context, commands: tuple[str, ...], json_file: str | None
) -> None:
    """Check what is installed, what can be recorded here, and what would fail.

    COMMAND is analyze, attach, dashboard or record; by default analyze. The exit status is 1 if it
    would fail here, and 3 if that is not known. Nothing is changed, and nothing that is printed
    names a user, a host or a folder.
    """
    environment = read_environment()
    checks = check_environment(environment)
    if not put_json(environment, lambda facts: to_json(facts, checks), json_file):
        make_console().print(build_doctor_screen(environment, checks))
    asked = set(commands or COMMANDS[:1])
    if asked & set(find_failing(checks)):
        context.exit(FAILS_STATUS)
    context.exit(UNKNOWN_STATUS if asked & set(find_unknown(checks)) else 0)


Outcome = Literal["ok", "warning", "unknown", "fails"]


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """One thing that was checked. commands: those that fail with it, or lose something by it."""

    name: str
    outcome: Outcome
    detail: str
    fix: str = ""
    commands: tuple[str, ...] = ()


def find_failing(checks: Sequence[EnvironmentCheck]) -> tuple[str, ...]:
    """The commands that would fail here."""
    failing = {name for check in checks if check.outcome == "fails" for name in check.commands}
    return tuple(name for name in COMMANDS if name in failing)


def find_unknown(checks: Sequence[EnvironmentCheck]) -> tuple[str, ...]:
    """The commands of which it is not known whether they would fail here."""
    unknown = {name for check in checks if check.outcome == "unknown" for name in check.commands}
    return tuple(name for name in COMMANDS if name in unknown.difference(find_failing(checks)))


def to_json(environment: Environment, checks: Sequence[EnvironmentCheck]) -> str:
    """The facts and the checks as JSON."""
    body = {
        "schema": "stepsplit.doctor/1",
        "fails": find_failing(checks),
        "checks": [asdict(check) for check in checks],
        "environment": asdict(environment),
    }
    return json.dumps(body, indent=1) + "\n"


# The screen: versions, packages, what was checked, and each problem with its fix in one line.


def build_doctor_screen(
    environment: Environment, checks: Sequence[EnvironmentCheck]
) -> RenderableType:
    """Builds the screen for a rich console of any width."""
    from rich.console import Group
    from rich.table import Table

    from stepsplit.dashboard.reporters.console import Text

    torch = environment.torch
    failing, unknown = find_failing(checks), find_unknown(checks)
    machine = (
        f"stepsplit {environment.stepsplit or 'of unknown version'}",
        f"Python {environment.python}",
        environment.system,
        f"{environment.cores} cores" if environment.cores > 1 else "",
        "no torch" if torch is None else f"torch {torch.version}",
        f"CUDA {torch.cuda}" if torch is not None and torch.cuda else "",
        f"NCCL {torch.nccl}" if torch is not None and torch.nccl else "",
    )
    # What works stands first; most who run this want to know that.
    working = [name for name in COMMANDS if name not in failing and name not in unknown]
    commands = [f"works here: {', '.join(working)}"] if working else []
    commands += [f"would fail: {', '.join(failing)}"] if failing else []
    commands += [f"cannot tell: {', '.join(unknown)}"] if unknown else []
    parts: list[RenderableType] = [
        Text("   ".join(part for part in machine if part), style="bold"),
        Text("   ".join(commands)),
    ]
    if environment.requirements:
        packages = Table.grid(padding=(0, 2))
        packages.add_row("package", "installed", "needed", "for", style="bold")
        for one in environment.requirements:
            needed = f">={one.least}" if one.least else "any"
            packages.add_row(one.name, one.installed or "-", needed, one.extra)
        parts += [Text(), packages]
    fine, problems = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    fine.add_row("checked", "", style="bold")
    for check in checks:
        if check.outcome == "ok":
            fine.add_row(check.name, Text(check.detail))
            continue
        style = "bold red" if check.outcome == "fails" else "yellow"
        line = Text(f"{check.detail}; {check.fix}")
        problems.add_row(Text(check.outcome, style=style), check.name, line)
    parts += [Text(), fine]
    if problems.row_count:
        parts += [Text(), Text("PROBLEMS AND THEIR FIXES", style="bold"), problems]
    return Group(*parts)


# Judges the facts.


def check_environment(environment: Environment) -> tuple[EnvironmentCheck, ...]:
    """Checks what works on this machine and what would fail."""
    checks = (
        _check_packages,
        _check_torch,
        _check_gpus,
        _check_folders,
        _check_shared_memory,
        _check_attach,
        _check_variables,
        _check_clock,
    )
    return tuple(check for judge in checks for check in judge(environment))


_EXTRA_COMMANDS: dict[str, tuple[str, ...]] = {
    "": COMMANDS,
    "collect": ("record",),
    "dashboard": ("dashboard",),
}

_EXTRA_USES = {
    "fast": "faster gzip",
    "collect": "record, demo",
    "dashboard": "dashboard, worker, upload, --html",
    "postgres": "a dashboard's store in PostgreSQL",
    "hta": "HolisticTraceAnalysis",
    "cloud": "URLs; s3:// needs s3fs too, gs:// gcsfs",
    "scale": "analyze --scheduler",
    "tensorboard": "--log-to tensorboard:DIR",
    "wandb": "--log-to wandb",
}


def _check_packages(environment: Environment) -> Iterator[EnvironmentCheck]:
    if environment.requirements is None:
        detail = "stepsplit is not installed as a package"
        yield EnvironmentCheck("packages", "warning", detail, "pip install it", COMMANDS)
        return
    for extra in dict.fromkeys(one.extra for one in environment.requirements):
        needed = [one for one in environment.requirements if one.extra == extra]
        name, package = "packages", "stepsplit"
        if extra:
            name, package = f"extra {extra}", f"stepsplit[{extra}]"
        commands, use = _EXTRA_COMMANDS.get(extra, ()), _EXTRA_USES.get(extra, "")
        missing = [one.name for one in needed if one.installed is None]
        old = [
            f"{one.name} {one.installed} is older than {one.least}"
            for one in needed
            if one.installed and _parse_version(one.installed) < _parse_version(one.least)
        ]
        broken = [one for one in needed if one.error]
        late = [one.name for one in needed if one.is_late]
        purpose = f" ({use})" if use else ""
        outcome: Outcome = "fails" if commands else "warning"
        # An extra that is not installed at all was not wanted.
        if len(missing) == len(needed) and not commands:
            yield EnvironmentCheck(name, "ok", f"not installed{purpose}")
        elif missing:
            absent = "not installed" if len(missing) == len(needed) else f"no {', '.join(missing)}"
            fix = f"pip install '{package}'"
            yield EnvironmentCheck(name, outcome, absent + purpose, fix, commands)
        elif old:
            fix = f"pip install -U '{package}'"
            yield EnvironmentCheck(name, outcome, ", ".join(old), fix, commands)
        elif broken:
            detail = "; ".join(f"{one.name} cannot be imported ({one.error})" for one in broken)
            fix = f"pip install --force-reinstall {' '.join(one.name for one in broken)}"
            yield EnvironmentCheck(name, outcome, detail, fix, commands)
        elif late:
            detail = f"not imported after {PROBE_TIMEOUT_S:.0f} s: {', '.join(late)}"
            yield EnvironmentCheck(name, "unknown", detail, _RUN_AGAIN, commands)
        else:
            yield EnvironmentCheck(name, "ok", f"complete{purpose}", commands=commands)


def _parse_version(text: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros: 2.13.0+cpu is (2, 13)."""
    release = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


_RECORDING = ("record",)

# Each import that ended has left its bytecode.
_RUN_AGAIN = "run doctor again: it is faster after the first time, and where others leave more time"


def _check_torch(environment: Environment) -> Iterator[EnvironmentCheck]:
    torch = environment.torch
    if torch is None:
        return
    if torch.is_late:
        detail = f"torch {torch.version} was not imported and tested after {PROBE_TIMEOUT_S:.0f} s"
        yield EnvironmentCheck("torch", "unknown", detail, _RUN_AGAIN, _RECORDING)
        return
    errors = dict(torch.errors)
    if "import" in errors:
        detail = f"torch {torch.version} cannot be imported ({errors['import']})"
        fix = "install torch again: https://pytorch.org/get-started/locally"
        yield EnvironmentCheck("torch", "fails", detail, fix, _RECORDING)
        return
    if torch.host_events:
        on_gpu = f", {torch.device_events} on a GPU" if torch.device_events else ""
        detail = f"test recording: {torch.host_events} events on the host{on_gpu}"
        yield EnvironmentCheck("profiler", "ok", detail, commands=_RECORDING)
    else:
        detail = f"torch.profiler records nothing ({errors.get('profiler', 'no events')})"
        fix = "end other profilers of this Python, or install torch again"
        yield EnvironmentCheck("profiler", "fails", detail, fix, _RECORDING)
    name, backends = "torch.distributed", ", ".join(torch.backends)
    if "gloo" in errors:
        detail = f"gloo does not start ({errors['gloo']})"
        fix = "set GLOO_SOCKET_IFNAME to a network interface, or add this host to /etc/hosts"
        yield EnvironmentCheck(name, "warning", detail, fix, _RECORDING)
    elif not torch.backends:
        detail = f"torch {torch.version} has no backend: only jobs of one rank can be recorded"
        fix = "install torch from https://pytorch.org/get-started/locally"
        yield EnvironmentCheck(name, "warning", detail, fix, _RECORDING)
    else:
        nccl = f" (NCCL {torch.nccl})" if torch.nccl else ""
        yield EnvironmentCheck(name, "ok", backends + nccl, commands=_RECORDING)
    if torch.flight_recorders:
        detail = f"of {' and '.join(torch.flight_recorders)}"
        yield EnvironmentCheck("Flight Recorder", "ok", detail, commands=_RECORDING)
    else:
        detail = f"torch {torch.version} has none: sequence numbers and hangs are not recorded"
        fix = "install a torch with NCCL, or for gloo a newer one (2.13 has it)"
        yield EnvironmentCheck("Flight Recorder", "warning", detail, fix, _RECORDING)


def _check_gpus(environment: Environment) -> Iterator[EnvironmentCheck]:
    torch, listed = environment.torch, environment.smi_gpus
    driver = f", driver {environment.driver}" if environment.driver else ""
    if torch is None or "import" in dict(torch.errors):
        if listed:
            yield EnvironmentCheck("GPU", "ok", f"{_count_gpus(listed)}{driver}")
        return
    if not torch.gpus and not listed:
        yield EnvironmentCheck("GPU", "ok", "none here: jobs on the CPU can be recorded")
        return
    if not torch.gpus:
        reason = dict(torch.errors).get("gpu", "CUDA_VISIBLE_DEVICES may hide it")
        if not torch.cuda:
            reason = f"torch {torch.version} is built without CUDA"
        detail = f"torch cannot use {_count_gpus(listed)}{driver}: {reason}"
        fix = "install the torch of this driver's CUDA: https://pytorch.org/get-started/locally"
        yield EnvironmentCheck("GPU", "fails", detail, fix, _RECORDING)
        return
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
    cupti = f", CUPTI {torch.cupti}" if torch.cupti else ""
    detail = f"{_count_gpus(torch.gpus)}{driver}, {build}{cupti}"
    if torch.device_events:
        yield EnvironmentCheck("GPU", "ok", detail, commands=_RECORDING)
    else:
        detail = f"torch.profiler records no kernel on {detail}"
        fix = (
            "unset CUDA_INJECTION64_PATH, end other profilers (nsys, dcgm), or install torch again"
        )
        yield EnvironmentCheck("GPU", "fails", detail, fix, _RECORDING)
    if torch.cuda and not environment.has_pynvml:
        detail = "no nvidia-ml-py: clocks, throttling and link errors are not recorded"
        yield EnvironmentCheck(
            "GPU state", "warning", detail, "pip install nvidia-ml-py", _RECORDING
        )


def _count_gpus(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)


_LITTLE_BYTES = 1 << 30


def _check_folders(environment: Environment) -> Iterator[EnvironmentCheck]:
    from stepsplit.collectors.record.scratch_disk import DISKS, SCRATCH_VARIABLES, is_shared

    writers, current = ("attach", "dashboard", "record"), environment.current
    yield _check_folder("current folder", current, "fails", "go to a folder of yours", writers)
    named = set(dict(environment.variables)) & set(SCRATCH_VARIABLES)
    on_disk = environment.temporary.file_system in DISKS
    # Then raw traces of a recording in the current folder go to a shared file system.
    if is_shared(current.file_system) and not named and not on_disk:
        detail = f"{current.file_system} is shared: raw traces need a disk of each host"
        fix = "set STEPSPLIT_SCRATCH to a folder on a disk of the host (docs/recording.md)"
        yield EnvironmentCheck("scratch", "warning", detail, fix, _RECORDING)
    fix = "set TMPDIR to a folder of yours"
    yield _check_folder("temporary files", environment.temporary, "fails", fix, COMMANDS)
    if environment.cache is None:
        detail = "off (STEPSPLIT_CACHE): large traces are read anew each time"
        yield EnvironmentCheck("cache", "ok", detail, commands=("analyze",))
    else:
        fix = "set STEPSPLIT_CACHE to a folder of yours, or to off"
        yield _check_folder("cache", environment.cache, "warning", fix, ("analyze",))


def _check_folder(
    name: str, state: FolderState, outcome: Outcome, fix: str, commands: tuple[str, ...]
) -> EnvironmentCheck:
    if not state.writable:
        return EnvironmentCheck(name, outcome, "cannot be written", fix, commands)
    free_bytes = state.free_bytes
    if free_bytes is None:
        return EnvironmentCheck(name, "ok", "can be written", commands=commands)
    free = f"{_format_size(free_bytes)} free"
    if free_bytes < _LITTLE_BYTES:
        return EnvironmentCheck(name, "warning", f"only {free}", f"make room, or {fix}", commands)
    return EnvironmentCheck(name, "ok", f"can be written, {free}", commands=commands)


def _format_size(count_bytes: int) -> str:
    from stepsplit.analyzer import units

    return units.format_memory_size(count_bytes)


def _check_shared_memory(environment: Environment) -> Iterator[EnvironmentCheck]:
    size_bytes = environment.shared_memory_bytes
    if size_bytes is None:
        return
    detail = _format_size(size_bytes)
    if size_bytes < _LITTLE_BYTES:
        lost = f"{detail}: NCCL and data loaders of a training may fail"
        fix = "start the container with --shm-size=8g or --ipc=host"
        yield EnvironmentCheck("/dev/shm", "warning", lost, fix, _RECORDING)
    else:
        yield EnvironmentCheck("/dev/shm", "ok", detail, commands=_RECORDING)


_ATTACH = ("attach",)

_STANDBY = "start jobs with stepsplit record --standby"


def _check_attach(environment: Environment) -> Iterator[EnvironmentCheck]:
    if environment.sockets_error:
        fix = "set STEPSPLIT_SOCKETS to a private folder, in the job's environment too"
        yield EnvironmentCheck("agents", "fails", environment.sockets_error, fix, _ATTACH)
    else:
        detail = "jobs started with stepsplit record"
        yield EnvironmentCheck("agents", "ok", detail, commands=_ATTACH)
    name = "other processes"
    if environment.remote_debug is None:
        detail = f"Python {environment.python} attaches to agents only (3.14 to any process)"
        yield EnvironmentCheck(name, "ok", detail, commands=_ATTACH)
    # PEP 768 may be switched off when Python is built or started.
    elif not environment.remote_debug:
        detail = "this Python's remote debugging is off"
        fix = f"unset PYTHON_DISABLE_REMOTE_DEBUG, or {_STANDBY}"
        yield EnvironmentCheck(name, "warning", detail, fix, _ATTACH)
    elif environment.ptrace_scope and not environment.may_trace:
        detail = f"kernel.yama.ptrace_scope is {environment.ptrace_scope}: not permitted"
        fix = f"{_STANDBY}, or attach as root"
        yield EnvironmentCheck(name, "warning", detail, fix, _ATTACH)
    else:
        yield EnvironmentCheck(name, "ok", "any Python 3.14 of this user", commands=_ATTACH)


_VARIABLE_EFFECTS = {
    "CUDA_INJECTION64_PATH": "another tool uses CUPTI: kernels may be missing",
    "CUDA_LAUNCH_BLOCKING": "kernels run one by one: no communication overlaps",
    "NCCL_DEBUG": "record leaves NCCL's log as you set it: it may not be in the recording",
    "NCCL_DEBUG_FILE": "NCCL's log is not in the recording",
    "NCCL_DEBUG_SUBSYS": "lines of other subsystems are missing in NCCL's log",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL synchronizes all calls: times are not reliable",
    "TORCH_FR_BUFFER_SIZE": "0 switches the Flight Recorder off",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0 switches the Flight Recorder off",
}

_ONLY_VALUES = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
}
"""Other values of these variables lose nothing."""


def _check_variables(environment: Environment) -> Iterator[EnvironmentCheck]:
    for name, value in environment.variables:
        effect = _VARIABLE_EFFECTS.get(name)
        if effect is not None and value == _ONLY_VALUES.get(name, value):
            yield EnvironmentCheck(name, "warning", effect, f"unset {name}", _RECORDING)


_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


def _check_clock(environment: Environment) -> Iterator[EnvironmentCheck]:
    source = environment.clock_source
    if not source:
        return
    # Read by the process itself; any other source is a system call.
    if source in _FAST_CLOCKS:
        yield EnvironmentCheck("clock", "ok", source, commands=_RECORDING)
    else:
        detail = f"{source}: each time stamp costs about 1 us"
        fix = "boot with clocksource=tsc if this CPU's TSC is stable"
        yield EnvironmentCheck("clock", "warning", detail, fix, _RECORDING)

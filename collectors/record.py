"""stepsplit record: the plan of a recording, the command with an agent, and the demo launcher."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.helper_process import build_helper_command, build_helper_environment
from stepsplit.collectors.launcher import is_rank
from stepsplit.collectors.nccl import (
    build_inspector_environment,
    build_log_environment,
    find_inspector_plugin,
    find_installed_version,
)
from stepsplit.collectors.rank_record import find_free_folder, list_recorded
from stepsplit.collectors.run_spec import (
    MESH_AXES,
    GroupInfo,
    Mesh,
    make_owner_folder,
    select_known_fields,
)
from stepsplit.collectors.watch_notes import count_incarnations
from stepsplit.collectors.watch_plan import WATCH_VARIABLE, WatchPlan

# Runs a command with the agent in all of its processes; the training script is not modified.

_FLIGHT_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The size of torch's Flight Recorders; the first name is of torch 2.8 and overrides the second."""

_FLIGHT_ENTRIES = "20000"


@dataclass(frozen=True, slots=True)
class NcclLogs:
    """NCCL logs to enable besides the startup log: a line per call, and NCCL's Inspector."""

    calls: bool = False
    inspector: bool = False


def record(command: Sequence[str], plan: RecordPlan, nccl: NcclLogs = NcclLogs()) -> int:
    """Runs the command with each rank recorded as planned, and returns its exit status.

    A negative status is the signal that killed the command. Raises CollectError if the command
    cannot be started or the folder cannot be written.
    """
    make_folder(Path(plan.out))
    return _run(command, Path(plan.out), build_environment(os.environ, plan, nccl))


def run_watched(command: Sequence[str], plan: WatchPlan) -> int:
    """Runs the command with each rank watched as planned, and returns its exit status.

    If the folder of the plan has notes of an earlier job, this one is a further incarnation of it.
    `stepsplit attach` records it as well. Status and errors are as in `record`.
    """
    out = Path(plan.out)
    make_folder(out)
    standby = RecordPlan(plan.out, plan.name, first=None)
    numbered = replace(plan, incarnation=count_incarnations(out))
    variables = build_environment(os.environ, standby, NcclLogs())
    if _KINETO_LOG not in os.environ:
        # Else Kineto prints four lines for each sample of each rank.
        variables[_KINETO_LOG] = "99"
    return _run(command, out, variables | {WATCH_VARIABLE: numbered.format_json()})


_KINETO_LOG = "KINETO_LOG_LEVEL"


def make_folder(out: Path) -> None:
    """Creates the folder of a recording. Raises CollectError."""
    try:
        # The folder keeps what NCCL writes in it under the job's umask.
        make_owner_folder(out / "nccl")
    except OSError as error:
        raise CollectError(f"{out}: {error.strerror}; choose another --out") from None


def _run(command: Sequence[str], out: Path, variables: Mapping[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=dict(os.environ) | dict(variables))
    except OSError as error:
        remove_if_empty(out)
        raise CollectError(f"{command[0]}: {error.strerror}; is it on PATH?") from None
    with _forward_signals(process):
        return process.wait()


def check_out(folder: Path, overwrite: bool) -> None:
    """Removes an earlier recording from the folder, with what was analyzed of it, or raises
    CollectError if it may not."""
    recorded = list_recorded(folder)
    if not recorded:
        return
    if not overwrite:
        raise CollectError(
            f"{folder} has a recording: choose another --out, or replace it with --overwrite"
        )
    for path in (*recorded, folder / "report.json"):
        path.unlink(missing_ok=True)
    for logs in ("nccl", "memory", "tables"):
        shutil.rmtree(folder / logs, ignore_errors=True)


def describe_recorded(ranks: int, folder: Path, which: str = "") -> str:
    """What a recording says at its end; which steps it has, if they are not those asked for."""
    counted = f"{ranks} rank{'s' * (ranks != 1)}{which}"
    return f"recorded {counted}; analyze with: stepsplit analyze {shlex.quote(str(folder))}"


def remove_if_empty(folder: Path) -> None:
    """Removes the folder if nothing was written to it, and `runs` if that was the first one."""
    # Another rank's `record` may already have removed it.
    with suppress(OSError):
        (folder / "nccl").rmdir()
    with suppress(OSError):
        folder.rmdir()
        if folder.parent.name == _RUNS:
            folder.parent.rmdir()


def build_environment(
    existing: Mapping[str, str], plan: RecordPlan, nccl: NcclLogs
) -> dict[str, str]:
    """Variables to add to the job's environment; variables set by the user are not changed."""
    out, version = Path(plan.out), find_installed_version()
    variables = build_log_environment(out, version, nccl.calls)
    if not set(_FLIGHT_SIZES) & set(existing):
        variables[_choose_flight_size()] = _FLIGHT_ENTRIES
    variables |= build_kineto_environment(existing)
    if nccl.inspector:
        plugin = find_inspector_plugin(existing)
        if plugin is None:
            raise CollectError(
                "libnccl-profiler-inspector.so was not found; add its folder to LD_LIBRARY_PATH"
            )
        variables |= build_inspector_environment(out, version, plugin)
    if "NCCL_DEBUG" in existing:
        variables = {name: value for name, value in variables.items() if "NCCL_DEBUG" not in name}
    # An empty part of the user's path is the current folder.
    path = [str(SITE), *filter(None, [existing.get("PYTHONPATH")])]
    added = {name: value for name, value in variables.items() if name not in existing}
    return added | {PLAN_VARIABLE: plan.format_json(), "PYTHONPATH": os.pathsep.join(path)}


def _choose_flight_size() -> str:
    """The variable that this Python's torch reads: before 2.8 it ignores the new name."""
    try:
        version = _parse_version(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return _FLIGHT_SIZES[0]
    return _FLIGHT_SIZES[version < _RENAMED_FLIGHT_SIZE]


_RENAMED_FLIGHT_SIZE = (2, 8)

SITE = Path(__file__).parent / "site"

_SYSTEM_KINETO_CONFIG = Path("/etc/libkineto.conf")

_SAFE_TEARDOWN = (12, 6)


def build_kineto_environment(
    existing: Mapping[str, str], cuda: str | None = None
) -> dict[str, str]:
    """Variables for Kineto, unless the user has set them or has a tool that would suffer.

    KINETO_CONFIG: larger buffers for GPU records. It is read when the first profiler of a process
    is prepared; with KINETO_USE_DAEMON, Kineto takes the daemon's configuration only without it.

    TEARDOWN_CUPTI, for CUDA 12.6 and later (`cuda` is torch's version): CUPTI is detached after the
    recording. Otherwise steps can stay 10 to 20 % slower for the rest of the job
    (pytorch/pytorch#144455); before 12.6, CUDA graphs crash when it is detached. Not if another
    tool is injected, which would lose CUPTI too.
    """
    variables = {}
    configured = {"KINETO_CONFIG", "KINETO_USE_DAEMON"} & set(existing)
    if not configured and not _SYSTEM_KINETO_CONFIG.exists():
        variables["KINETO_CONFIG"] = str(SITE / "kineto.conf")
    taken = {"TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT", "CUDA_INJECTION64_PATH"} & set(existing)
    if not taken and _parse_version(cuda) >= _SAFE_TEARDOWN:
        variables["TEARDOWN_CUPTI"] = "1"
    return variables


def _parse_version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(".") if part.isdecimal())


def choose_out(existing: Mapping[str, str], verb: str = "record") -> Path:
    """The next free folder, such as runs/record; if each rank runs the verb, one for the job."""
    if is_rank(existing):
        return Path(_RUNS).absolute() / f"job-{existing.get('SLURM_JOB_ID', verb)}"
    return find_free_folder(Path(_RUNS).absolute() / verb)


_RUNS = "runs"


_OF_THE_SCRIPT = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a training script may handle, such as those before the end of its time in Slurm."""


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forwards SIGTERM to the command. The others reach it directly, from the terminal or as Slurm
    signals all processes of a task, and must not end this process before it."""

    def terminate(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        **{number: signal.signal(number, signal.SIG_IGN) for number in _OF_THE_SCRIPT},
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# The plan of a recording: steps, ranks and detail.

Detail = Literal["full", "thin", "none"]

PLAN_VARIABLE = "STEPSPLIT_PLAN"
"""Environment variable that passes the plan to the agent, as JSON."""

SMALL_JOB = 8
"""Largest job of which `auto` records all ranks in full."""


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """The plan of one recording. Steps are counted from 0, the first step of the process.

    Steps first to first + steps - 1 are recorded; the profiler warms up in the `warmup` steps
    before. If first is None, recording starts when an attach requests it (standby). ranks is "all",
    "auto" (one pipeline in full, the others thin) or a list such as "0-7,16". memory measures the
    allocations of the steps; stacks and shapes are options of the profiler. mesh is the job's mesh
    as the user states it, such as "pp=2,tp=4"; "" if unknown. share takes the trace of the script's
    own profiler if that one runs in the steps to record.
    """

    out: str
    name: str
    first: int | None
    steps: int = 5
    warmup: int = 1
    ranks: str = "all"
    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    mesh: str = ""
    share: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0 or (self.first is not None and self.first < 0):
            raise ValueError(
                f"no step to record: first {self.first}, warmup {self.warmup}, steps {self.steps}"
            )
        if self.ranks not in ("all", "auto"):
            parse_ranks(self.ranks)
        if self.mesh:
            Mesh.parse(self.mesh)

    def format_json(self) -> str:
        """JSON on one line, as read by parse_plan."""
        return json.dumps(asdict(self))


def parse_plan(text: str | bytes) -> RecordPlan:
    """Parses a plan in JSON. Raises ValueError if it is invalid."""
    body = json.loads(text)
    try:
        return decode_plan(body)
    except TypeError as error:
        raise ValueError(f"invalid plan: {error}") from None


def decode_plan(body: Mapping[str, Any]) -> RecordPlan:
    """Builds a plan from its fields, ignoring unknown ones. Raises TypeError if one is missing."""
    return RecordPlan(**select_known_fields(RecordPlan, body))


def parse_ranks(ranks: str) -> frozenset[int]:
    """Parses a list of ranks such as "0-7,16". Raises ValueError if it is invalid."""
    ranks_found: set[int] = set()
    for part in ranks.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{ranks!r} is not a list of ranks; use all, auto or 0-7,16")
        ranks_found.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks_found)


def choose_detail(ranks: str, rank: int, world_size: int, groups: tuple[GroupInfo, ...]) -> Detail:
    """The detail in which a rank is recorded. groups: the process groups of this rank."""
    if ranks == "all" or (ranks == "auto" and world_size <= SMALL_JOB):
        return "full"
    if ranks != "auto":
        return "full" if rank in parse_ranks(ranks) else "none"
    pipelines = [group.ranks for group in groups if _is_pipeline(group.description)]
    first_pipeline = min(pipelines, default=(rank,))
    return "full" if 0 in first_pipeline else "thin"


def _is_pipeline(description: str) -> bool:
    words = description.lower().replace("mesh_", "").split("_")
    return words[0] in ("pp", "pipe", "pipeline")


# Starts the demo training: one process per rank on this machine; all end with the call.

# One rank of the default demo on CPU: 580 MiB resident with tp=2,pp=2,dp=2, 1,100 with fsdp=4.
RANK_BYTES = 1_150_000_000

FOLLOW_STDIN = "STEPSPLIT_FOLLOW_STDIN"

_POLL_S = 0.05

_TAIL_LINES = 20


class LaunchError(RuntimeError):
    """A rank failed or the run timed out; the message ends with the rank's last output."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """A completed training run; output is the stdout of all ranks."""

    out: Path
    mesh: Mesh
    wall_ns: int
    output: str


def launch_workload(
    parallel: str | Mesh,
    out: str | Path,
    args: DemoArgs | None = None,
    timeout_s: float = 300.0,
    calibration: Path | None = None,
) -> LaunchResult:
    """Runs the demo on a mesh such as "tp=2,pp=2,dp=2", recorded to `out`. Raises LaunchError.

    The same processes record a short training of another layout before and after it to subfolders
    of `calibration`, if given.
    """
    mesh = parse_parallel(parallel) if isinstance(parallel, str) else parallel
    command = build_helper_command("stepsplit.collectors.demo_job")
    command += ["--out", str(out), "--parallel", mesh.format()]
    command += (args or DemoArgs()).format_arguments()
    command += [] if calibration is None else ["--calibration", str(calibration)]
    begin = time.monotonic_ns()
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as logs, ExitStack() as stack:
        ranks = _start(command, mesh.world_size, Path(logs), stack)
        _wait_for_ranks(ranks, time.monotonic() + timeout_s)
        output = "".join(rank.stdout.read_text() for rank in ranks)
    return LaunchResult(Path(out), mesh, time.monotonic_ns() - begin, output)


def fit_to_memory(mesh: Mesh, available_bytes: int) -> Mesh:
    """The mesh with dp, then pp, then tp halved until its ranks fit in memory."""
    sizes = {axis: mesh.size(axis) for axis in mesh.axes}
    for axis in ("dp_replicate", "dp_shard", "cp", "pp", "tp"):
        while sizes.get(axis, 1) > 1 and Mesh.of(sizes).world_size * RANK_BYTES > available_bytes:
            sizes[axis] //= 2
    return remove_single_rank_axes(Mesh.of(sizes))


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path


def _start(command: Sequence[str], world_size: int, logs: Path, stack: ExitStack) -> list[_Rank]:
    """Starts every rank; closing the stack ends them."""
    ranks: list[_Rank] = []
    stack.callback(_end_ranks, ranks)
    port = _free_port()
    for rank in range(world_size):
        stdout, stderr = logs / f"{rank}.out", logs / f"{rank}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            # A rank exits when its stdin closes, so it also ends if this process is killed.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=_build_rank_environment(rank, world_size, port),
            )
        ranks.append(_Rank(rank, process, stdout, stderr))
    return ranks


def _build_rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    added = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # Keep freed memory: returning and reallocating it causes page faults in random steps.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        FOLLOW_STDIN: "1",
    }
    return build_helper_environment(added)


def _wait_for_ranks(ranks: Sequence[_Rank], deadline: float) -> None:
    """Returns when all ranks are done. Raises LaunchError at the first that fails."""
    while any(rank.process.poll() is None for rank in ranks):
        _raise_failure(ranks)
        if time.monotonic() > deadline:
            late = [rank for rank in ranks if rank.process.poll() is None]
            names = ", ".join(str(rank.rank) for rank in late)
            raise LaunchError(f"ranks {names} did not finish in time\n{_read_stderr_tail(late[0])}")
        time.sleep(_POLL_S)
    _raise_failure(ranks)


def _raise_failure(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        code = rank.process.poll()
        if code:
            raise LaunchError(
                f"rank {rank.rank} exited with status {code}\n{_read_stderr_tail(rank)}"
            )


def _read_stderr_tail(rank: _Rank) -> str:
    return "\n".join(rank.stderr.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _end_ranks(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        if rank.process.stdin is not None:
            rank.process.stdin.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# The arguments of the demo training and its command line.


@dataclass(frozen=True, slots=True)
class DemoArgs:
    """Arguments of the demo: model size, number of steps, and an optional slow rank."""

    steps: int = field(default=20, metadata={"help": "training steps"})
    active: int = field(default=5, metadata={"help": "steps recorded"})
    microbatches: int = field(default=4, metadata={"help": "microbatches per step"})
    micro_batch: int = field(default=4, metadata={"help": "sequences per microbatch"})
    seq_len: int = field(default=64, metadata={"help": "characters per sequence"})
    layers: int = field(default=2, metadata={"help": "transformer layers"})
    hidden: int = field(default=512, metadata={"help": "width of the model"})
    heads: int = field(default=8, metadata={"help": "attention heads"})
    schedule: str = field(
        default="1f1b", metadata={"help": "pipeline schedule", "choices": ("1f1b", "gpipe")}
    )
    slow_rank: int = field(default=-1, metadata={"help": "rank to slow down, or -1 for none"})
    slow_ms: int = field(default=0, metadata={"help": "added delay in milliseconds per step"})
    slow_kind: str = field(
        default="compute",
        metadata={"help": "how the rank is delayed", "choices": ("compute", "sleep")},
    )

    def format_arguments(self) -> list[str]:
        """The command line of these arguments, as read by parse_command."""
        return [word for f in fields(self) for word in (_flag(f.name), str(getattr(self, f.name)))]


CALIBRATION = DemoArgs(steps=6, active=4, microbatches=1)
"""A training of a few seconds that shows how fast a machine is."""


def choose_calibration_mesh(mesh: Mesh) -> Mesh:
    """Another layout of as many ranks, with calls of small and of large messages if possible.

    A prediction must not be fitted to the layout that it is for; a single rank has no other.
    """
    ranks = mesh.world_size
    sizes = [{"dp_replicate": ranks}, {"dp_shard": ranks}]
    if ranks % 2 == 0:
        sizes.insert(0, {"dp_replicate": ranks // 2, "tp": 2})
    layouts = [remove_single_rank_axes(Mesh.of(one)) for one in sizes]
    return next((one for one in layouts if one != mesh), layouts[0])


@dataclass(frozen=True, slots=True)
class Command:
    """A parsed command line of the demo: folders of the recordings, mesh and arguments."""

    out: Path
    mesh: Mesh
    args: DemoArgs
    calibration: Path | None = None


def parse_command(arguments: Sequence[str] | None = None) -> Command:
    """Parses the arguments, by default those of the process; exits with usage if invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m stepsplit.collectors.demo_job",
        description="Train and record a small GPT; start one process per rank (torchrun).",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the recording")
    parser.add_argument("--parallel", default="dp=1", help="such as tp=2,pp=2,dp=2 or fsdp=4")
    parser.add_argument("--calibration", type=Path, help="folder of trainings of another layout")
    for each in fields(DemoArgs):
        kind = type(each.default)
        parser.add_argument(_flag(each.name), type=kind, default=each.default, **each.metadata)
    values = parser.parse_args(arguments)
    args = DemoArgs(**{f.name: getattr(values, f.name) for f in fields(DemoArgs)})
    try:
        mesh = parse_parallel(values.parallel)
        check_mesh(args, mesh)
    except ValueError as error:
        parser.error(str(error))
    return Command(values.out, mesh, args, values.calibration)


def parse_parallel(text: str) -> Mesh:
    """Parses "tp=2,pp=2,dp=2": the order is always pp, dp, cp, tp; axes of size 1 are dropped."""
    mesh = Mesh.parse(text)
    return remove_single_rank_axes(
        Mesh.of({axis: mesh.size(axis) for axis in MESH_AXES if axis in mesh.axes})
    )


def remove_single_rank_axes(mesh: Mesh) -> Mesh:
    """The mesh without its axes of size 1; at least one axis remains."""
    sizes = {axis: mesh.size(axis) for axis in mesh.axes if mesh.size(axis) > 1}
    return Mesh.of(sizes or {"dp_replicate": 1})


def check_mesh(args: DemoArgs, mesh: Mesh) -> None:
    """Raises ValueError if the model cannot be split over the mesh."""
    stages, shards = mesh.size("pp"), mesh.size("tp")
    if args.layers % stages:
        raise ValueError(f"layers ({args.layers}) must be divisible by pp ({stages})")
    if args.hidden % args.heads:
        raise ValueError(f"hidden ({args.hidden}) must be divisible by heads ({args.heads})")
    if args.heads % shards:
        raise ValueError(f"heads ({args.heads}) must be divisible by tp ({shards})")
    if stages > 1 and args.microbatches < stages:
        raise ValueError(f"microbatches ({args.microbatches}) must be at least pp ({stages})")
    if mesh.size("cp") > 1:
        raise ValueError("the demo training does not support cp; leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

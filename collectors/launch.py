"""Launches the demo training: its parallel layout, and one process a rank on this machine."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path

from stepsplit.collectors.run_spec import SHORTHAND, Mesh

# Starts the demo training: one process a rank on this machine, none of which outlives the call.

# One rank of the default recipe on CPU: 580 MiB resident under tp=2,pp=2,dp=2, 1,100 under fsdp=4.
RANK_BYTES = 1_150_000_000

FOLLOW_STDIN = "STEPSPLIT_FOLLOW_STDIN"

_POLL_S = 0.05

_TAIL_LINES = 20


class LaunchError(RuntimeError):
    """A rank failed or the run took too long; the message ends with what the rank said last."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """A training that ran to its end."""

    out: Path
    mesh: Mesh
    wall_ns: int
    output: str


def launch_workload(
    parallel: str | Mesh, out: str | Path, recipe: Recipe | None = None, timeout_s: float = 300.0
) -> LaunchResult:
    """Trains on the mesh ("tp=2,pp=2,dp=2") and records into `out`. Raises LaunchError."""
    mesh = parse_parallel(parallel) if isinstance(parallel, str) else parallel
    command = [sys.executable, "-m", "stepsplit.collectors.demo_job"]
    command += ["--out", str(out), "--parallel", parallel_text(mesh)]
    command += (recipe or Recipe()).arguments()
    begin = time.monotonic_ns()
    with tempfile.TemporaryDirectory(prefix="stepsplit-") as logs, ExitStack() as stack:
        ranks = _start(command, mesh.world_size, Path(logs), stack)
        _wait(ranks, time.monotonic() + timeout_s)
        output = "".join(rank.stdout.read_text() for rank in ranks)
    return LaunchResult(Path(out), mesh, time.monotonic_ns() - begin, output)


def affordable(mesh: Mesh, available_bytes: int) -> Mesh:
    """The mesh, with dp, then pp, then tp halved until its ranks fit into the memory."""
    sizes = {axis: mesh.size(axis) for axis in mesh.axes}
    for axis in ("dp_replicate", "dp_shard", "cp", "pp", "tp"):
        while sizes.get(axis, 1) > 1 and Mesh.of(sizes).world_size * RANK_BYTES > available_bytes:
            sizes[axis] //= 2
    return without_singles(Mesh.of(sizes))


@dataclass(frozen=True, slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path


def _start(command: Sequence[str], world_size: int, logs: Path, stack: ExitStack) -> list[_Rank]:
    """Starts every rank; leaving the stack ends them all."""
    ranks: list[_Rank] = []
    stack.callback(_end, ranks)
    port = _free_port()
    for rank in range(world_size):
        stdout, stderr = logs / f"{rank}.out", logs / f"{rank}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            # Each rank ends itself when its stdin closes: with us, even if we are killed.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=_environment(rank, world_size, port),
            )
        ranks.append(_Rank(rank, process, stdout, stderr))
    return ranks


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # Memory given back and taken anew is page faults in some step of some rank: keep it.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        FOLLOW_STDIN: "1",
    }


def _wait(ranks: Sequence[_Rank], deadline: float) -> None:
    """Returns when all ranks are done. Raises LaunchError at the first that fails."""
    while any(rank.process.poll() is None for rank in ranks):
        _raise_failure(ranks)
        if time.monotonic() > deadline:
            late = [rank for rank in ranks if rank.process.poll() is None]
            names = ", ".join(str(rank.rank) for rank in late)
            raise LaunchError(f"ranks {names} did not end in time\n{_tail(late[0])}")
        time.sleep(_POLL_S)
    _raise_failure(ranks)


def _raise_failure(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        code = rank.process.poll()
        if code:
            raise LaunchError(f"rank {rank.rank} ended with status {code}\n{_tail(rank)}")


def _tail(rank: _Rank) -> str:
    return "\n".join(rank.stderr.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _end(ranks: Sequence[_Rank]) -> None:
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


# How the demo training is set up: Recipe, and its command line in and out.

# Outermost first: neighbors in the innermost axis talk most.
_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The size of the model, the length of the run, and a rank that is made late on purpose."""

    steps: int = field(default=20, metadata={"help": "training steps in all"})
    active: int = field(default=5, metadata={"help": "steps recorded"})
    microbatches: int = field(default=4, metadata={"help": "microbatches a step"})
    micro_batch: int = field(default=4, metadata={"help": "sequences a microbatch"})
    seq_len: int = field(default=64, metadata={"help": "characters a sequence"})
    layers: int = field(default=2, metadata={"help": "transformer layers"})
    hidden: int = field(default=512, metadata={"help": "width of the model"})
    heads: int = field(default=8, metadata={"help": "attention heads"})
    schedule: str = field(
        default="1f1b", metadata={"help": "pipeline schedule", "choices": ("1f1b", "gpipe")}
    )
    slow_rank: int = field(default=-1, metadata={"help": "rank made late in every step, or -1"})
    slow_ms: int = field(default=0, metadata={"help": "how late, in milliseconds a step"})
    slow_kind: str = field(
        default="compute",
        metadata={"help": "what it does meanwhile", "choices": ("compute", "sleep")},
    )

    def arguments(self) -> list[str]:
        """The command line that parse_command reads back as this recipe."""
        return [word for f in fields(self) for word in (_flag(f.name), str(getattr(self, f.name)))]


@dataclass(frozen=True, slots=True)
class Command:
    """What the command line asks for: a recipe, run on a mesh, recorded into a folder."""

    out: Path
    mesh: Mesh
    recipe: Recipe


def parse_command(arguments: Sequence[str] | None = None) -> Command:
    """The command of these arguments, or of the process. Exits with usage on nonsense."""
    parser = argparse.ArgumentParser(
        prog="python -m stepsplit.collectors.demo_job",
        description="Train a small GPT under the recorder; start one process a rank (torchrun).",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the recording")
    parser.add_argument("--parallel", default="dp=1", help="such as tp=2,pp=2,dp=2 or fsdp=4")
    for each in fields(Recipe):
        kind = type(each.default)
        parser.add_argument(_flag(each.name), type=kind, default=each.default, **each.metadata)
    values = parser.parse_args(arguments)
    recipe = Recipe(**{f.name: getattr(values, f.name) for f in fields(Recipe)})
    try:
        mesh = parse_parallel(values.parallel)
        check(recipe, mesh)
    except ValueError as error:
        parser.error(str(error))
    return Command(values.out, mesh, recipe)


def parse_parallel(text: str) -> Mesh:
    """The mesh of "tp=2,pp=2,dp=2": outermost always pp, then dp, cp, tp; axes of 1 left out."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        axis = SHORTHAND.get(axis, axis)
        if axis not in _ORDER or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"{part.strip()!r} is no axis and size: write tp=2,pp=2,dp=2 or fsdp=4"
            )
        if axis in sizes:
            raise ValueError(f"{axis} is given twice in {text!r}")
        sizes[axis] = int(size)
    return without_singles(Mesh.of({axis: sizes[axis] for axis in _ORDER if axis in sizes}))


def parallel_text(mesh: Mesh) -> str:
    """The text that parse_parallel reads back as this mesh."""
    return ",".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))


def without_singles(mesh: Mesh) -> Mesh:
    """The mesh without its axes of one rank; one axis always stays."""
    sizes = {axis: mesh.size(axis) for axis in mesh.axes if mesh.size(axis) > 1}
    return Mesh.of(sizes or {"dp_replicate": 1})


def check(recipe: Recipe, mesh: Mesh) -> None:
    """Raises ValueError, one line, where the mesh cannot hold the model."""
    stages, shards = mesh.size("pp"), mesh.size("tp")
    if recipe.layers % stages:
        raise ValueError(f"{recipe.layers} layers cannot be cut into {stages} stages")
    if recipe.hidden % recipe.heads:
        raise ValueError(f"hidden {recipe.hidden} is not divisible by {recipe.heads} heads")
    if recipe.heads % shards:
        raise ValueError(f"{recipe.heads} heads cannot be shared by tp={shards}")
    if stages > 1 and recipe.microbatches < stages:
        raise ValueError(f"{stages} stages need as many microbatches, not {recipe.microbatches}")
    if mesh.size("cp") > 1:
        raise ValueError("the demo training has no context parallelism: leave cp out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""Starts the demo training: one process a rank on this machine, none of which outlives the call."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors.recipe import Recipe, parallel_text, parse_parallel, without_singles
from stepsplit.collectors.run_spec import Mesh

# One rank of the default recipe on CPU: 580 MiB resident under tp=2,pp=2,dp=2, 1,100 under fsdp=4.
RANK_BYTES = 1_150_000_000
FOLLOW_STDIN = "STEPSPLIT_FOLLOW_STDIN"
_POLL_S = 0.05
_TAIL_LINES = 20
__all__ = [
    "RANK_BYTES",
    "LaunchError",
    "LaunchResult",
    "affordable",
    "launch_workload",
    "parse_parallel",
]


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
    command = [sys.executable, "-m", "stepsplit.collectors.workload"]
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

"""Starts the demo training: one process per rank on this machine; all end with the call."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors.demo.arguments import (
    FOLLOW_STDIN,
    DemoArgs,
    parse_parallel,
    remove_single_rank_axes,
)
from stepsplit.collectors.formats.run_spec import Mesh
from stepsplit.collectors.safe_io.helper_process import (
    build_helper_command,
    build_helper_environment,
)

# One rank of the default demo on CPU: 580 MiB resident with tp=2,pp=2,dp=2, 1,100 with fsdp=4.
RANK_BYTES = 1_150_000_000

_POLL_S = 0.05

# A traceback of torch.distributed ends with the cause in its last lines.
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
    timeout_s: float = 900.0,
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
    # Data parallelism first: with fewer replicas the demo still shows every kind of communication.
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
    # Free now, and nearly always until rank 0 listens at it.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    for rank in range(world_size):
        stdout, stderr = logs / f"{rank}.out", logs / f"{rank}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            # A rank exits when its stdin closes, so it also ends if this process is killed.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=build_helper_environment(
                    {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(world_size),
                        "LOCAL_WORLD_SIZE": str(world_size),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "GLOO_SOCKET_IFNAME": "lo",
                        "NCCL_SOCKET_IFNAME": "lo",
                        "OMP_NUM_THREADS": "1",
                        # Keep freed memory: returning and reallocating it causes page faults in
                        # random steps.
                        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
                        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
                        FOLLOW_STDIN: "1",
                    }
                ),
            )
        ranks.append(_Rank(rank, process, stdout, stderr))
    return ranks


def _wait_for_ranks(ranks: Sequence[_Rank], deadline: float) -> None:
    """Returns when all ranks are done. Raises LaunchError at the first that fails."""
    while any(rank.process.poll() is None for rank in ranks):
        _raise_failure(ranks)
        if time.monotonic() > deadline:
            late = [rank for rank in ranks if rank.process.poll() is None]
            names = ", ".join(str(rank.rank) for rank in late)
            raise LaunchError(
                f"ranks {names} did not finish in time (fewer are quicker on busy cores:"
                f" --parallel tp=2)\n{_read_stderr_tail(late[0])}"
            )
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

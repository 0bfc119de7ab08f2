"""The jobs with and without a fault: what they run, and what a tool should say of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from injected_faults.sizes import FIRST, LAYERS, RECORDED, TIMED, TURN_BEGINS

HERE = Path(__file__).parent
PATIENCE_S = 900.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a job and the right first finding.

    injected is the argument of inject.py, arguments are those of the script, options those of the
    recorder; deep: see sizes.DEEP.
    """

    injected: str
    codes: tuple[str, ...]
    ranks: tuple[int, ...]
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    deep: bool = False


_NEEDS = {
    "transformers": ("transformers",),
    "accelerate": ("transformers", "accelerate"),
    "deepspeed": ("transformers", "deepspeed"),
    "lightning": ("lightning",),
    "fsdp2": ("transformers",),
    "pipelining": ("transformers",),
    "megatron": ("megatron",),
}
"""The packages of each script."""
_CLONES = {"nanogpt": "nanoGPT", "mingpt": "minGPT"}

CLEAN = "clean"
SLOW_FORWARD = Fault("slow_forward", ("host_stall",), (1,))
SLOW_LOADER = Fault("slow_loader", ("data_loading", "host_stall"), (0,))
EXTRA_CALL = Fault("extra_all_reduce", ("extra_reductions",), ())
SMALL_BUCKETS = Fault("small_buckets", ("small_collectives",), (), deep=True)
SMALL_SHARDS = Fault("small_shards", ("small_collectives",), (), deep=True)
UNEVEN_BATCH = Fault("uneven_batch", ("uneven_ranks",), (1,), options=("--shapes",))
UNEVEN_STAGES = Fault(CLEAN, ("uneven_stages",), (1,), arguments=(str(LAYERS // 4),))

_OF_DATA_PARALLEL = {
    "slow forward": SLOW_FORWARD,
    "slow loader": SLOW_LOADER,
    "extra all_reduce": EXTRA_CALL,
    "small buckets": SMALL_BUCKETS,
    "uneven batch": UNEVEN_BATCH,
}
FRAMEWORKS: Mapping[str, Mapping[str, Fault]] = {
    "transformers": _OF_DATA_PARALLEL,
    "accelerate": _OF_DATA_PARALLEL,
    "deepspeed": _OF_DATA_PARALLEL,
    "lightning": _OF_DATA_PARALLEL,
    "fsdp2": _OF_DATA_PARALLEL | {"small buckets": SMALL_SHARDS},
    "nanogpt": {name: of for name, of in _OF_DATA_PARALLEL.items() if of != UNEVEN_BATCH},
    "mingpt": _OF_DATA_PARALLEL,
    # Each tensor parallel rank sees the same batch, and reduces activations in the forward.
    "megatron": {"slow forward": SLOW_FORWARD, "slow loader": SLOW_LOADER},
    # A pipeline of one rank a stage reduces no gradients, and both stages see the same batch.
    "pipelining": {
        "slow forward": SLOW_FORWARD,
        "slow loader": SLOW_LOADER,
        "extra all_reduce": EXTRA_CALL,
        "uneven stages": UNEVEN_STAGES,
    },
}


def record(framework: str, name: str, folder: Path) -> None:
    """Runs the framework's script without a fault and with this one, in turn; see Turns.

    Each runs on two ranks under `stepsplit record` and gets a folder of its own in this one, with
    `recording`, the times of its steps, and its output.

    Raises:
        RuntimeError: a job failed; with the end of its output.
    """
    fault = FRAMEWORKS[framework][name]
    jobs = {CLEAN: Fault(CLEAN, (), (), deep=fault.deep), name: fault}
    started = [
        _start(framework, one, folder / job, turn) for turn, (job, one) in enumerate(jobs.items())
    ]
    try:
        status = [process.wait(PATIENCE_S) for process in started]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for job, code in zip(jobs, status, strict=True):
        if code or not is_complete(folder / job):
            output = (folder / job / "output.txt").read_text()
            raise RuntimeError(f"{framework}, {job}: {output[-2000:]}")


def _start(framework: str, fault: Fault, folder: Path, turn: int) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "stepsplit.collectors", "record", "--out", str(folder / "recording"),
        "--first", str(FIRST), "--steps", str(RECORDED), *fault.options, "--",
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(HERE / "inject.py"), fault.injected, str(folder), str(turn),
        str(HERE / f"train_{framework}.py"), *fault.arguments,
    ]  # fmt: skip
    environment = os.environ | _ENVIRONMENT | ({"STEPSPLIT_DEEP": "1"} if fault.deep else {})
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def list_missing(framework: str) -> list[str]:
    """Packages that the framework's script needs and that are not installed, and its clone if that
    is not in the folder STEPSPLIT_CLONES."""
    missing = [name for name in _NEEDS.get(framework, ()) if find_spec(name) is None]
    clone = _CLONES.get(framework, "")
    there = (Path(os.environ.get("STEPSPLIT_CLONES", "")) / clone).is_dir()
    return missing if there else [*missing, f"clone of {clone}"]


def list_jobs(folder: Path) -> list[Path]:
    """The folders of the jobs that ran in turn."""
    return sorted(path for path in folder.iterdir() if path.is_dir())


def is_complete(job: Path) -> bool:
    """Whether both ranks came to the end."""
    return len(list(job.glob("rank*.json"))) == 2


def read_turn_times_s(job: Path) -> list[float]:
    """The median step of each turn, mean of the ranks, by time.perf_counter and without a
    profiler."""
    ranks = [json.loads(path.read_text()) for path in sorted(job.glob("rank*.json"))]
    steps = [[end - begin for begin, end in pairwise(ends)] for ends in ranks]
    timed = [range(begin, begin + TIMED - 1) for begin in TURN_BEGINS]
    return [mean(median(rank[step] for step in turn) for rank in steps) for turn in timed]

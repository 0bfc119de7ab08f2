"""Starts jobs with and without the recorder, and looks at what they leave."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRAIN = str(HERE / "train.py")
RANKS = (sys.executable, str(HERE / "ranks.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COLLECTORS = (sys.executable, "-m", "stepsplit.collectors")
WINDOW = ("--first", "6", "--steps", "3")
"""What is recorded of 12 steps: 6, 7 and 8, after a warmup in 5."""
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended by itself."""

    status: int
    out: str
    err: str

    @property
    def lost(self) -> list[str]:
        """What the ranks said that they lost, in order of rank."""
        return sorted(re.findall(r"stepsplit: (rank \d: lost .*)", self.err))


def start(command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """The command as a process group of its own, as a terminal would start it."""
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """In a child about to run: Ctrl-C ends it, also where the tests run in the background and
    ignore it, as under nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[str]) -> Ended:
    """How it ends. A command that hangs is ended, and raises TimeoutExpired."""
    with ended_at_last(process):
        out, err = process.communicate(timeout=PATIENCE_S)
    return Ended(process.returncode, out, err)


@contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens, nothing of the command's process group outlives the block."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()


def run(command: Sequence[str], **environment: str) -> Ended:
    """Runs the command to its end."""
    return end(start(command, **environment))


def plain(scenario: str) -> Ended:
    """The scenario without us."""
    return run([*RANKS, TRAIN, scenario])


def recording(out: Path, *options: str) -> list[str]:
    """The words of `record`, before the command that it is to run."""
    return [*COLLECTORS, "record", "--out", str(out), *WINDOW, *options, "--"]


def recorded(scenario: str, out: Path, *options: str, **environment: str) -> Ended:
    """The scenario under `record`, its script unchanged."""
    return run([*recording(out, *options), *RANKS, TRAIN, scenario], **environment)


def names(folder: Path) -> list[str]:
    """The files in the folder, without hidden drafts; each packed one is whole."""
    for path in folder.rglob("*.json.gz"):
        contents(path)
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def drafts(folder: Path) -> list[str]:
    """The hidden files in the folder: of a recording that was cut off."""
    return sorted(path.name for path in folder.glob(".*"))


def contents(path: Path) -> Any:
    """What a packed file holds. Raises where it is not whole."""
    with gzip.open(path) as file:
        return json.load(file)


def steps(folder: Path, rank: int) -> list[int]:
    """The steps that the trace of the rank holds."""
    events = contents(folder / f"rank{rank}_trace.json.gz")["traceEvents"]
    marks = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return sorted(int(name[13:]) for name in marks if name.startswith("ProfilerStep#"))

"""Measures what recording costs a training: python tests/benchmarks/overhead.py

Standing by, recording beside torch.profiler alone, and each setting. Prints three tables. Ends with
1 where a target is missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import busy
from benchmarks.table import in_markdown

HOOK_US, STEP_RATIO, STALL_RATIO = 20.0, 1.1, 1.0
"""A step under standby; a recorded step and the end of the window, of torch.profiler alone."""
STEPS = 10
"""Recorded in a block, after one of warmup."""
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "shapes": {"record_shapes": True},
    "memory": {"profile_memory": True},
    "stacks": {"with_stack": True},
    "thin": {"ranks": "auto"},
}
MODES = ("off", "torch", *SETTINGS)
_HERE = str(Path(__file__).resolve())
_SITE = str(Path(__file__).resolve().parents[2] / "collectors" / "site")


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in one mode: each step, the call that ends the window, all of it, in seconds.

    wall_s lasts until the files are there; json_bytes and gz_bytes are those of the trace.
    """

    mode: str
    step_s: float
    stall_s: float
    wall_s: float
    json_bytes: int = 0
    gz_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some ratios, and their quartiles."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every target is met, 1 where one is missed; a quick run is not judged."""
    args = _arguments(argv)
    if args.program:
        PROGRAMS[args.program](args.turns)
        return 0
    begin = busy.now()
    standby, turns = measured_standby(args.turns), args.turns
    blocks = {title: blocks_of(program, turns) for program, title in TRAININGS.items()}
    sys.stdout.write(f"{_conditions(begin)}\n\n{_standby_table(standby)}\n\n")
    sys.stdout.write(f"{_window_table(blocks)}\n\n{_settings_table(blocks)}\n")
    failures = () if args.quick else missed(standby, blocks)
    sys.stdout.writelines(f"{line}\n" for line in failures)
    return 1 if failures else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what recording costs.")
    parser.add_argument("--turns", type=int, default=20, metavar="N", help="of each mode (20)")
    parser.add_argument("--quick", action="store_true", help="nothing is judged")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# What is measured in processes of their own.


def training_of_ops(turns: int) -> None:
    """One process, bound by its ops: some 1,000 a step, each on 16 numbers."""
    import torch

    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=1e-6)

    def step() -> None:
        value = weight
        for _ in range(80):
            value = torch.tanh(value @ weight + 0.1)
        value.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    _tell_blocks(step, turns, [mode for mode in MODES if mode != "thin"])


def training_of_two_ranks(turns: int) -> None:
    """A rank of two under DistributedDataParallel: six layers, 1.6 MB of gradients."""
    import torch
    from torch import distributed, nn

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(64, 256)

    def step() -> None:
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    _tell_blocks(step, turns, MODES)
    distributed.destroy_process_group()


def training_of_nothing(turns: int) -> None:
    """Tells the median of small steps in us; nothing of ours is in this script."""
    import torch

    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    seconds = []
    for _ in range(2000):
        begin = time.perf_counter()
        (weight @ weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    _tell(median(seconds[200:]) * 1e6)


def hooks_alone(turns: int) -> None:
    """Tells the us that the agent's hooks take around a step, called as torch calls them."""
    import torch
    from torch.optim import optimizer as module

    from stepsplit.collectors.attach.agent import Agent
    from stepsplit.collectors.record.plan import RecordPlan

    Agent(RecordPlan(out="nowhere", name="standby", first=None)).install()
    stepping = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    before = list(module._global_optimizer_pre_hooks.values())
    after = list(module._global_optimizer_post_hooks.values())

    def batch() -> float:
        begin = time.perf_counter()
        for _ in range(5000):
            for hook in before:
                hook(stepping, (), {})
            for hook in after:
                hook(stepping, (), {})
        return (time.perf_counter() - begin) / 5000 * 1e6

    _tell([batch() for _ in range(21)][1:])


PROGRAMS: dict[str, Callable[[int], None]] = {
    "ops": training_of_ops,
    "ranks": training_of_two_ranks,
    "nothing": training_of_nothing,
    "hooks": hooks_alone,
}
TRAININGS = {"ops": "1,000 small ops", "ranks": "DDP, 2 ranks"}


def _tell_blocks(step: Callable[[], None], turns: int, modes: Sequence[str]) -> None:
    """Runs all modes in turn, forwards and backwards, and tells of every block."""
    from stepsplit.collectors.record import plan

    plan.SMALL_JOB = 0  # so that a rank of a small job can be thin
    for _ in range(20):
        step()
    order = [list(modes)[:: 1 if turn % 2 else -1] for turn in range(turns)]
    _tell([asdict(_block(mode, step)) for modes in order for mode in modes])


def _block(mode: str, step: Callable[[], None]) -> Block:
    with tempfile.TemporaryDirectory() as folder:
        _together()
        begin = time.perf_counter()
        steps, stall = _recorded(mode, step, Path(folder))
        wall = time.perf_counter() - begin
        trace = next(Path(folder).glob("*trace.json.gz"), None)
        packed = trace.read_bytes() if trace else b""
    # The step that ends the window is the stall's; the one before it is a step like any.
    return Block(mode, median(steps), stall, wall, len(gzip.decompress(packed)), len(packed))


def _recorded(mode: str, step: Callable[[], None], folder: Path) -> tuple[list[float], float]:
    """The seconds of each recorded step, marking included, and of the call that ends the window."""
    seconds = []
    with _recorder(mode, folder) as mark:
        step()
        mark()
        for number in range(STEPS):
            begin = time.perf_counter()
            step()
            done = time.perf_counter()
            mark()
            last = number == STEPS - 1
            seconds.append((done if last else time.perf_counter()) - begin)
        return seconds, time.perf_counter() - done


@contextmanager
def _recorder(mode: str, folder: Path) -> Iterator[Callable[[], None]]:
    """What is to be called after each step."""
    from torch.profiler import ProfilerActivity, profile, schedule

    from stepsplit.collectors import profile_run

    def export(done: profile) -> None:
        done.export_chrome_trace(str(folder / "rank_trace.json.gz"))

    if mode == "off":
        yield lambda: None
    elif mode == "torch":
        plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
        with profile(
            activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=export
        ) as own:
            yield own.step
    else:
        # One name: by it the ranks find each other, though each has a folder of its own.
        own_run = profile_run(folder, name="run", wait=0, active=STEPS, **SETTINGS[mode])
        with own_run as run:
            yield run.step


def _together() -> None:
    """Waits for the other ranks."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.barrier()


def _tell(found: object) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")


# What the processes tell.


@dataclass(frozen=True, slots=True)
class Standby:
    """What it costs to stand by: us around a step, us of a step without and with, ms at a start."""

    hooks_us: Spread
    without_us: tuple[float, ...]
    with_us: tuple[float, ...]
    start_ms: Spread


def measured_standby(turns: int) -> Standby:
    """Hooks alone, then a training and a start of Python, each without and with, in turn."""
    _say("standing by")
    pairs = [
        (_run_program("nothing"), _run_program("nothing", standby=True))
        for _ in range(max(1, turns // 4))
    ]
    starts = [_start_s({"PYTHONPATH": _SITE, "STEPSPLIT_PLAN": "{}"}) - _start_s({})
              for _ in range(2 * turns)]  # fmt: skip
    return Standby(
        hooks_us=_spread(_run_program("hooks")),
        without_us=tuple(without for without, _ in pairs),
        with_us=tuple(beside for _, beside in pairs),
        start_ms=_spread([seconds * 1e3 for seconds in starts]),
    )


def blocks_of(program: str, turns: int) -> tuple[Block, ...]:
    """What the last rank of the training tells."""
    _say(TRAININGS[program])
    size = 2 if program == "ranks" else 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_started(program, turns, _rank(rank, size, port)) for rank in range(size)]
    printed = [_last_line(rank) for rank in ranks]
    return tuple(Block(**block) for block in printed[-1])


def ratios(blocks: Sequence[Block], mode: str, base: str, field: str) -> Spread:
    """Of the blocks of one turn, one to the other."""
    both = zip(_of(blocks, mode, field), _of(blocks, base, field), strict=True)
    return _spread([one / other for one, other in both])


def missed(standby: Standby, blocks: dict[str, tuple[Block, ...]]) -> tuple[str, ...]:
    """A sentence for each target that is not met."""
    found = [("standing by: us a step", standby.hooks_us.median, HOOK_US)]
    for title, each in blocks.items():
        for field, limit in (("step_s", STEP_RATIO), ("stall_s", STALL_RATIO)):
            ratio = ratios(each, "default", "torch", field).median
            found.append((f"{title}: {field} of torch.profiler", ratio, limit))
    return tuple(
        f"missed: {what} <= {limit:g}, measured {value:.3g}"
        for what, value, limit in found
        if value > limit
    )


def _of(blocks: Sequence[Block], mode: str, field: str) -> list[float]:
    return [getattr(block, field) for block in blocks if block.mode == mode]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(*(quantiles(values, n=4) if len(values) > 1 else values * 3))


def _run_program(program: str, standby: bool = False) -> Any:
    words = [sys.executable, "-m", "stepsplit.collectors", "record", "--standby", "--out"]
    with tempfile.TemporaryDirectory() as folder:
        before = [*words, folder, "--"] if standby else []
        return _last_line(_started(program, 1, {}, before))


def _started(
    program: str, turns: int, environment: dict[str, str], before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, _HERE, "--program", program, "--turns", str(turns)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _last_line(process: subprocess.Popen[str]) -> Any:
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with {process.returncode}")
    return json.loads(printed.splitlines()[-1])


def _rank(rank: int, size: int, port: int) -> dict[str, str]:
    if size == 1:
        return {}
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    printed = {name: str(value) for name, value in own.items()}
    return printed | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _start_s(environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=os.environ | environment, check=True)
    return time.perf_counter() - begin


# The tables.


def _standby_table(found: Standby) -> str:
    change = median(found.with_us) / median(found.without_us)
    met = "met" if found.hooks_us.median <= HOOK_US else "MISSED"
    pair = f"{median(found.without_us):.0f} us, {median(found.with_us):.0f} us"
    return in_markdown(
        [
            ("standing by", "measured", "target"),
            ("hooks around a step", f"{found.hooks_us} us", f"<= {HOOK_US:g} us: {met}"),
            ("a small step without, with", f"{pair}: {change:.2f}", ""),
            ("a start of Python", f"+{found.start_ms} ms", ""),
        ]
    )


def _window_table(blocks: dict[str, tuple[Block, ...]]) -> str:
    head = ("recording", "step, ms", "x unrecorded", "x torch", "end, ms", "torch's end, ms",
            "end x torch", "wall x torch", "target")  # fmt: skip
    return in_markdown([head, *(_window_row(title, each) for title, each in blocks.items())])


def _window_row(title: str, blocks: tuple[Block, ...]) -> tuple[str, ...]:
    step, stall = (ratios(blocks, "default", "torch", name) for name in ("step_s", "stall_s"))
    is_met = step.median <= STEP_RATIO and stall.median <= STALL_RATIO
    return (
        title,
        f"{median(_of(blocks, 'default', 'step_s')) * 1e3:.1f}",
        str(ratios(blocks, "default", "off", "step_s")),
        str(step),
        f"{median(_of(blocks, 'default', 'stall_s')) * 1e3:.0f}",
        f"{median(_of(blocks, 'torch', 'stall_s')) * 1e3:.0f}",
        str(stall),
        str(ratios(blocks, "default", "torch", "wall_s")),
        f"step <= {STEP_RATIO:g}, end <= {STALL_RATIO:g}: {'met' if is_met else 'MISSED'}",
    )


def _settings_table(blocks: dict[str, tuple[Block, ...]]) -> str:
    head = ("setting", "training", "step x unrecorded", "x torch", "end, ms", "JSON KB a step",
            "gz KB a step")  # fmt: skip
    rows = [
        _setting_row(mode, title, each)
        for title, each in blocks.items()
        for mode in MODES
        if mode != "off" and _of(each, mode, "step_s")
    ]
    return in_markdown([head, *rows])


def _setting_row(mode: str, title: str, blocks: tuple[Block, ...]) -> tuple[str, ...]:
    return (
        "torch.profiler alone" if mode == "torch" else mode,
        title,
        str(ratios(blocks, mode, "off", "step_s")),
        str(ratios(blocks, mode, "torch", "step_s")),
        f"{median(_of(blocks, mode, 'stall_s')) * 1e3:.0f}",
        f"{median(_of(blocks, mode, 'json_bytes')) / STEPS / 1e3:.0f}",
        f"{median(_of(blocks, mode, 'gz_bytes')) / STEPS / 1e3:.1f}",
    )


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _conditions(begin: busy.Clock) -> str:
    """On what, by which versions, and how busy others kept it."""
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    libraries = ", ".join(f"{name} {version(name)}" for name in ("stepsplit", "torch"))
    others = f"others kept {busy.now().others_cores(begin):.1f} cores busy"
    return (
        f"{os.cpu_count()} cores ({cpu}), Python {platform.python_version()}, {libraries}; {others}"
    )


if __name__ == "__main__":
    sys.exit(main())

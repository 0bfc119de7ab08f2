"""python inject.py FAULT FOLDER TURN SCRIPT [ARGUMENT ...]: runs a training script with a fault.

The script knows nothing of the fault. At its end each rank writes rank{rank}.json: when each
optimizer step ended, by time.perf_counter. TURN is 0 or 1: two jobs take turns, the first one
begins. Their folders lie in one, by which they see each other's progress. Or it is "alone".
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sizes import (
    BUCKET_MB,
    EXTRA_BYTES,
    FORWARD_SLEEP_S,
    LAYER_CLASSES,
    LOADER_SLEEP_S,
    MICROBATCHES,
    RECORDED_TURN,
    STEPS,
    TURN_BEGINS,
    UNEVEN,
)
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

RANK = int(os.environ["RANK"])
PATIENCE_S = 600.0


def clean() -> None:
    """No fault."""


def slow_forward() -> None:
    """Rank 1 sleeps in the forward of its first block."""
    if RANK == 1:
        _before_first_block(lambda: time.sleep(FORWARD_SLEEP_S / _count_forwards()))


def slow_loader() -> None:
    """Rank 0 sleeps whenever its DataLoader, or nanoGPT's get_batch, fetches a batch."""
    if RANK == 0:
        kind = dataloader._SingleProcessDataLoaderIter
        kind._next_data = _run_before(kind._next_data, lambda: time.sleep(LOADER_SLEEP_S))
        np.memmap = _run_before(np.memmap, lambda: time.sleep(LOADER_SLEEP_S))


def extra_all_reduce() -> None:
    """Both ranks sum a buffer in the forward.

    In a pipeline, where that would be a deadlock, before the optimizer.
    """
    buffer = torch.zeros(EXTRA_BYTES // 4)
    if _count_forwards() > 1:
        register_optimizer_step_pre_hook(lambda *_: distributed.all_reduce(buffer))
    else:
        _before_first_block(lambda: distributed.all_reduce(buffer))


def small_buckets() -> None:
    """Gradients are reduced in tiny buckets: of DistributedDataParallel, or of DeepSpeed."""
    kind = nn.parallel.DistributedDataParallel
    kind.__init__ = _call_with(kind.__init__, bucket_cap_mb=BUCKET_MB)
    deepspeed = sys.modules.get("deepspeed") or _import_if_used("deepspeed")
    if deepspeed is not None:
        deepspeed.initialize = _shrink_buckets(deepspeed.initialize)


def small_shards() -> None:
    """Each layer within a block is an FSDP unit of its own, with its own all_gather and
    reduce_scatter."""
    from torch.distributed import fsdp
    from transformers.pytorch_utils import Conv1D

    whole = fsdp.fully_shard

    def shard(module: nn.Module, **options: Any) -> nn.Module:
        for part in module.modules() if _is_block(module) else ():
            if isinstance(part, nn.LayerNorm | Conv1D):
                whole(part, **options)
        return whole(module, **options)

    fsdp.fully_shard = shard


def uneven_batch() -> None:
    """Rank 1 trains on half as many samples more."""
    kind = fetch._MapDatasetFetcher
    real = kind.fetch

    def fetch_more(self: Any, index: Any) -> Any:
        return real(self, [*index, *index[: round(len(index) * (UNEVEN - 1))]])

    if RANK == 1:
        kind.fetch = fetch_more


@dataclass(frozen=True, slots=True)
class Turns:
    """Two jobs that take turns; own is 0 or 1. Ranks mark in `folder`, that of the job, what they
    have ended."""

    folder: Path
    own: int

    def end_step(self, done: int) -> None:
        """After so many steps: where a turn ends, waits until the other job has run its own, and
        at the end until that has ended, too."""
        if done == STEPS:
            self._mark(len(TURN_BEGINS))
            self._await(1 - self.own, len(TURN_BEGINS))
        elif done in TURN_BEGINS:
            begun = TURN_BEGINS.index(done)
            if begun == RECORDED_TURN + 1:
                _wait_for([self.folder / "recording" / f"rank{RANK}_trace.json.gz"])
            self._mark(begun)
            self._await(1 - self.own, begun + self.own)

    def _mark(self, turns: int) -> None:
        (self.folder.parent / f"job{self.own}_rank{RANK}_turns{turns}").touch()

    def _await(self, job: int, turns: int) -> None:
        """Waits until both ranks of the job have ended so many turns."""
        _wait_for([self.folder.parent / f"job{job}_rank{rank}_turns{turns}" for rank in (0, 1)])


def _wait_for(files: Sequence[Path]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            raise TimeoutError(f"no {', '.join(map(str, files))}")
        time.sleep(0.01)


def _is_block(module: nn.Module) -> bool:
    """Whether it is a repeated layer of the model; FSDP derives classes of its own."""
    return any(kind.__name__ in LAYER_CLASSES for kind in type(module).mro())


def _count_forwards() -> int:
    """The forwards of a step of this script."""
    return MICROBATCHES if "pipelining" in sys.argv[0] else 1


def _before_first_block(act: Callable[[], object]) -> None:
    """Act whenever the block that this rank runs first begins its forward."""
    chosen: list[nn.Module] = []

    def hook(module: nn.Module, inputs: Any) -> None:
        if module.training and _is_block(module):
            if not chosen:
                chosen.append(module)
            if module is chosen[0]:
                act()

    register_module_forward_pre_hook(hook)


def _run_before(real: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        act()
        return real(*args, **options)

    return call


def _call_with(real: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        return real(*args, **options | fixed)

    return call


def _import_if_used(name: str) -> Any:
    return __import__(name) if name in sys.argv[0] else None


def _shrink_buckets(real: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(*args: Any, config: dict[str, Any], **options: Any) -> Any:
        config["zero_optimization"]["reduce_bucket_size"] = 1
        return real(*args, config=config, **options)

    return initialize


FAULTS = {
    fault.__name__: fault
    for fault in (
        clean, slow_forward, slow_loader, extra_all_reduce, small_buckets, small_shards,
        uneven_batch,
    )
}  # fmt: skip


def main(fault: str, folder: str, turn: str, script: str, *arguments: str) -> None:
    """Runs the script as __main__, with its own folder first on the path."""
    ends: list[float] = []
    turns = None if turn == "alone" else Turns(Path(folder), int(turn))

    def end_step(*_: object) -> None:
        ends.append(time.perf_counter())
        if turns is not None:
            turns.end_step(len(ends))

    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    register_optimizer_step_post_hook(end_step)
    FAULTS[fault]()
    runpy.run_path(script, run_name="__main__")
    (Path(folder) / f"rank{RANK}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])

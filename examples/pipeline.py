"""Pipeline parallelism: each rank holds some layers, and microbatches pass from rank to rank.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py --schedule interleaved
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from job import LEARNING_RATE, MICRO_BATCH, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, SHAPE, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order a rank runs its microbatches, and which stages it holds.

    A rank that holds two stages holds the r-th from either end (a V), or every p-th.
    """

    kind: type[Any]
    stages: int = 1
    v_shaped: bool = False

    def held_by(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The stages of one of so many ranks."""
        if self.v_shaped:
            return rank, 2 * ranks - 1 - rank
        return tuple(range(rank, self.stages * ranks, ranks))


SCHEDULES = {
    # All of a microbatch before the next begins: a schedule of one microbatch, many times over.
    "naive": Schedule(ScheduleGPipe),
    "gpipe": Schedule(ScheduleGPipe),
    "1f1b": Schedule(Schedule1F1B),
    "interleaved": Schedule(ScheduleInterleaved1F1B, stages=2),
    "zero-bubble": Schedule(ScheduleInterleavedZeroBubble),
    "zb-v": Schedule(ScheduleZBVZeroBubble, stages=2, v_shaped=True),
    "dualpipe-v": Schedule(ScheduleDualPipeV, stages=2, v_shaped=True),
}


class Pipeline:
    """One rank's stages, and the schedule that runs them."""

    def __init__(
        self,
        name: str,
        microbatches: int,
        mesh: DeviceMesh,
        device: torch.device,
        prepare: Callable[[GPT], nn.Module] = lambda stage: stage,
    ) -> None:
        schedule, ranks = SCHEDULES[name], mesh.size()
        held, count = schedule.held_by(mesh.get_local_rank(), ranks), schedule.stages * ranks
        if SHAPE.layers % count:
            raise SystemExit(f"{SHAPE.layers} layers cannot be cut into {count} stages")
        self.modules = nn.ModuleList(prepare(GPT(SHAPE, i, count).to(device)) for i in held)
        stages = [
            PipelineStage(module, i, count, device, group=mesh.get_group())
            for module, i in zip(self.modules, held, strict=True)
        ]
        self.first, self.last = 0 in held, count - 1 in held
        self.rounds = microbatches if name == "naive" else 1
        self.schedule = schedule.kind(
            stages[0] if issubclass(schedule.kind, PipelineScheduleSingle) else stages,
            microbatches // self.rounds,
            loss_fn=lambda scores, targets: loss_of(scores, targets) / self.rounds,
        )

    def run(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward of all microbatches; the rank of the last stage gets their loss."""
        losses: list[Tensor] = []
        for x, y in zip(tokens.chunk(self.rounds), targets.chunk(self.rounds), strict=True):
            found: list[Tensor] = []
            inputs = (x,) if self.first else ()
            wanted = {"target": y, "losses": found} if self.last else {}
            self.schedule.step(*inputs, return_outputs=False, **wanted)
            losses += found
        return torch.stack(losses).mean() * self.rounds if losses else None


def main() -> None:
    parser = command_line(__doc__, "pipeline")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of a step")
    options = parser.parse_args()
    device = join()
    mesh = mesh_of(device, pp=-1)
    pipeline = Pipeline(options.schedule, options.microbatches, mesh, device)
    optimizer = torch.optim.Adam(pipeline.modules.parameters(), lr=LEARNING_RATE)

    def train_step(step: int) -> Tensor | None:
        read = batch(step, device, sequences=options.microbatches * MICRO_BATCH)
        loss = pipeline.run(read.tokens, read.targets)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(
        options,
        mesh,
        train_step,
        training_of(mesh, "torch", options.microbatches, options.schedule),
    )


if __name__ == "__main__":
    main()

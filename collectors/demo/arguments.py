"""The arguments of the demo training and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from stepsplit.collectors.formats.run_spec import MESH_AXES, Mesh

FOLLOW_STDIN = "STEPSPLIT_FOLLOW_STDIN"


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

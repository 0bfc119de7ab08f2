"""How the demo training is set up: Recipe, and its command line in and out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from stepsplit.collectors.run_spec import SHORTHAND, Mesh

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
        prog="python -m stepsplit.collectors.workload",
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

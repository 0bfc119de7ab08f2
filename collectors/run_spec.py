"""What ran: RunSpec, Mesh and ModelSpec, and run.json in and out."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

SCHEMA = "stepsplit.run/1"
_T = TypeVar("_T")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SHORTHAND = {"dp": "dp_replicate", "fsdp": "dp_shard"}


@dataclass(frozen=True, slots=True)
class Mesh:
    """The grid of ranks: axis names and sizes, outermost first. Order is data: frameworks differ.

    Rank r sits at the coordinates of r in row-major order, so the last axis varies fastest.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"a mesh needs one size for each distinct axis, not {self}")
        unknown = set(self.axes) - set(AXES)
        if unknown:
            raise ValueError(f"unknown mesh axis {sorted(unknown)}; known are {', '.join(AXES)}")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"every mesh axis has at least one rank, not {self}")

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Self:
        """The mesh of {axis: size}, outermost first; "dp" and "fsdp" are short."""
        return cls(tuple(SHORTHAND.get(axis, axis) for axis in sizes), tuple(sizes.values()))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along the axis; 1 for an axis that the mesh does not have."""
        return dict(zip(self.axes, self.sizes, strict=True)).get(axis, 1)

    def coordinate(self, rank: int, axis: str) -> int:
        """Where the rank sits along the axis; 0 for an axis that the mesh does not have."""
        if axis not in self.axes:
            return 0
        position = self.axes.index(axis)
        return rank // math.prod(self.sizes[position + 1 :]) % self.sizes[position]

    def line(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along the axis alone, itself included, in order."""
        if axis not in self.axes:
            return (rank,)
        position = self.axes.index(axis)
        stride = math.prod(self.sizes[position + 1 :])
        first = rank - self.coordinate(rank, axis) * stride
        return tuple(first + i * stride for i in range(self.sizes[position]))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder transformer; None where it is not known.

    The words are those of RUN.toml: learned_positions is how many (0: rotary or none), norm "rms"
    has a scale alone and "layer" a shift beside it, whatever it divides by.
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool | None = None
    vocab: int | None = None
    tied: bool | None = None
    parameters: int | None = None
    learned_positions: int | None = None
    norm: str | None = None
    biases: bool | None = None
    experts: int | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """How a step is made: micro_batch in sequences a microbatch, global_batch a step.

    The words are those of RUN.toml: dtype "bf16", zero 0 to 3, recompute "full", offload what of
    the states lives in host memory, such as "optimizer" or "optimizer, parameters". split_vocab:
    tensor parallelism cuts embedding and head too; root_unit: FSDP gathers what is in no layer as
    one unit; bucket_bytes is DDP's.
    """

    seq_len: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    microbatches: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    schedule: str | None = None
    framework: str | None = None
    zero: int | None = None
    recompute: str | None = None
    offload: str | None = None
    split_vocab: bool | None = None
    root_unit: bool | None = None
    bucket_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where one rank ran."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One process group: its name in the job, its description, its global ranks in order."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One machine: its processor and, where it has any, its GPUs (all alike)."""

    host: str
    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    gpu: str | None = None
    gpus: int = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What ran and what was seen of it: the content of run.json."""

    name: str
    world_size: int
    backend: str
    mesh: Mesh | None = None
    model: ModelSpec | None = None
    training: Training | None = None
    ranks: tuple[RankInfo, ...] = ()
    groups: tuple[GroupInfo, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    hosts: tuple[HostInfo, ...] = ()

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.world_size != self.world_size:
            pairs = zip(self.mesh.axes, self.mesh.sizes, strict=True)
            product = " x ".join(f"{axis}={size}" for axis, size in pairs)
            raise ValueError(
                f"the mesh {product} has {self.mesh.world_size} ranks, the job {self.world_size}"
            )

    def version(self, of: str) -> str | None:
        """The version of torch, nccl, driver or python, None where it was not seen."""
        return dict(self.versions).get(of)


def to_json(spec: RunSpec) -> str:
    """run.json's text."""
    body: dict[str, Any] = {"schema": SCHEMA} | asdict(spec)
    if spec.mesh is not None:
        pairs = zip(spec.mesh.axes, spec.mesh.sizes, strict=True)
        body["mesh"] = [{"axis": axis, "size": size} for axis, size in pairs]
    body["versions"] = dict(spec.versions)
    return json.dumps(body, indent=1) + "\n"


def from_json(text: str | bytes) -> RunSpec:
    """The RunSpec of run.json's text. Raises ValueError where the text is none."""
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} file")
    mesh = body.get("mesh")
    try:
        return RunSpec(
            name=str(body["name"]),
            world_size=int(body["world_size"]),
            backend=str(body["backend"]),
            mesh=None if mesh is None else Mesh.of({m["axis"]: int(m["size"]) for m in mesh}),
            model=known(ModelSpec, body.get("model")),
            training=known(Training, body.get("training")),
            ranks=tuple(RankInfo(**named(RankInfo, r)) for r in body.get("ranks", ())),
            groups=tuple(group_of(g) for g in body.get("groups", ())),
            versions=tuple((str(k), str(v)) for k, v in body.get("versions", {}).items()),
            hosts=tuple(HostInfo(**named(HostInfo, h)) for h in body.get("hosts", ())),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is missing or odd: {error}") from error


def merged_groups(groups: Iterable[GroupInfo]) -> tuple[GroupInfo, ...]:
    """The groups, each once, in order of creation where their names are numbers."""
    return tuple(sorted(set(groups), key=_creation))


def _creation(group: GroupInfo) -> tuple[bool, int, str, tuple[int, ...]]:
    numbered = group.name.isdigit()
    return not numbered, int(group.name) if numbered else 0, group.name, group.ranks


def write_run_json(folder: Path, spec: RunSpec) -> Path:
    """Writes run.json into the folder, whole or not at all."""
    return write_whole(folder / "run.json", to_json(spec).encode())


def write_whole(path: Path, content: bytes) -> Path:
    """Writes the file so that a reader sees all of it or none."""
    with whole_file(path) as file:
        file.write(content)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, of which a reader sees all or nothing: write, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def group_of(body: Mapping[str, Any]) -> GroupInfo:
    """The group of its fields. Raises KeyError, TypeError or ValueError where one is odd."""
    return GroupInfo(str(body["name"]), str(body["description"]), tuple(map(int, body["ranks"])))


def named(kind: type, body: Mapping[str, Any]) -> dict[str, Any]:
    """Of a newer file's fields, those that this version knows."""
    return {field.name: body[field.name] for field in fields(kind) if field.name in body}


def known(kind: type[_T], body: Mapping[str, Any] | None) -> _T | None:
    """The noun of the body's fields; a field that this version does not know is passed over."""
    return None if body is None else kind(**named(kind, body))

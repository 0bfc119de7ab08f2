"""What ran: RunSpec, Mesh and ModelSpec, and run.json in and out."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar, get_args

SCHEMA = "stepsplit.run/1"
_T = TypeVar("_T")
Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
"""What ranks are grouped along: the axes of a mesh, and ep, along which experts lie."""
AXES: tuple[Axis, ...] = get_args(Axis)
"""Outermost first: neighbors in the innermost axis communicate most."""
MESH_AXES = tuple(axis for axis in AXES if axis != "ep")
DATA_PARALLEL: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
SHORTHAND = {"dp": "dp_replicate", "fsdp": "dp_shard"}
_DESCRIPTOR = re.compile(r"/proc/(?P<pid>\d+)(/task/\d+)?/fd/(?P<number>\d+)")
_MOST_LINKS = 40
"""Symbolic links in a path, as for Linux."""


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
        unknown = set(self.axes) - set(MESH_AXES)
        if unknown:
            raise ValueError(
                f"unknown mesh axis {sorted(unknown)}; known are {', '.join(MESH_AXES)}"
            )
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

    The words are those of job.toml: learned_positions is how many (0: rotary or none), norm "rms"
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

    The words are those of job.toml: dtype "bf16", zero 0 to 3, recompute "full", offload what of
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
    """Writes the file so that a reader sees all of it or none, as whole_file does."""
    with whole_file(path) as file:
        file.write(content)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, of which a reader sees all or nothing; every output is written by this.

    A regular file is written beside its place, synced, and renamed: see replace_whole. Anything
    else is opened and written as it is: see open_special.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    special = open_special(path)
    if special is not None:
        with special:
            yield special
        return
    with replace_whole(path) as draft, draft.open("wb") as file:
        yield file


@contextmanager
def replace_whole(path: Path) -> Iterator[Path]:
    """A draft to write, which is synced and takes the place of the file when all is written.

    Of a symbolic link the file that it leads to is replaced, not the link. A file that was there
    keeps its mode, and its owner as far as the system permits. Where the path is a device, a pipe
    or a socket the draft is the path itself, and nothing is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_special(path):
        yield path
        return
    target = path.resolve() if path.is_symlink() else path
    # Two threads may write one file at a time.
    draft = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
    known = target.stat() if target.exists() else None
    try:
        # Nobody reads a draft who may not read the file.
        mode = 0o666 if known is None else stat.S_IMODE(known.st_mode) & 0o777 | stat.S_IWUSR
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        _sync(draft)
        if known is not None:
            _set_owner_and_mode(draft, known)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def open_special(path: Path) -> BinaryIO | None:
    """Opens what must not be replaced: a device, a pipe, /dev/stdout. None for a regular file.

    /dev/stdout, /dev/fd/N and /proc/self/fd/N are written through the open descriptor, after what
    was written to it before. Raises OSError where the place cannot be opened.
    """
    if (descriptor := _descriptor(path)) is not None:
        if descriptor["pid"] == Path("/proc/self").resolve().name:
            return os.fdopen(os.dup(int(descriptor["number"])), "wb")
    elif not _is_special(path):
        return None
    # Without O_CREAT: Linux refuses that for another user's pipe in /tmp.
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY), "wb")


def _is_special(path: Path) -> bool:
    try:
        return _descriptor(path) is not None or not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _descriptor(path: Path) -> re.Match[str] | None:
    """The open descriptor of a process that the path leads to, whatever that is open on."""
    for _ in range(_MOST_LINKS):
        found = _DESCRIPTOR.fullmatch(str(path.parent.resolve() / path.name))
        if found or not path.is_symlink():
            return found
        path = path.parent / path.readlink()
    return None


def _set_owner_and_mode(draft: Path, known: os.stat_result) -> None:
    made = draft.stat()
    # Only root may give a file away; some file systems have no owners and no modes.
    for uid, gid in ((-1, known.st_gid), (known.st_uid, -1)):
        if uid not in (-1, made.st_uid) or gid not in (-1, made.st_gid):
            with suppress(PermissionError):
                os.chown(draft, uid, gid)
    with suppress(PermissionError):
        draft.chmod(stat.S_IMODE(known.st_mode))


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_WRONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def group_of(body: Mapping[str, Any]) -> GroupInfo:
    """The group of its fields. Raises KeyError, TypeError or ValueError where one is odd."""
    return GroupInfo(str(body["name"]), str(body["description"]), tuple(map(int, body["ranks"])))


def named(kind: type, body: Mapping[str, Any]) -> dict[str, Any]:
    """Of a newer file's fields, those that this version knows."""
    return {field.name: body[field.name] for field in fields(kind) if field.name in body}


def known(kind: type[_T], body: Mapping[str, Any] | None) -> _T | None:
    """The noun of the body's fields; a field that this version does not know is passed over."""
    return None if body is None else kind(**named(kind, body))

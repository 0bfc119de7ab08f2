"""Types that describe a run (RunSpec, Mesh, ModelSpec, Training), and run.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from stepsplit.collectors.formats.json_decode import (
    decode_field,
    decode_value,
    parse_object,
    replace_surrogates,
)
from stepsplit.collectors.safe_io.atomic_file import write_whole

_MAX_DIGITS = 18
"""Of a number in a text: longer ones are no number of this program."""


SCHEMA = "stepsplit.run/1"
Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
"""A parallelism axis: the axes of a mesh, and ep (expert parallelism)."""
AXES: tuple[Axis, ...] = get_args(Axis)
"""Outermost first; neighbors on the innermost axis communicate most."""
MESH_AXES = tuple(axis for axis in AXES if axis != "ep")
DATA_PARALLEL: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
RUN_FILE = "run.json"
"""The file of a recording that describes its run."""
MESH_FILE = "mesh.txt"
"""The file of an upload that states the job's mesh, at its top."""
SHORTHAND = {"dp": "dp_replicate", "fsdp": "dp_shard"}
"""Short names of axes, wherever a user names one: in a mesh, a change, a link or a budget."""
MAX_RANKS = 10_000_000
"""No job is that large: a larger number is damage, and would become lists of that size."""
_COUNTS_FROM_ONE = (
    "layers", "hidden", "heads", "seq_len", "micro_batch", "global_batch", "microbatches",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mesh:
    """The device mesh of a job: axis names and sizes, outermost first.

    The order of the axes is part of the mesh, because frameworks differ in it. Ranks are numbered
    in row-major order: the last axis varies fastest.

    Args:
        axes: Axis names, outermost first, from pp, dp_replicate, dp_shard, cp, tp.
        sizes: Number of ranks along each axis, in the same order.

    Raises:
        ValueError: If an axis is unknown or repeated, a size is below 1, or the numbers of axes and
            sizes differ.

    Examples:
        >>> mesh = Mesh(("pp", "tp"), (2, 4))
        >>> mesh.world_size, mesh.coordinate(5, "pp"), mesh.line(5, "tp")
        (8, 1, (4, 5, 6, 7))
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
            raise ValueError(f"every mesh axis needs at least one rank, not {self}")

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Self:
        """Builds a mesh from a mapping of axis to size.

        Args:
            sizes: {axis: size}, outermost first. "dp" is short for dp_replicate, "fsdp" for
                dp_shard.

        Returns:
            The mesh.

        Raises:
            ValueError: If an axis is unknown or a size is below 1.

        Examples:
            >>> Mesh.of({"fsdp": 8, "tp": 2})
            Mesh(axes=('dp_shard', 'tp'), sizes=(8, 2))
        """
        return cls(tuple(SHORTHAND.get(axis, axis) for axis in sizes), tuple(sizes.values()))

    def format(self) -> str:
        """The mesh as text, as read by `parse`.

        Examples:
            >>> Mesh.of({"pp": 2, "tp": 4}).format()
            'pp=2,tp=4'
        """
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Builds a mesh from a text, as `--mesh` takes it.

        Args:
            text: Axes and sizes, outermost first, with the names that `of` takes.

        Returns:
            The mesh.

        Raises:
            ValueError: If an axis is unknown or given twice, or a size is not a positive number.

        Examples:
            >>> Mesh.parse("pp=2,dp=2,tp=2")
            Mesh(axes=('pp', 'dp_replicate', 'tp'), sizes=(2, 2, 2))
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.strip().partition("=")
            axis = SHORTHAND.get(axis, axis)
            # Python refuses to convert texts of thousands of digits, with an error that does not
            # name the axis.
            is_number = size.isdecimal() and len(size) <= _MAX_DIGITS
            if axis not in MESH_AXES or not is_number or int(size) < 1:
                raise ValueError(
                    f"{part.strip()[:40]!r} is not an axis and a size; use tp=2,pp=2,dp=2 or fsdp=4"
                )
            if axis in sizes:
                raise ValueError(f"{axis} is given twice in {text!r}")
            sizes[axis] = int(size)
        return cls.of(sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`; 1 if the mesh does not have it."""
        return dict(zip(self.axes, self.sizes, strict=True)).get(axis, 1)

    def coordinate(self, rank: int, axis: str) -> int:
        """Returns the coordinate of `rank` along `axis`; 0 if the mesh does not have it."""
        if axis not in self.axes:
            return 0
        position = self.axes.index(axis)
        return rank // math.prod(self.sizes[position + 1 :]) % self.sizes[position]

    def line(self, rank: int, axis: str) -> tuple[int, ...]:
        """Returns the ranks of `rank`'s group along `axis`, itself included, in order."""
        if axis not in self.axes:
            return (rank,)
        position = self.axes.index(axis)
        stride = math.prod(self.sizes[position + 1 :])
        first = rank - self.coordinate(rank, axis) * stride
        return tuple(first + i * stride for i in range(self.sizes[position]))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer.

    The fields have the names and values of job.toml. Every field defaults to None, unknown.

    Args:
        layers: Transformer layers.
        hidden: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key and value heads; fewer than `heads` with grouped-query attention.
        ffn: Width of the MLP.
        gated: Whether the MLP has a gate projection (SwiGLU).
        vocab: Size of the vocabulary.
        tied: Whether the embedding and the output head share weights.
        parameters: Parameters of the whole model, all ranks together.
        learned_positions: Rows of the learned position embedding; 0 for rotary or no positions.
        norm: "rms" (a scale only) or "layer" (a scale and a shift).
        biases: Whether linear layers have biases.
        experts: Experts per mixture-of-experts layer.
        top_k: Experts per token.

    Examples:
        >>> ModelSpec(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True).layers
        32
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
    """The training setup of a run: batch sizes, dtype, optimizer and framework.

    The fields have the names and values of job.toml. Every field defaults to None, unknown.

    Args:
        seq_len: Tokens per sequence.
        micro_batch: Sequences per microbatch of one rank.
        global_batch: Sequences per step, all ranks together.
        microbatches: Microbatches per step of one rank.
        dtype: Compute dtype: "fp32", "bf16", "fp16" or "fp8".
        optimizer: Such as "adam", "adamw" or "sgd".
        schedule: Pipeline schedule, such as "1f1b" or "gpipe".
        framework: Such as "torch", "fsdp2", "ddp", "deepspeed" or "megatron".
        zero: ZeRO stage, 0 to 3.
        recompute: Activation recomputation, such as "full".
        offload: Training state in host memory, such as "optimizer" or "optimizer, parameters".
        split_vocab: Whether tensor parallelism also shards the embedding and the output head.
        root_unit: Whether FSDP gathers the parameters outside of the layers as one unit.
        bucket_bytes: Bucket size of DDP in bytes.

    Examples:
        >>> Training(seq_len=4096, micro_batch=1, global_batch=256, dtype="bf16").global_batch
        256
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
    """Host, process and device of one rank."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str


def is_described(description: str) -> bool:
    """Whether a process group has a description; torch writes "undefined" if it was given none."""
    return description not in ("", "undefined")


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One process group: its name, its description and its global ranks in order."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One machine: its CPU and, if it has any, its GPUs (all of one type)."""

    host: str
    cpu: str = ""
    cores: int = 0
    memory_bytes: int = 0
    gpu: str | None = None
    gpus: int = 0
    gpu_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The description of a run: the content of run.json.

    Args:
        name: Name of the run.
        world_size: Number of ranks of the job.
        backend: Backend of the default process group, such as "nccl"; "none" without one.
        mesh: Parallel layout. Default: None, unknown.
        model: Shape of the model. Default: None, unknown.
        training: Training setup. Default: None, unknown.
        ranks: Host, process and device of each known rank. Default: empty.
        groups: Process groups of the job. Default: empty.
        versions: (name, version) of python, torch, cuda or hip, nccl, cupti and driver. Default:
            empty.
        hosts: Machines of the job. Default: empty.
        max_connections: CUDA_DEVICE_MAX_CONNECTIONS of the job, the queues from a host to its GPU.
            Default: None, not set.
        role: What its ranks do in a job of several roles, such as "rollout". Default: "", the only
            role.
        labels: (name, value) of what else the job is called, such as SLURM_JOB_ID. Default: empty.

    Raises:
        ValueError: If the mesh does not have `world_size` ranks.

    Examples:
        >>> RunSpec("exp1", 8, "nccl", mesh=Mesh(("pp", "tp"), (2, 4))).world_size
        8
    """

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
    max_connections: int | None = None
    role: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_role(self.role)
        if self.mesh is not None and self.mesh.world_size != self.world_size:
            pairs = zip(self.mesh.axes, self.mesh.sizes, strict=True)
            product = " x ".join(f"{axis}={size}" for axis, size in pairs)
            raise ValueError(
                f"the mesh {product} has {self.mesh.world_size} ranks but the job has"
                f" {self.world_size}"
            )

    def version(self, package: str) -> str | None:
        """Returns the version of torch, cuda, hip, nccl, cupti, driver or python, else None."""
        return dict(self.versions).get(package)


_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")

FOLDERS_OF_A_RECORDING = ("nccl", "memory", "tables", "samples", "ranks", "hosts", "launches")
"""Folders of a recording, of its analysis or of a watch: a role's folder lies next to them."""


def is_role(role: str) -> bool:
    """Whether a role may have this name, which is that of a folder and of ranks."""
    return _ROLE.fullmatch(role) is not None and role not in FOLDERS_OF_A_RECORDING


def check_role(role: str) -> None:
    """Raises ValueError unless the role ("": none) can be the name of a folder and of ranks."""
    if role and not is_role(role):
        raise ValueError(
            f"role {role!r}: use up to 32 letters, digits, - and _, and none of"
            f" {', '.join(FOLDERS_OF_A_RECORDING)}"
        )


def to_json(spec: RunSpec) -> str:
    """The text of run.json."""
    body: dict[str, Any] = {"schema": SCHEMA} | asdict(spec)
    if spec.mesh is not None:
        pairs = zip(spec.mesh.axes, spec.mesh.sizes, strict=True)
        body["mesh"] = [{"axis": axis, "size": size} for axis, size in pairs]
    body["versions"] = dict(spec.versions)
    if not spec.role:
        del body["role"]
    put_labels(body, spec.labels)
    return json.dumps(body, indent=1) + "\n"


def from_json(text: str | bytes) -> RunSpec:
    """Decodes the text of run.json. Raises ValueError if it is invalid."""
    body = parse_object(text, SCHEMA)
    mesh = decode_value(body.get("mesh"), tuple[_MeshAxis, ...] | None, "mesh")
    spec = RunSpec(
        name=decode_field(body, "name", str),
        world_size=decode_world_size(body),
        backend=decode_field(body, "backend", str),
        mesh=None if mesh is None else Mesh.of({one.axis: one.size for one in mesh}),
        model=decode_value(body.get("model"), ModelSpec | None, "model"),
        training=decode_value(body.get("training"), Training | None, "training"),
        ranks=decode_value(body.get("ranks", []), tuple[RankInfo, ...], "ranks"),
        groups=decode_value(body.get("groups", []), tuple[GroupInfo, ...], "groups"),
        versions=decode_versions(body),
        hosts=decode_value(body.get("hosts", []), tuple[HostInfo, ...], "hosts"),
        max_connections=decode_value(body.get("max_connections"), int | None, "max_connections"),
        role=decode_value(body.get("role", ""), str, "role"),
        labels=decode_labels(body),
    )
    _check_ranges(spec)
    return spec


def _check_ranges(spec: RunSpec) -> None:
    """Raises ValueError if a number of the run is out of range: negative, no layer, rank 9 of 8."""
    described: list[tuple[str, ModelSpec | Training | HostInfo | None]] = [
        ("model", spec.model),
        ("training", spec.training),
    ]
    described += [(f"hosts[{at}]", host) for at, host in enumerate(spec.hosts)]
    for place, part in described:
        for name, value in asdict(part).items() if part is not None else ():
            least = 1 if name in _COUNTS_FROM_ONE else 0
            if isinstance(value, int) and value < least:
                raise ValueError(f"{place}.{name}: {value} is less than {least}")
    ranks = [(f"ranks[{at}].rank", info.rank) for at, info in enumerate(spec.ranks)]
    for at, group in enumerate(spec.groups):
        ranks += [(f"groups[{at}].ranks", rank) for rank in group.ranks]
    for place, rank in ranks:
        if not 0 <= rank < spec.world_size:
            raise ValueError(f"{place}: {rank} is not a rank of {spec.world_size}")


@dataclass(frozen=True, slots=True)
class _MeshAxis:
    """One entry of the mesh in run.json."""

    axis: str
    size: int


def decode_world_size(body: Mapping[str, Any]) -> int:
    """The world size of run.json or of a rank record. Raises ValueError if it is invalid."""
    world_size = decode_field(body, "world_size", int)
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size: {world_size} is not a number of ranks")
    return world_size


def put_labels(body: dict[str, Any], labels: tuple[tuple[str, str], ...]) -> None:
    """Puts the labels of a job into the body of run.json or of a rank record, if it has any."""
    body["labels"] = dict(labels)
    if not labels:
        del body["labels"]


def decode_labels(body: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The labels of run.json or of a rank record. Raises ValueError if they are invalid."""
    labels = body.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
        raise ValueError("labels: expected an object of texts")
    return tuple(labels.items())


def decode_versions(body: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The versions of run.json or of a rank record. Raises ValueError if they are invalid."""
    versions = body.get("versions", {})
    if not isinstance(versions, dict):
        raise ValueError("versions is not an object")
    return tuple(
        (replace_surrogates(name), replace_surrogates(str(version)))
        for name, version in versions.items()
    )


def merge_groups(groups: Iterable[GroupInfo]) -> tuple[GroupInfo, ...]:
    """The distinct groups, in order of creation if their names are numbers."""
    return tuple(sorted(set(groups), key=_build_creation_key))


# torch numbers groups as they are made; a name that is no such number comes after all of them.
def _build_creation_key(group: GroupInfo) -> tuple[bool, int, str, tuple[int, ...]]:
    numbered = group.name.isdecimal() and len(group.name) <= _MAX_DIGITS
    return not numbered, int(group.name) if numbered else 0, group.name, group.ranks


def write_run_json(folder: Path, spec: RunSpec) -> Path:
    """Writes run.json into the folder atomically."""
    return write_whole(folder / RUN_FILE, to_json(spec).encode())


def decode_group(body: Mapping[str, Any]) -> GroupInfo:
    """Decodes a group. Raises KeyError, TypeError or ValueError if a field is invalid."""
    return GroupInfo(str(body["name"]), str(body["description"]), tuple(map(int, body["ranks"])))

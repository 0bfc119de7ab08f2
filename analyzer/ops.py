"""Names of communication ops, how they are recognized, and their bus bandwidth factors."""

from __future__ import annotations

import re
from functools import lru_cache

MESSAGES = ("send", "recv")

# What turns the bandwidth of a collective's algorithm into that of its bus.


def busbw_factor(op: str, ranks: int) -> float:
    """busbw / algbw, as nccl-tests define it (doc/PERFORMANCE.md of NVIDIA/nccl-tests)."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


# Which collective a name means, and the sizes of what it moves.

_OP_OF = (
    ("all_reduce", re.compile(r"all_?reduce", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("recv", re.compile(r"^(irecv|recv|gloo:recv)", re.I)),
    ("send", re.compile(r"^(isend|send|gloo:send)(?!_?recv)", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
    ("gather", re.compile(r"gather", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
)

_TORCH_NAMES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "short": "int16",
    "short int": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "complexhalf": "complex32",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}

_ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}

_MOST_NAMES = 4096

MOST_CALL_BYTES = 1 << 50
"""No call moves more; a size beyond is odd and taken for unknown."""

_EIGHT_BIT = re.compile(r"float8|fp8", re.I)


@lru_cache(_MOST_NAMES)
def op_named(name: str) -> str:
    """The collective or message that a name means, "unknown" where it means none."""
    return next((op for op, pattern in _OP_OF if pattern.search(name)), "unknown")


@lru_cache(_MOST_NAMES)
def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype as torch or NCCL spells it; -1 for an unknown one."""
    return 1 if _EIGHT_BIT.search(dtype) else _ELEMENT_BYTES.get(dtype_named(dtype), -1)


@lru_cache(_MOST_NAMES)
def dtype_named(dtype: str) -> str:
    """torch's name of a dtype that NCCL or the Flight Recorder spells in C."""
    spelled = dtype.lower().removeprefix("c10::")
    return _TORCH_NAMES.get(spelled, spelled)


def message_bytes(op: str, input_bytes: int, output_bytes: int, group_size: int) -> int:
    """The size by which nccl-tests count a call: the full buffer; -1 where it is not known."""
    if op != "all_gather" or input_bytes < 0:
        return input_bytes
    return input_bytes * group_size if group_size > 0 else output_bytes


def known_bytes(size_bytes: int) -> int:
    """The size, -1 where no call is of such a one."""
    return size_bytes if 0 <= size_bytes <= MOST_CALL_BYTES else -1

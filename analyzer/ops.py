"""Communication ops: recognition by name, message sizes and bus bandwidth factors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MESSAGES = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective does in a ring of n ranks; nccl-tests' busbw factor follows from it
    (doc/PERFORMANCE.md of NVIDIA/nccl-tests; GatherGetBw and ScatterGetBw in its src/).

    rounds: how often n-1 steps are made. keeps_part: a rank's own part, 1/n, crosses no link.
    is_symmetric: all members pass the same size, and their kernels end simultaneously.
    passes_parts: each rank's part passes all others in turn.
    """

    rounds: int = 1
    keeps_part: bool = False
    is_symmetric: bool = False
    passes_parts: bool = False

    def count_fraction(self, ranks: int) -> tuple[int, int]:
        """The bytes that a rank sends, divided by the message size: numerator and denominator."""
        return (self.rounds * (ranks - 1), ranks) if self.keeps_part else (1, 1)

    def format_factor(self, size: str = "") -> str:
        """The same as a formula of n, with the name of the message size."""
        factors = ["2"] * (self.rounds == 2) + [size] * bool(size)
        return " ".join([*factors, *["(n-1)/n"] * self.keeps_part]) or "1"


COLLECTIVES = {
    "all_reduce": Collective(rounds=2, keeps_part=True, is_symmetric=True),
    "all_gather": Collective(keeps_part=True, is_symmetric=True, passes_parts=True),
    "reduce_scatter": Collective(keeps_part=True, is_symmetric=True, passes_parts=True),
    "all_to_all": Collective(keeps_part=True),
    "gather": Collective(keeps_part=True),
    "scatter": Collective(keeps_part=True),
    "broadcast": Collective(),
    "reduce": Collective(),
    "send": Collective(),
    "recv": Collective(),
}

SYMMETRIC_OPS = tuple(op for op, one in COLLECTIVES.items() if one.is_symmetric)


def count_ring_bytes(op: str, ranks: int, message_bytes: int) -> int:
    """Bytes that each rank of a ring sends for a collective of this message size (that of the
    whole buffer of an all_gather or reduce_scatter)."""
    numerator, denominator = COLLECTIVES[op].count_fraction(ranks)
    return message_bytes * numerator // denominator


def compute_busbw_factor(op: str, ranks: int) -> float:
    """busbw / algbw, as nccl-tests define it; 1 for an unknown op."""
    numerator, denominator = COLLECTIVES.get(op, Collective()).count_fraction(ranks)
    return numerator / denominator


def format_factors(ops: Iterable[str], size: str = "") -> list[tuple[str, list[str]]]:
    """The factors of these ops as formulas, each with the ops that have it."""
    by_factor: dict[str, list[str]] = {}
    for op in ops:
        by_factor.setdefault(COLLECTIVES[op].format_factor(size), []).append(op)
    return list(by_factor.items())


# Names of ops and dtypes, and sizes in bytes.

_OP_PATTERNS = (
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

_MAX_NAMES = 4096

MAX_CALL_BYTES = 1 << 50
"""The largest plausible size of a call; a larger one is treated as unknown."""

MAX_DIMS = 64
"""Of a tensor: PyTorch reduces no more, as it keeps a bit for each in one word."""

_EIGHT_BIT = re.compile(r"float8|fp8", re.I)


@lru_cache(_MAX_NAMES)
def parse_op(name: str) -> str:
    """The op of a call or kernel name, "unknown" if it contains none."""
    return next((op for op, pattern in _OP_PATTERNS if pattern.search(name)), "unknown")


@lru_cache(_MAX_NAMES)
def compute_element_bytes(dtype: str) -> int:
    """Bytes per element of a dtype in torch's or NCCL's spelling; -1 for an unknown dtype."""
    return 1 if _EIGHT_BIT.search(dtype) else _ELEMENT_BYTES.get(normalize_dtype(dtype), -1)


@lru_cache(_MAX_NAMES)
def normalize_dtype(dtype: str) -> str:
    """torch's name of a dtype given in the C spelling of NCCL or the Flight Recorder."""
    spelled = dtype.lower().removeprefix("c10::")
    return _TORCH_NAMES.get(spelled, spelled)


def compute_message_bytes(op: str, input_bytes: int, output_bytes: int, group_size: int) -> int:
    """The message size as nccl-tests counts it: the full buffer; -1 if unknown.

    The input of a scatter is the full buffer; in the Flight Recorder only its root has one.
    """
    if op == "scatter" and input_bytes <= 0 < min(output_bytes, group_size):
        return output_bytes * group_size
    if op not in ("all_gather", "gather") or input_bytes < 0:
        return input_bytes
    return input_bytes * group_size if group_size > 0 else output_bytes


def sanitize_bytes(size_bytes: int) -> int:
    """The size, or -1 if it is not plausible."""
    return size_bytes if 0 <= size_bytes <= MAX_CALL_BYTES else -1

"""Reader of the answer of NCCL's RAS to "verbose status": JSON where NCCL has it, else text."""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct


class RasRank(Struct, frozen=True):
    """A rank of a communicator, its process, and how many collectives of each kind it launched."""

    rank: int
    host: str
    pid: int
    collective_counts: dict[str, int] = {}


class RasMissingStatus(Struct, frozen=True):
    """Why a rank did not answer."""

    considered_dead: bool = False


class RasMissingRank(Struct, frozen=True):
    """A rank of a communicator that did not answer."""

    rank: int
    host: str
    pid: int
    status: RasMissingStatus = RasMissingStatus()


class RasCommunicator(Struct, frozen=True):
    """A communicator: its ranks that answered, and those that did not."""

    hash: str
    size: int
    ranks: tuple[RasRank, ...] = ()
    missing_ranks: tuple[RasMissingRank, ...] = ()


class RasStatus(Struct, frozen=True):
    """What NCCL's RAS says of a job. findings: its own sentences, where it answered in text."""

    communicators: tuple[RasCommunicator, ...] = ()
    findings: tuple[str, ...] = ()


_RAS_HEADING = re.compile(r"(#\d+-\d+ \([0-9a-f]+\) )?(INCOMPLETE|ERROR|MISMATCH|DEAD|TIMEOUT)")

RAS_HEAD_BYTES = 4096
"""Read to recognize an answer, which begins within them; chosen, not measured."""

_RAS_TEXT = re.compile(rb"NCCL version \S+ compiled with CUDA.{0,400}^Job summary$", re.S | re.M)

_RAS_JSON = re.compile(rb'\A\s*\{\s*"nccl_version".{0,600}"communicators', re.S)


def is_ras(head: bytes) -> bool:
    """Whether the bytes begin an answer of NCCL's RAS, as ncclras prints it, in text or JSON."""
    return bool(_RAS_TEXT.search(head) or _RAS_JSON.match(head))


def read_ras(text: str) -> RasStatus:
    """Reads an answer of NCCL's RAS; without findings if its text is not known."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=RasStatus)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return RasStatus()
    findings, heading = [], ""
    for line in text.splitlines():
        if _RAS_HEADING.fullmatch(line.strip()):
            heading = line.strip()
        elif not line.startswith("  "):
            heading = "" if line.strip() else heading
        elif heading:
            findings.append(f"{heading}: {line.strip()}")
    return RasStatus(findings=tuple(findings))

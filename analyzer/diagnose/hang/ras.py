"""What NCCL's RAS said of a job, in words, from the files that its answers were saved to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepsplit.analyzer.diagnose.hang.rank_states import MAX_STATE_BYTES, read_heads
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.nccl.ras import (
    RAS_HEAD_BYTES,
    RasCommunicator,
    RasMissingRank,
    RasRank,
    is_ras,
    read_ras,
)
from stepsplit.collectors.formats.rank_state import RAS_NAME

RAS_ALONE = (
    "not known to be a hang: NCCL's RAS counts what ranks have launched at one moment; if a second"
    " answer has the same counts, the ranks with fewer launches are those that others wait for"
)


def describe_ras(places: Sequence[str | Path]) -> tuple[str, ...]:
    """What NCCL's RAS said of the job, in words: ranks that are behind or do not answer."""
    sentences: list[str] = []
    for source, head in read_heads(places, RAS_HEAD_BYTES):
        if source.inner.name != RAS_NAME and not is_ras(head):
            continue
        with open_unpacked(source) as content:
            answer = content.read(RAS_HEAD_BYTES + MAX_STATE_BYTES)
        status = read_ras(answer.decode(errors="replace"))
        sentences += status.findings
        # The largest communicators first: they have most of the job in them.
        for one in sorted(status.communicators, key=lambda each: -each.size):
            for missing in one.missing_ranks:
                dead = missing.status.considered_dead
                what = "is considered dead" if dead else "does not answer"
                sentences.append(f"{_name_ras_rank(missing, one)} {what}")
            for op in dict.fromkeys(op for rank in one.ranks for op in rank.collective_counts):
                most = max(rank.collective_counts.get(op, 0) for rank in one.ranks)
                sentences += [
                    f"{_name_ras_rank(rank, one)} has launched {launched} {op}, others {most}"
                    for rank in one.ranks
                    if (launched := rank.collective_counts.get(op, 0)) < most
                ]
    return tuple(sentences)


def _name_ras_rank(rank: RasRank | RasMissingRank, communicator: RasCommunicator) -> str:
    where = f"rank {rank.rank} of communicator {communicator.hash} of {communicator.size}"
    return f"{where} (process {rank.pid} on {rank.host})"

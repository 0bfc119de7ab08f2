"""One rank's program as it is written down: kernels with noise, calls that wait for each other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.meshes import Fleet
from simulator.program import (
    MAIN,
    Collective,
    Compute,
    Instruction,
    Message,
    Messages,
    Record,
    WaitFor,
)

NOISE = 0.015


@dataclass(frozen=True, slots=True)
class Leg:
    """One message before it is priced: send or recv, and the other end."""

    op: str
    peer: int
    message_bytes: int


class Writer:
    """Writes what one rank does. Noise is drawn from the seed: of compute kernels for this rank
    alone, of transfers so that all members of a call draw the same."""

    def __init__(self, fleet: Fleet, rank: int, seed: int) -> None:
        self.fleet, self.rank = fleet, rank
        self.program: list[Instruction] = []
        self._seed = seed
        self._kernel_noise = random.Random(f"{seed} kernels of {rank}")
        self._calls: Counter[str] = Counter()
        self._events = 0
        self._names = {axis: fleet.group(rank, axis) for axis in fleet.axes}

    def put(self, *instructions: Instruction) -> None:
        self.program += instructions

    def compute(self, dur_ns: float, name: str = "gemm", stream: str = MAIN) -> None:
        self.put(Compute(_noisy(self._kernel_noise, dur_ns), name, stream))

    def kernels(self, dur_ns: float, names: Sequence[str], stream: str = MAIN) -> None:
        """Kernels that take so long together, the later ones longer than the first."""
        shares = [2 + index for index in range(len(names))]
        for share, name in zip(shares, names, strict=True):
            self.compute(dur_ns * share / sum(shares), name, stream)

    def record(self, stream: str = MAIN) -> str:
        """Marks this place of the stream; returns the event."""
        self._events += 1
        self.put(Record(f"event{self._events}", stream))
        return f"event{self._events}"

    def wait(self, event: str, stream: str = MAIN) -> None:
        self.put(WaitFor(event, stream))

    def launch(self, axis: str, op: str, message_bytes: int, root: int = -1) -> str:
        """Queues a collective behind what is computed so far; returns the event behind it."""
        ranks, group = self.fleet.line(self.rank, axis), self._names[axis]
        took = self._transfer_ns(ranks, message_bytes * _wire_factor(op, len(ranks)), group)
        self.wait(self.record(), stream_of(axis))
        self.put(Collective(group, op, message_bytes, took, stream_of(axis), root))
        return self.record(stream_of(axis))

    def block(self, axis: str, op: str, message_bytes: int, root: int = -1) -> None:
        """A collective that computing waits for."""
        self.wait(self.launch(axis, op, message_bytes, root))

    def exchange(self, axis: str, legs: Sequence[Leg]) -> str:
        """Queues a batch of messages; returns the event behind it."""
        group, messages = self._names[axis], tuple(map(self._message, legs))
        self.wait(self.record(), stream_of(axis))
        self.put(Messages(group, messages, stream_of(axis)))
        return self.record(stream_of(axis))

    def _message(self, leg: Leg) -> Message:
        ends = (self.rank, leg.peer) if leg.op == "send" else (leg.peer, self.rank)
        took = self._transfer_ns(ends, leg.message_bytes, f"{ends[0]} to {ends[1]}")
        return Message(leg.op, leg.peer, leg.message_bytes, took)

    def _transfer_ns(self, ranks: tuple[int, ...], wire_bytes: float, channel: str) -> int:
        self._calls[channel] += 1
        shared = random.Random(f"{self._seed} call {self._calls[channel]} of {channel}")
        return _noisy(shared, self.fleet.transfer_ns(ranks, wire_bytes))


def stream_of(axis: str) -> str:
    """The stream on which calls along the axis run."""
    return "dp" if axis.startswith("dp") else axis


def _wire_factor(op: str, ranks: int) -> float:
    """Wire bytes of a rank for one byte of the message, as nccl-tests count for busbw."""
    if op in ("broadcast", "reduce"):
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def _noisy(rng: random.Random, dur_ns: float) -> int:
    return max(1, round(dur_ns * (1 + NOISE * max(-3.0, min(3.0, rng.gauss(0, 1))))))

"""How far times stray from the exact ones, as on real machines."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b

Span = tuple[int, int]
Place = tuple[int, int]
_NEVER: Span = (0, 0)


@dataclass(frozen=True, slots=True)
class Noise:
    """From where to where each time is drawn, evenly, in ns (transfer_ppm: millionths of it).

    start_ns: from a launch to the start of its kernel, at the least. gap_ns: from what a stream did
    last. launch_ns: added to the cost of a launch. tail_ns, all_to_all_ns, message_ns: from the end
    of the data to the end of a member's kernel. topology_ns: added to that of a collective, always
    the same for a member of (group, op, size). transfer_ppm: of a whole call.

    A draw is a hash of the seed, of what is drawn and of where: no draw depends on another.
    """

    seed: int
    start_ns: Span = (1_000, 3_000)
    gap_ns: Span = (500, 1_500)
    launch_ns: Span = (-150, 150)
    tail_ns: Span = (3_000, 7_000)
    all_to_all_ns: Span = (3_000, 30_000)
    message_ns: Span = (1_000, 3_000)
    topology_ns: Span = (0, 3_000)
    transfer_ppm: Span = (-20_000, 20_000)

    @classmethod
    def none(cls) -> Noise:
        """Every time exact."""
        return cls(0, _NEVER, _NEVER, _NEVER, _NEVER, _NEVER, _NEVER, _NEVER, _NEVER)

    @classmethod
    def of(cls, seed: int) -> Noise:
        """The usual noise."""
        return cls(seed)

    def start_of(self, rank: int, place: Place, part: int) -> int:
        """How long after its launch a kernel may start; part is its place in a graph."""
        return self._drawn(self.start_ns, "start", rank, *place, part)

    def gap_of(self, rank: int, place: Place, part: int) -> int:
        """How long after what its stream did before a kernel may start."""
        return self._drawn(self.gap_ns, "gap", rank, *place, part)

    def launch_of(self, rank: int, place: Place) -> int:
        """How much more a launch costs the host."""
        return self._drawn(self.launch_ns, "launch", rank, *place)

    def tail_of(self, group: str, call: int, op: str, message_bytes: int, rank: int) -> int:
        """How long after the data a member's kernel of a collective ends."""
        span = self.all_to_all_ns if op == "all_to_all" else self.tail_ns
        bias_ns = self._drawn(self.topology_ns, "topology", group, op, message_bytes, rank)
        return bias_ns + self._drawn(span, "tail", group, call, rank)

    def message_tail_of(self, rank: int, place: Place) -> int:
        """How long after the last of its messages a kernel ends."""
        return self._drawn(self.message_ns, "message", rank, *place)

    def transferred_ns(self, exact_ns: int, *call: Hashable) -> int:
        """How long a call's data takes, the same for all its members."""
        return exact_ns + exact_ns * self._drawn(self.transfer_ppm, "transfer", *call) // 1_000_000

    def _drawn(self, span: Span, what: str, *where: Hashable) -> int:
        low, high = span
        return low if low == high else low + number_of(self.seed, what, *where) % (high - low + 1)


EXACT = Noise.none()


def number_of(*where: Hashable) -> int:
    """A number below 2 ** 64 that looks random and is always the same for the same place."""
    return int.from_bytes(blake2b(repr(where).encode(), digest_size=8).digest())


class Places:
    """Numbers what a rank launches so that what is planted in it moves no number of the rest.

    An equal launch right behind another, as of a rank with more work, keeps its number and is
    distinguished by a second one.
    """

    def __init__(self) -> None:
        self._last: Hashable = None
        self._place: Place = (-1, 0)

    def next(self, launched: Hashable) -> Place:
        """The place of the next launch."""
        number, again = self._place
        self._place = (number, again + 1) if launched == self._last else (number + 1, 0)
        self._last = launched
        return self._place

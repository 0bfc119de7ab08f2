"""What the links reach: the transfers of recorded runs, and constants for all other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import geometric_mean, median

from stepsplit.analyzer.compare.calibrate.seen import RunSeen, Transfer
from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import Hardware, Link, Span

SMALL_BYTES, LARGE_BYTES = 8 << 10, 64 << 10
"""A message up to the first tells of latency, one from the second of bandwidth."""
ROUNDS = 12
"""Of fitting both in turn; each moves the other by less than it did before."""
AT_MOST = 0.25
"""Latency takes no more of the quickest call where no small message was measured."""
Place = tuple[str, int, int]
"""(op, ranks, ranks of a node)"""
Put = Callable[[Hardware, Link], Hardware]


def sweeps_seen(runs: Sequence[RunSeen]) -> tuple[TransferSweep, ...]:
    """One sweep for each op and group, with the median over runs at each size."""
    points: dict[Place, dict[int, list[int]]] = {}
    for one in _known(runs):
        place = (one.op, one.ranks, one.ranks_per_node)
        points.setdefault(place, {}).setdefault(one.message_bytes, []).append(one.ns)
    return tuple(
        TransferSweep(
            *place, tuple(sorted(sizes)), tuple(median(sizes[s]) for s in sorted(sizes)), False
        )
        for place, sizes in sorted(points.items())
    )


def links_seen(runs: Sequence[RunSeen], hardware: Hardware) -> Hardware:
    """The hardware with the links that explain the transfers; those of no transfer as known."""
    known = list(_known(runs))
    inside = [one for one in known if one.ranks == one.ranks_per_node]
    across = [one for one in known if one.ranks > one.ranks_per_node]
    hardware = _fitted(inside, hardware, hardware.intra, _intra)
    return _fitted(across, hardware, hardware.inter, _inter)


def _intra(hardware: Hardware, link: Link) -> Hardware:
    return replace(hardware, intra=link)


def _inter(hardware: Hardware, link: Link) -> Hardware:
    return replace(hardware, inter=link)


def _known(runs: Sequence[RunSeen]) -> Iterable[Transfer]:
    return (one for run in runs for one in run.transfers if one.op in TIMED_OPS and one.ranks > 1)


def _fitted(points: list[Transfer], hardware: Hardware, link: Link, put: Put) -> Hardware:
    """Latency from the small messages, bandwidth from the large ones, in turn."""
    small = [one for one in points if one.message_bytes <= SMALL_BYTES]
    large = [one for one in points if one.message_bytes >= LARGE_BYTES]
    if large and not small:
        quickest = min(one.ns for one in large)
        link = replace(link, latency_ns=min(link.latency_ns, AT_MOST * quickest))
    for _ in range(ROUNDS):
        if small:
            times = _slower(small, put(hardware, link))
            link = replace(link, latency_ns=link.latency_ns * times)
        if large:
            times = _slower(large, put(hardware, link))
            link = replace(link, bytes_per_s=link.bytes_per_s / times)
    return put(hardware, link)


def _slower(points: list[Transfer], hardware: Hardware) -> float:
    """How many times as long as predicted the calls took, in the geometric mean."""
    return geometric_mean(
        one.ns
        / time_of(one.op, one.message_bytes, Span(one.ranks, one.ranks_per_node), hardware).ns
        for one in points
    )

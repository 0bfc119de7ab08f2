"""How fast the job's links are, in the unit in which they are sold and in the one that counts."""

from __future__ import annotations

from collections.abc import Iterator

from stepsplit.analyzer.model.explain.explained import Explained, RuleOfThumb, Symbol, differing
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.spec.hardware import Link
from stepsplit.analyzer.model.spec.job import Job

NVLINK = Formula(
    "link.nvlink",
    "bytes a second of one GPU in one direction: what a collective's busbw compares with",
    "NVIDIA data sheets, which add up both directions",
)
NIC = Formula(
    "link.nic",
    "bytes a second of one GPU's adapter in one direction: the bits on the data sheet / 8",
    "data sheets of the networks; stas00/ml-engineering, network/README.md",
)


def of_links(job: Job) -> Iterator[Explained]:
    """The rate of NVLink, and of the network where the job has several nodes."""
    if job.hardware.intra.name.startswith("nvlink"):
        yield _nvlink(job.hardware.intra)
    if job.layout.world_size > job.hardware.gpus_per_node:
        yield _nic(job.hardware.inter)


def _nvlink(link: Link) -> Explained:
    rule = RuleOfThumb(
        "the rate on the data sheet", 2 * link.bytes_per_s,
        "it adds up both directions; data of one collective flows out at half of it",
        ("nvlink-900", "nvlink-a100", "a100-links"),
    )  # fmt: skip
    symbols = (Symbol("e", "share of it that large rings reach", link.ring, "ratio"),)
    value = link.bytes_per_s
    what = f"rate of {link.name}"
    return Explained(NVLINK, what, symbols, value, "bytes_per_s", differing(value, [rule]))


def _nic(link: Link) -> Explained:
    rule = RuleOfThumb(
        f"{8 * link.bytes_per_s / 1e9:,.0f}, read as GB/s", 8 * link.bytes_per_s,
        "networks are sold in bits a second, 8 to a byte", ("nic-rates",),
    )  # fmt: skip
    symbols = (Symbol("e", "share of it that large rings reach", link.ring, "ratio"),)
    value, what = link.bytes_per_s, f"rate of {link.name}"
    return Explained(NIC, what, symbols, value, "bytes_per_s", differing(value, [rule]))

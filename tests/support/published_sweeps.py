"""Published all_reduce sweeps, and the clusters that they were measured on."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from stepsplit.analyzer.model.config import Efficiency, HardwareConfig, Link
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.validation.tables import PUBLISHED

MIB, GIB = 2**20, 2**30


def cluster(intra: Link, inter: Link, gpus_per_node: int = 8, nvls: float = 0.0) -> HardwareConfig:
    """Hardware of which only the links matter."""
    host = Link("pcie-5", 63e9, 0.76, 5_700)
    efficiency = Efficiency(0.7, 0.4, 0.5, 0.8, 5_000)
    return HardwareConfig("", "", (), 1, 1.0, gpus_per_node, intra, inter, host, efficiency, nvls)


NDR = Link("ib-ndr-400", 50e9, 0.95, 14_000)
A100 = cluster(Link("nvlink-3", 300e9, 0.783, 18_000), Link("ib-hdr-200", 25e9, 0.96, 14_000))
"""ring: 1x8 A100 all_reduce, 2 and 8 GiB; latency: sizes 2^k with odd k from 32 KiB on."""
H200 = cluster(Link("nvlink-4", 450e9, 0.813, 16_000), NDR, nvls=1.05)
"""ring and nvls: 8xH200 all_reduce at 8 GiB on 8 ranks, without and with NVLS; latency: between
those of A100 and B200, which are joined by switches too."""
B200 = cluster(Link("nvlink-5", 900e9, 0.82, 16_000), NDR, nvls=0.82)
"""nvls: 1x8 B200 all_reduce, 128 and 512 MiB and 2 GiB; latency as of A100."""
MI300X = cluster(Link("xgmi-mi300x", 448e9, 0.7, 4_000), NDR)
"""ring: 8xMI300X all_reduce at 4 GiB on 8 ranks."""
ALPS = cluster(
    Link("nvlink-4-gh200", 450e9, 0.753, 4_800), Link("slingshot-11", 25e9, 0.92, 22_000), 4
)
"""rings and latencies: Alps all_reduce on 1 and 4 nodes, 128 and 512 MiB and 2 GiB; latency between
nodes: 512 B, half of what a doubling of nodes adds, over the tree's 0.36."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One all_reduce as published."""

    system: str
    hardware: HardwareConfig
    span: GroupPlacement
    message_bytes: int
    ns: float

    @property
    def fitted(self) -> bool:
        """Whether constants or spreads may have seen the row: sizes 2^k with odd k."""
        return self.message_bytes.bit_length() % 2 == 0


def measured() -> list[Measured]:
    """All valid rows of the sweeps."""
    return _of_one_node() + _of_alps()


def _of_one_node() -> list[Measured]:
    with (PUBLISHED / "nccl_allreduce_sweeps.csv").open() as file:
        return [
            Measured(
                row["system"],
                A100 if "A100" in row["system"] else B200,
                GroupPlacement(int(row["ranks"]), int(row["ranks"]) // int(row["nodes"])),
                int(row["size_bytes"]),
                float(row["time_us"]) * 1e3,
            )
            for row in csv.DictReader(file)
        ]


def _of_alps() -> list[Measured]:
    with (PUBLISHED / "nccl_allreduce_alps_gh200.csv").open() as file:
        return [
            Measured(
                f"Alps, {row['nodes']} nodes",
                ALPS,
                GroupPlacement(int(row["ranks"]), int(row["ranks"]) // int(row["nodes"])),
                int(row["size_bytes"]),
                float(row["time_us_oop"]) * 1e3,
            )
            for row in csv.DictReader(file)
            if row["wrong_oop"] == "0"
        ]

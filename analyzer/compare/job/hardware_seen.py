"""The [hardware] table of a recording: the preset that its device's name means."""

from __future__ import annotations

import re

from stepsplit.analyzer.model.config_table import Table
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors.run_spec import RunSpec

_PRESETS = (
    (r"V100.*SXM.*16GB", "v100-sxm-16gb"),
    (r"V100.*SXM.*32GB", "v100-sxm-32gb"),
    (r"A100.*SXM.*40GB", "a100-sxm-40gb"),
    (r"A100.*SXM.*80GB", "a100-sxm-80gb"),
    (r"A100.*PCIE?.*40GB", "a100-pcie-40gb"),
    (r"A100.*80GB.*PCIE|A100.*PCIE.*80GB", "a100-pcie-80gb"),
    (r"A800.*SXM.*80GB", "a800-sxm-80gb"),
    (r"L40S", "l40s"),
    (r"H100.*PCIE", "h100-pcie"),
    (r"H100 80GB HBM3|H100.*SXM", "h100-sxm"),
    (r"H800 PCIE|H100 NVL", None),
    (r"H800", "h800-sxm"),
    (r"H200 NVL", None),
    (r"GH200 144G", "gh200-144gb"),
    (r"GH200", "gh200"),
    (r"H200", "h200-sxm"),
    (r"H20\b", "h20-sxm"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"B200", "b200-sxm"),
    (r"B300", "b300-sxm"),
    (r"MI250X", "mi250x"),
    (r"MI300X", "mi300x"),
    (r"MI325X", "mi325x"),
    (r"MI350X", "mi350x"),
    (r"MI355X", "mi355x"),
    (r"^CPU$", "cpu"),
)
"""What drivers call a device, in the order in which to try; None: no preset is of it."""


def hardware_seen(spec: RunSpec | None, found: RunSplit) -> Table:
    """The preset of the run's device, and over several hosts how many ranks each holds."""
    values = {"preset": preset_of(_device(spec, found)), "gpus_per_node": _per_node(found)}
    return Table("run.json", "hardware", {k: v for k, v in values.items() if v is not None})


def preset_of(device: str) -> str | None:
    """The preset of a device as its driver names it, None where that may be several."""
    named = (preset for words, preset in _PRESETS if re.search(words, device.upper()))
    return next(named, None)


def _device(spec: RunSpec | None, found: RunSplit) -> str:
    stated = [host.gpu for host in spec.hosts if host.gpu] if spec else []
    if not all(rank.trace.on_device for rank in found.ranks):
        return "cpu"
    return next(iter(stated), found.ranks[0].trace.device or "")


def _per_node(found: RunSplit) -> int | None:
    hosts = [rank.trace.host for rank in found.ranks]
    return None if len(set(hosts)) == 1 else max(hosts.count(host) for host in hosts)

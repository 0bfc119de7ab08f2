"""Hardware of a job: accelerators, links and efficiencies, from presets or a TOML table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import (
    AttentionKernel,
    AttentionRate,
    Efficiency,
    GemmRate,
    HardwareConfig,
    Link,
    MemoryCorrection,
)
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    collect_kinds,
    decode_keys,
    decode_section,
    decode_table,
    find_nearest_words,
    join_choices,
    list_required_keys,
    read_table,
    select_fields,
)
from stepsplit.analyzer.model.preset_names import (
    DRIVER_NAME,
    HARDWARE,
    PRESETS,
    list_hardware_names,
    read_preset,
)
from stepsplit.analyzer.model.profile import BEHAVIOR, FAMILIES_FILE, Origin, load_device
from stepsplit.collectors.safe_io.regular_file import describe_special

_T = TypeVar("_T")

# A [hardware] table -> HardwareConfig.

PEAKS = ("fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4")

LINKS = ("intra", "nodes_link", "host")

_KINDS: Mapping[str, Any] = {
    **collect_kinds(HardwareConfig),
    "peaks": dict[str, object],
    "measured": tuple[str, ...],
    "transfers": list[dict[str, object]],
    "gemms": list[dict[str, object]],
    "file": str,
}

HARDWARE_KEYS = tuple(_KINDS)

_REQUIRED_KEYS = ("family", "peaks", "memory_bytes", "memory_bytes_per_s", "gpus_per_node", "intra")


def decode_hardware_section(table: TomlTable, mistakes: Mistakes) -> HardwareConfig:
    """Decodes the hardware of the table, of its file, or of the preset of either."""
    file, extra_kinds = None, {"preset": Literal[list_hardware_names()]}
    with mistakes.collect():
        file = read_hardware_file(table)
    if file is None:
        return decode_hardware(table, _find_hardware_preset(table), mistakes, extra_kinds)
    if "file" in file.values:
        hint = "name that file in the job.toml"
        mistakes.append(file.build_error("file", "must not name another file", hint))
    if "preset" in table.values:
        hint = "remove one of them"
        mistakes.append(
            table.build_error("preset", "stands beside file, which describes the device", hint)
        )
    known = decode_hardware(file, _find_hardware_preset(file), mistakes, extra_kinds)
    return decode_hardware(table, known, mistakes, extra_kinds)


def _find_hardware_preset(table: TomlTable) -> HardwareConfig | None:
    preset = table.values.get("preset")
    return (
        load_hardware(preset)
        if isinstance(preset, str) and preset in list_hardware_names()
        else None
    )


def decode_hardware(
    table: TomlTable,
    base: HardwareConfig | None,
    mistakes: Mistakes,
    extra_kinds: Mapping[str, Any],
) -> HardwareConfig:
    """Decodes the hardware of the table; missing or invalid keys are taken from base.

    Without a base, the default of nodes_link is intra and that of host is host-pcie-5.
    extra_kinds are the types of further keys.
    """
    alone = base is None and not {"preset", "file"} & table.values.keys()
    required = _REQUIRED_KEYS if alone else ()
    if alone and not table.values.keys() & set(_REQUIRED_KEYS):
        # Whoever leaves out all of them does not mean to describe a device by numbers.
        hint = 'write preset = "h100-sxm" or another, or the numbers of the device'
        mistakes.append(table.build_error("preset", "missing", hint))
        required = ()
    stated = decode_keys(table, {**list_hardware_kinds(), **extra_kinds}, mistakes, required)
    known = base or _build_default_hardware(stated)
    intra = _decode_link(table, "intra", known.intra, mistakes)
    inter = intra if base is None else known.inter
    family = stated.get("family", known.family)
    memory_bytes = stated.get("memory_bytes", None if base is None else base.memory_bytes)
    _check_units(table, stated, family, mistakes)
    # Refuses fractions above 1 and those close to 0, and variations of many times a step.
    efficiency = table.get_subtable("efficiency")
    most = _MAX_OF_PROCESSOR if load_device(family).processor else 1.0
    for key in _FRACTIONS:
        _check_fraction(efficiency, key, "of a peak", _MIN_FRACTION, most, mistakes)
    for key in _SPREAD_KEYS:
        _check_fraction(efficiency, key, "of a step", 0.0, MAX_SPREAD, mistakes)
    for link in LINKS:
        rates = table.get_subtable(link)
        _check_fraction(rates, "ring", "of the link's rate", _MIN_FRACTION, 1.0, mistakes)
    _check_learned(table.get_subtable("learned"), family, memory_bytes, mistakes)
    # The device's own constants go before those of its family, unless another one is stated.
    own_efficiency = {known.family: known.efficiency}
    default_efficiency = own_efficiency.get(family) or load_efficiency(family)
    peaks_flops_per_s = _decode_peaks(table, known, mistakes)
    _check_attention(table, dict(peaks_flops_per_s), mistakes)
    decoded: dict[str, Any] = {
        "peaks_flops_per_s": peaks_flops_per_s,
        "intra": intra,
        "inter": _decode_link(table, "nodes_link", inter, mistakes),
        "host": _decode_link(table, "host", known.host, mistakes),
        "efficiency": decode_section(table, "efficiency", Efficiency, default_efficiency, mistakes),
        "attention": decode_section(table, "attention", AttentionRate, known.attention, mistakes),
        "learned": decode_section(table, "learned", MemoryCorrection, known.learned, mistakes),
    }
    if base is not None and "clock" not in stated and "power_watts" in stated:
        # The clock falls with the root of the power: torchtitan's H100 of 500 W take
        # sqrt(500 / 700) of the rate of those of 700 W. Far below, it falls faster: a GB300 of
        # 1,400 W computes at 0.28 to 0.39 of its rate with 500 W, not at 0.6
        # (facebookexperimental/triton, pull request 2023).
        share = stated["power_watts"] / base.power_watts if base.power_watts else 1.0
        decoded["clock"] = base.clock * math.sqrt(min(1.0, share))
    if "clock" not in stated and "clock_mhz" in stated:
        peak_mhz = stated.get("peak_mhz", known.peak_mhz)
        reached = load_device(family).clocked_gemm
        if peak_mhz and reached:
            # The family's fraction has the clocks of its own runs in it, this one does not.
            share = stated["clock_mhz"] / peak_mhz
            decoded["clock"] = reached * share / decoded["efficiency"].gemm
        else:
            hint = "state peak_mhz, the clock of the peaks" if reached else "state clock, a ratio"
            problem = f"what GEMMs of {known.name} reach at a clock is not known"
            mistakes.append(table.build_error("clock_mhz", problem, hint))
    if "gemms" in stated:
        decoded["gemms"] = _decode_gemms(table, dict(peaks_flops_per_s), mistakes)
    return replace(known, **{**select_fields(HardwareConfig, stated), **decoded})


@lru_cache(maxsize=256)
def load_hardware(
    name: str, nodes_link: str | None = None, gpus_per_node: int | None = None
) -> HardwareConfig:
    """Loads a hardware preset by name; nodes_link and gpus_per_node override the preset.

    Raises UsageError, which suggests similar names.
    """
    table, mistakes = read_preset(HARDWARE, "hardware", name), Mistakes()
    device = decode_hardware(table, None, mistakes, {"source": str, DRIVER_NAME: str})
    mistakes.raise_all()
    return replace(
        device,
        name=name,
        inter=device.inter if nodes_link is None else load_link(nodes_link),
        gpus_per_node=gpus_per_node or device.gpus_per_node,
    )


@dataclass(frozen=True, slots=True)
class PlausibleRange:
    """The values that hardware can have, and the unit that is often given instead."""

    least: float
    most: float
    unit: str
    usual: str = ""
    usual_size: float = 1.0

    def describe(self, value: float) -> str:
        """What the value would be in the usual unit."""
        size = value * self.usual_size
        number = f"{size:_.0f}" if self.unit == "bytes" else f"{size:.4g}"
        return f"{value:g} {self.usual} are {number} {self.unit}"


@dataclass(frozen=True, slots=True)
class PlausibleDevice:
    """What the memory and the peaks of a kind of device can be."""

    memory: PlausibleRange
    bandwidth: PlausibleRange
    peak: PlausibleRange


# Chosen, not measured: well outside of what known devices and clusters have, so that a value beyond
# them is one in another unit, which is off by 100, 1,000 or more.

_ACCELERATOR = PlausibleDevice(
    PlausibleRange(2**30, 2**42, "bytes", "GiB", 2**30),
    PlausibleRange(5e10, 1e14, "bytes per second", "GB/s", 1e9),
    PlausibleRange(1e12, 1e17, "FLOP/s", "TFLOP/s", 1e12),
)

_PROCESSOR = PlausibleDevice(
    PlausibleRange(2**26, 2**46, "bytes", "GiB", 2**30),
    PlausibleRange(1e8, 1e13, "bytes per second", "GB/s", 1e9),
    PlausibleRange(1e8, 1e15, "FLOP/s", "TFLOP/s", 1e12),
)

_RATE = PlausibleRange(1e8, 1e17, "FLOP/s", "TFLOP/s", 1e12)

_LAUNCH = PlausibleRange(50, 1e8, "ns", "us", 1e3)

_PLAUSIBLE: Mapping[str, Mapping[str, PlausibleRange]] = {
    **{
        link: {
            "bytes_per_s": PlausibleRange(1e6, 1e14, "bytes per second", "GB/s", 1e9),
            "latency_ns": PlausibleRange(50, 1e9, "ns", "us", 1e3),
        }
        for link in LINKS
    },
    "attention": dict.fromkeys(("forward", "backward"), _RATE)
    | dict.fromkeys(("start", "backward_start"), PlausibleRange(0, 1e7, "tokens")),
    "": {
        "multiprocessors": PlausibleRange(1, 1e4, "multiprocessors"),
        "clock": PlausibleRange(0.05, 20, "times the family's speed"),
        "power_watts": PlausibleRange(20, 5_000, "W", "kW", 1e3),
        **dict.fromkeys(("clock_mhz", "peak_mhz"), PlausibleRange(100, 10_000, "MHz", "GHz", 1e3)),
        "host_call_ns": _LAUNCH,
        "nvls": PlausibleRange(0.01, 10, "times the link's rate"),
        "host_update_bytes_per_s": PlausibleRange(1e8, 1e13, "bytes per second", "GB/s", 1e9),
        "gpus_per_node": PlausibleRange(1, 1e4, "GPUs"),
    },
    "efficiency": {
        "launch_ns": _LAUNCH,
        **dict.fromkeys(("host_ns", "expert_ns"), PlausibleRange(1e3, 1e10, "ns", "us", 1e3)),
        "gemm_result": PlausibleRange(0.1, 100, "times a memory-bound kernel"),
    },
}
"""By table, "" for that of the device itself: what each key can be."""

_ACTIVATIONS = PlausibleRange(0.05, 20, "times the activations", "%", 0.01)

_SPREAD_KEYS = ("jitter", "jitter_per_layer", "error")

MAX_SPREAD = 10.0
"""Largest relative variation of step times, and largest error, that a file may state."""

_FRACTIONS = ("gemm", "gemm_fp8", "gemm_nvfp4", "attention", "unfused_attention", "memory")

_MIN_FRACTION = 1e-6
"""Smaller ones are mistakes of units; chosen, not measured."""

_MAX_OF_PROCESSOR = 1e3
"""Largest fraction of a processor's peak, which is a guess that programs may exceed."""


def _check_units(
    table: TomlTable, stated: Mapping[str, Any], family: str, mistakes: Mistakes
) -> None:
    """Refuses sizes, rates and counts that are off by the factor of a unit."""
    device = _PROCESSOR if load_device(family).processor else _ACCELERATOR
    _check_range(table, "memory_bytes", stated.get("memory_bytes"), device.memory, mistakes)
    _check_range(
        table, "memory_bytes_per_s", stated.get("memory_bytes_per_s"), device.bandwidth, mistakes
    )
    peaks = table.get_subtable("peaks")
    for dtype in PEAKS:
        _check_range(peaks, dtype, peaks.values.get(dtype), device.peak, mistakes)
    for name, ranges in _PLAUSIBLE.items():
        own = table.get_subtable(name) if name else table
        values = own.values if name else stated
        for key, plausible in ranges.items():
            _check_range(own, key, values.get(key), plausible, mistakes)


def _check_fraction(
    table: TomlTable, key: str, of: str, least: float, most: float, mistakes: Mistakes
) -> None:
    value = table.values.get(key)
    if not _is_positive(value) or least <= value <= most:
        return
    is_percent = max(2.0, most) <= value <= 100 * most
    limit = f"a number of at least {least:g}" if value < least else f"a number up to {most:g}"
    hint = f"{value:g} % are {value / 100:g}" if is_percent else f"give {limit}"
    mistakes.append(table.build_error(key, f"{value:g} {of} is not plausible", hint))


def _check_learned(
    table: TomlTable, family: str, memory_bytes: int | None, mistakes: Mistakes
) -> None:
    """Refuses corrections of the memory that no run of the device can have shown; the memory of
    processors is a guess."""
    _check_range(table, "activations", table.values.get("activations"), _ACTIVATIONS, mistakes)
    value, is_guess = table.values.get("constant_bytes"), load_device(family).processor
    if isinstance(value, int) and not is_guess and memory_bytes and abs(value) > memory_bytes:
        problem = f"{value} bytes are more than the {memory_bytes} of the device"
        hint = "give the difference of measured and predicted bytes"
        mistakes.append(table.build_error("constant_bytes", problem, hint))


def _is_positive(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf


def _check_range(
    table: TomlTable, key: str, value: object, plausible: PlausibleRange, mistakes: Mistakes
) -> None:
    if not _is_positive(value) or plausible.least <= value <= plausible.most:
        return
    problem = f"{value:g} {plausible.unit} is not plausible"
    in_range = plausible.least <= value * plausible.usual_size <= plausible.most
    limits = f"{_format_limit(plausible.least)} to {_format_limit(plausible.most)}"
    hint = plausible.describe(value) if in_range else f"give {plausible.unit}, {limits}"
    mistakes.append(table.build_error(key, problem, hint))


def _format_limit(value: float) -> str:
    return f"{value:g}" if value < 1e5 else f"{value:.0e}"


def list_hardware_kinds() -> dict[str, Any]:
    """List the types of the keys, including the families and links of the presets."""
    named = dict[str, object] | Literal[list_link_names()]  # type: ignore[valid-type]
    return {**_KINDS, "family": Literal[list_families()], **dict.fromkeys(LINKS, named)}


def _build_default_hardware(stated: Mapping[str, Any]) -> HardwareConfig:
    """Builds the default hardware of a table without a preset."""
    family = stated.get("family", list_families()[0])
    return HardwareConfig(
        name="custom",
        family=family,
        peaks_flops_per_s=(),
        memory_bytes=1,
        memory_bytes_per_s=1.0,
        gpus_per_node=1,
        intra=load_link("pcie-5"),
        inter=load_link("pcie-5"),
        host=load_link("host-pcie-5"),
        efficiency=load_efficiency(family),
    )


def _decode_peaks(
    table: TomlTable, base: HardwareConfig, mistakes: Mistakes
) -> tuple[tuple[str, float], ...]:
    if not isinstance(table.values.get("peaks"), dict):
        return base.peaks_flops_per_s
    kinds = {**dict.fromkeys(PEAKS, float), "source": str}
    stated = decode_keys(table.get_subtable("peaks"), kinds, mistakes)
    return tuple((dtype, stated[dtype]) for dtype in PEAKS if dtype in stated)


def _decode_gemms(
    table: TomlTable, peaks_flops_per_s: Mapping[str, float], mistakes: Mistakes
) -> tuple[GemmRate, ...]:
    """Decodes the measured rates of GEMMs; none can be above the peak of its dtype."""
    rates = []
    required = list_required_keys(GemmRate)
    for row in table.list_subtables("gemms"):
        stated = decode_keys(row, collect_kinds(GemmRate), mistakes, required)
        _check_range(row, "flops_per_s", stated.get("flops_per_s"), _RATE, mistakes)
        if not all(key in stated for key in required):
            continue
        rate = GemmRate(**stated)
        peak = peaks_flops_per_s.get(rate.dtype)
        if peak is not None and rate.flops_per_s > peak:
            problem = f"{rate.flops_per_s:g} FLOP/s are more than the {peak:g} of {rate.dtype}"
            mistakes.append(row.build_error("flops_per_s", problem, "give dense FLOP/s, or dtype"))
        rates.append(rate)
    return tuple(rates)


def _check_attention(
    table: TomlTable, peaks_flops_per_s: Mapping[str, float], mistakes: Mistakes
) -> None:
    """Refuses a rate of attention above all peaks of the device."""
    attention = table.get_subtable("attention")
    peak = max(peaks_flops_per_s.values(), default=math.inf)
    for key in ("forward", "backward"):
        rate = attention.values.get(key)
        if _is_positive(rate) and peak < rate <= _RATE.most:
            problem = f"{rate:g} FLOP/s are more than any peak of the device, {peak:g}"
            mistakes.append(attention.build_error(key, problem, "count the causal half alone"))


def _decode_link(table: TomlTable, key: str, base: Link, mistakes: Mistakes) -> Link:
    """Decodes a link given by name or as a table of numbers."""
    stated = table.values.get(key)
    if not isinstance(stated, dict):
        return (
            load_link(stated) if isinstance(stated, str) and stated in list_link_names() else base
        )
    if "bytes_per_s" not in stated:
        mistakes.append(
            table.get_subtable(key).build_error("bytes_per_s", "missing", "give bytes_per_s")
        )
    return decode_section(table, key, Link, replace(base, name=key), mistakes) or base


# Links, efficiencies and attention kernels by name: presets/links.toml, efficiency.toml and
# attention.toml.


def load_link(name: str) -> Link:
    """Loads a link of links.toml. Raises UsageError, which suggests similar names."""
    if name not in list_link_names():
        near = join_choices(find_nearest_words(name, list_link_names()))
        raise UsageError(f"unknown link {name!r}; write {near}")
    return _load_links()[name]


def list_link_names() -> tuple[str, ...]:
    """The names of the links in links.toml."""
    return tuple(_load_links())


def load_efficiency(family: str) -> Efficiency:
    """Loads a GPU family's efficiency. Raises UsageError, which suggests similar names."""
    known = find_efficiency(family)
    if known is None:
        near = join_choices(find_nearest_words(family, list_families()))
        raise UsageError(f"unknown GPU family {family!r}; write {near}")
    return known


def find_efficiency(family: str) -> Efficiency | None:
    """The efficiency of a GPU family; None if it has no entry."""
    return _load_families().get(family)


def list_families() -> tuple[str, ...]:
    """The names of the GPU families in efficiency.toml."""
    return tuple(_load_families())


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Published rate of an attention kernel with heads of 128, the dense bf16 peak of the device
    that ran it, and its rates with heads of 64 relative to those.

    whole_backward: whether its backward computes all causal scores in spite of a window.
    """

    rate: AttentionRate
    peak_flops_per_s: float
    narrow: float
    narrow_backward: float
    whole_backward: bool


def load_attention_rate(kernel: AttentionKernel, family: str) -> KernelRate | None:
    """Loads a kernel's rate on a GPU family; None if attention.toml has none."""
    return _load_kernels().get((kernel, family))


def list_attention_kernels(family: str) -> tuple[str, ...]:
    """The kernels with a published rate on a GPU family."""
    return tuple(kernel for kernel, known in _load_kernels() if known == family)


@lru_cache(maxsize=1)
def _load_kernels() -> dict[tuple[str, str], KernelRate]:
    """Reads the tables of attention.toml, by kernel and family. Raises DataError."""
    presets, mistakes = read_table(PRESETS / "attention.toml"), Mistakes()
    own = dict.fromkeys(("peak", "narrow", "narrow_backward"), float)
    kinds = {**collect_kinds(AttentionRate), **own, "source": str, "whole_backward": bool}
    kernels = {}
    for kernel in presets.values:
        table = presets.get_subtable(kernel)
        for architecture in table.values:
            stated = decode_keys(table.get_subtable(architecture), kinds, mistakes)
            rate = AttentionRate(**select_fields(AttentionRate, stated))
            narrow = stated.get("narrow", 1.0)
            backward = stated.get("narrow_backward", narrow)
            whole = stated.get("whole_backward", False)
            kernels[kernel, architecture] = KernelRate(
                rate, stated["peak"], narrow, backward, whole
            )
    mistakes.raise_all()
    return kernels


@lru_cache(maxsize=1)
def _load_links() -> dict[str, Link]:
    return _decode_presets(read_table(PRESETS / "links.toml"), Link)


@lru_cache(maxsize=1)
def _load_families() -> dict[str, Efficiency]:
    presets = read_table(FAMILIES_FILE)
    for table in presets.values.values():
        # What the family does is read by profile.load_device.
        table.pop(BEHAVIOR, None)
    return _decode_presets(presets, Efficiency)


def _decode_presets(presets: TomlTable, kind: type[_T]) -> dict[str, _T]:
    """Decodes the tables of a preset file, by name. Raises DataError."""
    mistakes = Mistakes()
    decoded = {}
    for name in presets.values:
        named = {"name": name} if kind is Link else {}
        decoded[name] = decode_section(presets, name, kind, None, mistakes, **named)
    mistakes.raise_all()
    return {name: one for name, one in decoded.items() if one is not None}


# Files named in a [hardware] table, such as the output of `stepsplit calibrate`.


def read_hardware_file(table: TomlTable) -> TomlTable | None:
    """Reads the file named in a [hardware] table; None if it names none.

    The path is relative to the folder of the table's own file. Raises DataError.
    """
    name = decode_table(table.select("file"), {"file": str}).get("file")
    if name is None:
        return None
    path = Path(table.where).parent / name
    if not path.exists():
        raise table.build_error("file", f"{path} does not exist", "check the path")
    if problem := describe_special(path):
        raise table.build_error("file", f"{path} is {problem}", "copy its content to a file")
    return read_table(path)


def list_measured_files(table: TomlTable) -> tuple[str, ...]:
    """Lists the nccl-tests outputs and NCCL logs named in a [hardware] table. Raises DataError."""
    return tuple(decode_table(table.select("measured"), _KINDS).get("measured", ()))


# Where the constants of a device come from.


@lru_cache(maxsize=256)
def find_efficiency_origins(family: str, efficiency: Efficiency) -> Mapping[str, Origin]:
    """The origin of each constant of a device: fitted on published runs, assumed in a family
    without any, or stated.

    A file of `stepsplit calibrate` repeats the family's constants that it did not fit: a constant
    counts as stated if it differs from the family's.
    """
    own = find_efficiency(family) or efficiency
    usual = Origin.FITTED if efficiency.rows else Origin.ASSUMED
    return {
        each.name: usual
        if getattr(efficiency, each.name) == getattr(own, each.name)
        else Origin.STATED
        for each in fields(Efficiency)
        if isinstance(getattr(efficiency, each.name), float | None)
    }

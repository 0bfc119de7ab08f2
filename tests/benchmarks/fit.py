"""Fits the constants of the GPU families on published runs, and writes the presets that hold them.

python tests/benchmarks/fit.py

presets/efficiency.toml gets the constants with the least robust error on all runs of a family;
presets/left_out.toml those fitted without one publisher, for each publisher in turn, by which
validation predicts the runs of that publisher; presets/bands.toml the errors of those predictions
that 9 of 10 stay below. Takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from stepsplit.analyzer.model.confidence import RUN_CONFIDENCES
from stepsplit.analyzer.model.config import Efficiency
from stepsplit.analyzer.model.hardware_config import load_efficiency
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.preset_names import PRESETS
from stepsplit.analyzer.validation.predictions import (
    compute_bands,
    find_proven_kinds,
    load_left_out,
    predict_unseen,
    settle_confidence,
)
from stepsplit.analyzer.validation.published_runs import REPORTS_TABLE, ZERO_FAMILY, list_cases
from stepsplit.analyzer.validation.tables import Case, Published

FITTED: dict[str, tuple[str, ...]] = {
    "ampere": ("gemm", "unfused_attention", "jitter", "jitter_per_layer"),
    "hopper": ("gemm", "gemm_fp8", "jitter", "jitter_per_layer"),
    "blackwell": ("gemm", "gemm_fp8", "gemm_result"),
}
"""The other constants are measured elsewhere or too little exercised by these runs."""

EXPERT = ("expert_ns",)
"""Fitted afterwards, on the runs with experts of hopper and blackwell."""

BOUNDS = {
    "gemm": (0.3, 0.87),
    "gemm_fp8": (0.3, 0.9),
    "gemm_result": (1.0, 10.0),
    "unfused_attention": (0.1, 0.8),
    "jitter": (0.001, 0.03),
    "jitter_per_layer": (0.001, 0.05),
    "expert_ns": (0.0, 3e6),
}
"""What a kernel can reach at all: the best GEMM measured (MAMF) is 0.87 on A100."""

LIMITS = {("hopper", "jitter"): (0.001, 0.012)}
"""Recipes of 2025 lose less than 4 % to 256 nodes (weak scaling of DGX Cloud's)."""

HELD_OUT = ("torchtitan",)
"""Publishers whose devices differ from the preset in a way that no constant knows."""

HELD_OUT_MODELS = ("moonlight-16b", "gpt-oss-120b")
"""A study of one microbatch whose host took longer than its GPUs, and a model whose kernels are not
all fused: both have other costs than the constants."""

HELD_OUT_IDS = "recipe/Megatron-Bridge PR 3107"
"""Rows of a guide to memory, whose throughput is rounded."""

AS_ANOTHER = {"jitter_per_layer": "jitter", "gemm_fp8": "gemm"}
"""What the model takes for a constant that is not known: another one. Without llm-foundry's no run
depends on jitter_per_layer, and what all runs say of it would be llm-foundry's own word."""

ROBUST = 0.05
"""Errors well above it count linearly instead of squared."""


def list_fitted_cases(family: str, experts: bool = False) -> list[Case]:
    """Dense runs, or those with experts, that fit in memory; without ZeRO-3 of 2021, whose loss
    over many ranks is not modelled, without the reports, on which nothing is fitted, and without
    what the constants are not about: adapters, GEMMs in 4 bits, offloading, and what is held out
    above."""
    return [
        case
        for case in list_cases(Published()).cases
        if case.job.hardware.family == family
        and case.source not in HELD_OUT
        and case.family != ZERO_FAMILY
        and case.table != REPORTS_TABLE
        and case.job.model.name not in HELD_OUT_MODELS
        and not case.id.startswith(HELD_OUT_IDS)
        and not case.job.training.lora_rank
        and not case.job.training.offload
        and case.job.training.dtype != "nvfp4"
        and (case.job.model.experts is not None) == experts
        and predict(case.job).fits
    ]


def compute_log_error(efficiency: Efficiency, case: Case) -> float:
    """log(predicted / published) of the step time."""
    hardware = replace(case.job.hardware, efficiency=efficiency)
    predicted = predict(replace(case.job, hardware=hardware))
    return math.log(predicted.split.step_ns / case.step_ns)


def fit(
    names: tuple[str, ...], start: Efficiency, family: str, cases: Sequence[Case]
) -> Efficiency:
    """The constants of least robust error; many runs of a publisher count less each.

    The search begins in the middle of the bounds: from the constants of the last fit, which know
    all publishers, it would end elsewhere each time.
    """
    if not cases:
        return start
    runs = Counter(case.source for case in cases)
    weights = np.array([runs[case.source] ** -0.25 for case in cases])

    def compute_residuals(values: np.ndarray) -> np.ndarray:
        tried = replace(start, **dict(zip(names, map(float, values), strict=True)))
        return weights * [compute_log_error(tried, case) for case in cases]

    limits = [LIMITS.get((family, name), BOUNDS[name]) for name in names]
    middle = [(low + high) / 2 for low, high in limits]
    found = least_squares(
        compute_residuals, middle, bounds=tuple(zip(*limits, strict=True)),
        loss="soft_l1", f_scale=ROBUST, x_scale=middle, diff_step=0.01, max_nfev=40,
        ftol=1e-5, xtol=1e-3,
    )  # fmt: skip
    values = {name: float(f"{value:.4g}") for name, value in zip(names, found.x, strict=True)}
    for name, slopes in zip(names, found.jac.T, strict=True):
        if not slopes.any():
            values[name] = values[AS_ANOTHER[name]]
    return replace(start, **values)


def list_names(family: str) -> tuple[str, ...]:
    """The fitted constants that a family's presets hold."""
    return FITTED[family] if family == "ampere" else (*FITTED[family], *EXPERT)


@dataclass(frozen=True, slots=True)
class FamilyFit:
    """The constants on all runs of a family, and without each publisher."""

    family: str
    all_runs: Efficiency
    without: Mapping[str, Efficiency]
    cases: Sequence[Case]


def fit_family(family: str) -> FamilyFit:
    dense, experts = list_fitted_cases(family), list_fitted_cases(family, experts=True)
    cases = [*dense, *experts]
    without = {
        source: _fit_twice(
            family,
            [case for case in dense if case.source != source],
            [case for case in experts if case.source != source],
        )
        for source in sorted({case.source for case in cases})
    }
    return FamilyFit(family, _fit_twice(family, dense, experts), without, cases)


def _fit_twice(family: str, dense: Sequence[Case], experts: Sequence[Case]) -> Efficiency:
    """The constants on dense runs, then with these the one of experts."""
    found = fit(FITTED[family], load_efficiency(family), family, dense)
    return fit(EXPERT, found, family, experts)


def write_efficiency(fits: Sequence[FamilyFit], path: Path) -> None:
    """Replaces the fitted constants and what was fitted in the file, and leaves the rest."""
    text = path.read_text()
    for one in fits:
        seen = {
            "frameworks": {case.job.training.framework for case in one.cases},
            "devices": {case.job.hardware.name for case in one.cases},
            "dtypes": {case.job.training.dtype for case in one.cases},
            "rows": {case.source for case in one.cases},
        }
        layouts = [case.job.parallel for case in one.cases]
        most = {
            "most_tokens": max(case.job.training.seq_len for case in one.cases),
            "most_gpus": max(layout.world_size for layout in layouts),
            "most_sharded": max(
                (layout.shard_size for layout in layouts if layout.zero == 3), default=0
            ),
        }
        values = {name: f"{getattr(one.all_runs, name):.4g}" for name in list_names(one.family)}
        values |= {key: json.dumps(sorted(names)) for key, names in seen.items()}
        values |= {key: str(value) for key, value in most.items()}
        head, _, rest = text.partition(f"[{one.family}]\n")
        section, bracket, after = rest.partition("\n\n[")
        for key, value in values.items():
            section = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", section)
        text = f"{head}[{one.family}]\n{section}{bracket}{after}"
    path.write_text(text)


def write_left_out(fits: Sequence[FamilyFit], path: Path) -> None:
    lines = [
        "# The fitted constants of efficiency.toml without the runs of one publisher, by which",
        "# validation predicts them: [family.publisher].",
        "",
        'source = "tests/benchmarks/fit.py"',
    ]
    constants = dict(load_left_out())
    for one in fits:
        constants = {key: value for key, value in constants.items() if key[0] != one.family}
        constants |= {
            (one.family, source): {name: getattr(found, name) for name in list_names(one.family)}
            for source, found in one.without.items()
        }
    families = list(FITTED)
    for family, source in sorted(constants, key=lambda key: (families.index(key[0]), key[1])):
        lines += ["", f'[{family}."{source}"]']
        lines += [f"{name} = {value:.4g}" for name, value in constants[family, source].items()]
    path.write_text("\n".join(lines) + "\n")


def write_bands(path: Path) -> None:
    """The error bands, from all runs as predicted without their publishers."""
    lines = [
        "# The error that 9 of 10 published runs of a kind stay below, each predicted by constants",
        "# that were fitted without its publisher, by the confidence in them. middle is the median",
        "# of measured over predicted steps, from which the errors count. Written by",
        "# tests/benchmarks/fit.py.",
    ]
    runs = predict_unseen(list_cases(Published()).cases)
    proven = find_proven_kinds(runs)
    bands = compute_bands(settle_confidence(run, proven) for run in runs)
    for kind, confidence in sorted(
        bands, key=lambda each: (RUN_CONFIDENCES.index(each[1]), str(each[0]))
    ):
        band = bands[kind, confidence]
        lines += ["", "[[band]]"]
        lines += [f'{key} = "{value}"' for key, value in asdict(kind).items() if value]
        lines += [
            f'confidence = "{confidence}"',
            f"error = {math.ceil(band.error * 1e4) / 1e4:.4f}",
            f"middle = {band.middle:.4f}",
            f"runs = {band.runs}",
            f"sources = {band.sources}",
        ]
    path.write_text("\n".join(lines) + "\n")


def _describe(one: FamilyFit) -> Iterator[str]:
    """The constants, and the errors of each publisher's runs by those without it."""
    yield f"{one.family} {_select_fitted(one.family, one.all_runs)}"
    for source, found in one.without.items():
        errors = [
            abs(math.expm1(compute_log_error(found, case)))
            for case in one.cases
            if case.source == source
        ]
        yield (
            f"  without {source}: {len(errors)} runs, mean {np.mean(errors):.1%},"
            f" p90 {np.quantile(errors, 0.9):.1%} {_select_fitted(one.family, found)}"
        )


def _select_fitted(family: str, found: Efficiency) -> dict[str, float]:
    return {name: getattr(found, name) for name in list_names(family)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--family", action="append", help="leave the others as they are")
    options.add_argument("--bands", action="store_true", help="only write bands.toml")
    given = options.parse_args()
    if given.bands:
        write_bands(PRESETS / "bands.toml")
        return
    wanted = given.family or list(FITTED)
    fits = [fit_family(family) for family in wanted]
    for one in fits:
        sys.stdout.write("\n".join(_describe(one)) + "\n")
    write_efficiency(fits, PRESETS / "efficiency.toml")
    write_left_out(fits, PRESETS / "left_out.toml")
    # In a process of its own, which reads the files just written.
    subprocess.run([sys.executable, __file__, "--bands"], check=True)


if __name__ == "__main__":
    main()

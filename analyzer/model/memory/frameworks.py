"""What each framework keeps for the backward pass, read from presets/frameworks.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "presets" / "frameworks.toml"


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes kept of each element of a layer where activations have 16 bits.

    norm_input and norm_output count for each of two norms, mlp_first for each first product of
    the MLP. The flags: scores, the attention matrix of unfused attention; expand_kv, keys and
    values copied to every query head; routed_output, what the experts hand back; fp8_inputs, matrix
    products in fp8 keep their inputs in fp8.
    """

    norm_input: float
    norm_output: float
    residual: float
    query: float
    key: float
    value: float
    attention_output: float
    projection: float
    mlp_first: float
    mlp_gate: float
    mlp_second: float
    mlp_output: float
    scores: bool
    expand_kv: bool
    routed_output: bool
    fp8_inputs: bool


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What one framework allocates; frameworks.toml says what each number counts, and its source.

    rows names the published runs that a number was fitted on; low and high bound a measured peak
    over the predicted one.
    """

    framework: str
    source: str
    rows: tuple[str, ...]
    saved: Saved
    selective: Saved
    logits_saved: float
    logits_working: float
    logits_working_split: float
    pipeline_output: float
    layer_gradient: float
    optimizer_working: float
    workspace_bytes: int
    low: float
    high: float


def coefficients(framework: str) -> Coefficients:
    """The coefficients of a framework (Recipe.framework)."""
    return _all()[framework]


@lru_cache(maxsize=1)
def _all() -> dict[str, Coefficients]:
    tables = tomllib.loads(FILE.read_text())
    return {name: _coefficients(name, tables) for name in tables}


def _coefficients(name: str, tables: dict[str, Any]) -> Coefficients:
    table = dict(tables[name])
    layers = tables[table.pop("same_layers_as", name)]
    table |= {
        "rows": tuple(table["rows"]),
        "saved": Saved(**layers["saved"]),
        "selective": Saved(**layers.get("selective", layers["saved"] | {"scores": False})),
    }
    return Coefficients(framework=name, **table)

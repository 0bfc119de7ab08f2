"""Tables of published figures, and checks of the model against their rows."""

from __future__ import annotations

import ast
import csv
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Literal, TypeVar

from stepsplit.analyzer.errors import DataError, StepsplitError


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of a table. Reading a column that is absent or no number raises DataError."""

    table: str
    id: str
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        try:
            return self.values[column]
        except KeyError:
            raise DataError(f"{self.table}.csv", f"no column {column!r}", _MEND_COLUMN) from None

    def number(self, column: str) -> float:
        text = self.text(column)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        problem = f"{column} of {self.id} is {text!r}, not a number"
        raise DataError(f"{self.table}.csv", problem, _MEND_COLUMN)

    def count(self, column: str) -> int:
        return int(self.number(column))

    def choice(self, column: str, choices: Mapping[str, _T]) -> _T:
        """What the row's word there stands for."""
        word = self.text(column)
        if word in choices:
            return choices[word]
        problem, known = f"{column} of {self.id} is {word!r}", ", ".join(choices)
        raise DataError(f"{self.table}.csv", problem, f"known are {known}")

    def known(self, column: str) -> bool:
        """Whether the row has anything there."""
        return bool(self.values.get(column, "").strip())


@dataclass(frozen=True, slots=True)
class Row:
    """One published number beside the model's, both in unit.

    tolerance is how far apart they may be to count as equal (what the printed digits leave open).
    fitted: a constant of the model was fitted on this row, which is then not reported.
    """

    table: str
    case: str
    what: str
    published: float
    predicted: float
    unit: str
    tolerance: float = 0.0
    fitted: bool = False

    @property
    def error(self) -> float:
        """predicted / published - 1, a ratio."""
        if self.published == self.predicted:
            return 0.0
        return self.predicted / self.published - 1 if self.published else math.inf

    @property
    def equal(self) -> bool:
        return abs(self.predicted - self.published) <= self.tolerance * (1 + 1e-9) + 1e-12


# A check made of a table's records, without those that describe nothing that can be modelled.

Build = Callable[[PublishedRow], tuple[Row, ...]]


def equality(name: str, records: Iterable[PublishedRow], build: Build) -> Check:
    """All rows must come out as printed."""
    return gathered(name, records, build, "equality", (1.0,))


def gathered(
    name: str,
    records: Iterable[PublishedRow],
    build: Build,
    measure: Measure,
    bar: tuple[float, ...],
    fitted: Collection[str] = (),
    note: str = "",
) -> Check:
    """The check of what build makes of each record. A record at which build raises an error of the
    input (an unknown model, an impossible job) is left out, and named in left_out."""
    rows: list[Row] = []
    left_out: list[str] = []
    for record in records:
        try:
            rows.extend(build(record))
        except StepsplitError as error:
            left_out.append(f"{record.id}: {error}")
    found = check(name, marked(rows, fitted), measure, bar, note=note)
    return replace(found, left_out=tuple(left_out))


# What a validation says: rows of published against predicted, and checks with a bar for them.

Measure = Literal["equality", "mean/max", "mean/p90", "mean", "median"]

WORST = 5


@dataclass(frozen=True, slots=True)
class Check:
    """Rows that are held to one bar together.

    bar and result are ratios in the order of measure: the share of equal rows, or mean and
    maximum, mean and 90th percentile, mean, median of the absolute errors. A check without rows
    says in note why, and is neither met nor missed; one without a bar is shown and held to nothing.
    baseline is what one fitted utilization for each kind of run reaches on the same rows. left_out
    names records that the model cannot describe, and why.
    """

    name: str
    rows: tuple[Row, ...]
    measure: Measure
    bar: tuple[float, ...]
    result: tuple[float, ...] = ()
    baseline: tuple[float, ...] | None = None
    note: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def skipped(self) -> bool:
        return not self.result

    @property
    def met(self) -> bool:
        """Whether every number of the result is within the bar."""
        pairs = zip(self.result, self.bar, strict=False)
        if self.measure == "equality":
            return all(result >= bar for result, bar in pairs)
        return all(result <= bar for result, bar in pairs)

    @property
    def reported(self) -> tuple[Row, ...]:
        """The rows of the result: those that nothing was fitted on."""
        return tuple(row for row in self.rows if not row.fitted)

    @property
    def worst(self) -> tuple[Row, ...]:
        """The reported rows that are farthest off; of an equality those that are not equal."""
        rows = sorted(self.reported, key=lambda row: -abs(row.error))
        if self.measure == "equality":
            rows = [row for row in rows if not row.equal]
        return tuple(rows[:WORST])


def check(
    name: str,
    rows: Iterable[Row],
    measure: Measure,
    bar: tuple[float, ...],
    baseline: tuple[float, ...] | None = None,
    note: str = "",
) -> Check:
    """The check with its result over the rows that nothing was fitted on."""
    found = tuple(rows)
    reported = [row for row in found if not row.fitted]
    _assert_disjoint(found, reported)
    result = measured(measure, reported) if reported else ()
    return Check(name, found, measure, bar, result, baseline, _nothing(found, result) or note)


def measured(measure: Measure, rows: Collection[Row]) -> tuple[float, ...]:
    """The measure of one or more rows."""
    if measure == "equality":
        return (sum(row.equal for row in rows) / len(rows),)
    off = [abs(row.error) for row in rows]
    match measure:
        case "mean/max":
            return fmean(off), max(off)
        case "mean/p90":
            return fmean(off), percentile_90(off)
        case "mean":
            return (fmean(off),)
    return (median(off),)


def percentile_90(values: list[float]) -> float:
    """Between the two nearest of the sorted values, as numpy's default does."""
    return quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]


def marked(rows: Iterable[Row], fitted: Collection[str]) -> tuple[Row, ...]:
    """The rows, with those marked whose case is one of the fitted ones."""
    return tuple(replace(row, fitted=row.case in fitted) for row in rows)


def _assert_disjoint(rows: Iterable[Row], reported: Iterable[Row]) -> None:
    fitted = {row.case for row in rows if row.fitted}
    both = fitted & {row.case for row in reported}
    assert not both, f"fitted on and reported: {sorted(both)}"


def _nothing(rows: tuple[Row, ...], result: tuple[float, ...]) -> str:
    if result:
        return ""
    return "all rows were fitted on" if rows else "no such rows in this folder"


# The rows of a folder of published tables, with their ids.

PUBLISHED = Path(__file__).parent / "published"

_T = TypeVar("_T")

_MEND_COLUMN = "give the column as the tables of stepsplit have it"


@dataclass(frozen=True, slots=True)
class Published:
    """A folder of tables; columns that nobody asks for are ignored."""

    folder: Path = PUBLISHED

    def has(self, table: str) -> bool:
        return (self.folder / f"{table}.csv").is_file()

    def records(self, table: str) -> tuple[PublishedRow, ...]:
        """The table's rows, none where there is no such file. Raises DataError."""
        if not self.has(table):
            return ()
        rows = _read(self.folder / f"{table}.csv")
        try:
            names = [row_id(table, row) for row in rows]
        except KeyError as missing:
            raise DataError(f"{table}.csv", f"no column {missing}", _MEND_COLUMN) from None
        return tuple(
            PublishedRow(table, *each) for each in zip(_distinct(names), rows, strict=True)
        )


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(path, f"cannot be read ({error})", "give a CSV file in UTF-8") from None


def _distinct(names: list[str]) -> list[str]:
    """The second row of one name ends in #2, and so on."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


# What each row of a published table is called: table/case, the same in any copy of the table.

IDS: dict[str, str] = {
    "activation_coefficient_measured": "activation-coefficient/{model}",
    "ccl_bench_training_traces": "ccl-bench/{trace}",
    "deepspeed_estimator_formulas": "deepspeed-formula/{stage}_{offload}",
    "deepspeed_estimator_outputs": "deepspeed/{model}_{stage}_{options}_{gpus_per_node}x{nodes}",
    "korthikanti_fig1_memory_formula_values": "korthikanti-fig1/{model}",
    "korthikanti_table2_activation_formulas": "korthikanti-t2/{configuration}",
    "korthikanti_table5_end_to_end": "korthikanti-t5/{model}",
    "llama3_405b_table4": "llama-3/{gpus}_{seq}",
    "llm_foundry_mpt_throughput": (
        "llm-foundry/{model}_{seq}_{gpus}x{gpu}_{precision}_{micro_batch}x{grad_accum}"
        "_{fsdp_strategy}_ckpt-{activation_ckpt}"
    ),
    "megascale_table2": "megascale/{model}_{system}_{gpus}_{global_batch}",
    "megatron_2020_tp_weak_scaling": "megatron-2020/{case}_{gpus}",
    "megatron_dist_optimizer_bytes": "megatron-bytes/{param_dtype}_{grad_dtype}",
    "megatron_h100_weak_scaling": "megatron-h100/{model}_{gpus}",
    "megatron_sc21_table1": "sc21-t1/{params_B}B",
    "megatron_sc21_table2_zero3_vs_ptd": "sc21-t2/{scheme}_{params_B}B_{gpus}",
    "mtnlg_530b": "mt-nlg/{gpus}",
    "nanotron_best_configs_h100": "nanotron/{params_B}B_{gpus}",
    "nccl_allreduce_alps_gh200": "alps/{nodes}x4_{size_bytes}",
    "nccl_allreduce_sweeps": "sweep/{system}_{tool}_{size_bytes}",
    "nccl_busbw_by_ranks_and_algo": "busbw/{system}_{collective}_{ranks}",
    "nccl_busbw_definitions": "nccl-tests/{collective}",
    "published_scalars": "scalar/{model}_{quantity}",
    "simumax_b200_measured": "simumax/{case}",
    "torchtitan_throughput_memory": (
        "torchtitan/{model}_{seq}_{gpus}_{config}_ckpt-{activation_ckpt}"
    ),
    "zero_bubble_table4_throughput_memory": "zb-t4/{model}_m{num_microbatches}_{schedule}",
    "zero_bubble_table5_9_bubble_rates": "zb-t5/{model}_m{num_microbatches}",
    "zero_table1_model_states": "zero-t1/{model}_{stage}_dp{dp}",
    "zero_table2_max_model": "zero-t2/mp{mp}",
}
"""File name -> the id of a row, made of its columns."""


def row_id(table: str, values: Mapping[str, str]) -> str:
    """The id of one row. Raises KeyError for a column that the row lacks."""
    return IDS[table].format_map(values)


# The value of a formula as a table prints it, and of a number by the digits that are printed.

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

_MEND_ARITHMETIC = "write it with letters, numbers, + - * / and brackets"


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """The formula with these values for its letters. Raises DataError for anything but arithmetic.

    Only sums, products and max(...) are understood: a table is data and runs nothing.
    """
    try:
        return _value(ast.parse(formula, mode="eval").body, symbols)
    except (SyntaxError, KeyError, ZeroDivisionError) as error:
        raise DataError(
            f"formula {formula!r}", f"not arithmetic ({error})", _MEND_ARITHMETIC
        ) from None


def _value(node: ast.expr, symbols: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return float(symbols[name])
        case ast.BinOp(left=left, op=op, right=right):
            compute = _OPERATORS[type(op)]
            return compute(_value(left, symbols), _value(right, symbols))
        case ast.Call(func=ast.Name(id="max"), args=arguments):
            return max(_value(each, symbols) for each in arguments)
    raise KeyError(ast.dump(node)[:40])


def as_printed(value: float, printed: str) -> float:
    """The value with the digits that are printed, rounded or cut off, whichever comes closer.

    Tables do either: ZeRO's prints 4046.875 as 4046 and 0.46875 as 0.47.
    """
    scale = 10.0 ** decimals(printed)
    ways = (math.floor(value * scale + 1e-9) / scale, round(value * scale) / scale)
    return min(ways, key=lambda way: abs(way - float(printed)))


def decimals(printed: str) -> int:
    """Digits behind the point."""
    return len(printed.partition(".")[2])


def half_digit(printed: str) -> float:
    """What rounding to the printed digits leaves open on either side."""
    return 0.5 * 10.0 ** -decimals(printed)


def parameters(printed: str) -> float:
    """A count with the field's letters: "7.6B" -> 7.6e9, "0.5T" -> 5e11."""
    return float(printed[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[printed[-1]]

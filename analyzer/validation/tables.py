"""Tables of published figures and of recipes, and checks of the model against their rows."""

from __future__ import annotations

import ast
import csv
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Literal, TypeVar

from stepsplit.analyzer.errors import DataError, StepsplitError
from stepsplit.analyzer.model.config import (
    QUANTIZED,
    AttentionKernel,
    CudaGraph,
    Dispatcher,
    Experts,
    GemmDtype,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    RecomputePart,
    TrainingConfig,
)
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.parameters import count_model_flops
from stepsplit.analyzer.model.preset_names import list_model_names


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One row of a table. Reading a missing column, or text as a number, raises DataError."""

    table: str
    id: str
    values: Mapping[str, str]

    def read_text(self, column: str) -> str:
        try:
            return self.values[column]
        except KeyError:
            raise DataError(f"{self.table}.csv", f"no column {column!r}", _COLUMN_HINT) from None

    def read_number(self, column: str) -> float:
        value = self.read_text(column)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        problem = f"{column} of {self.id} is {value!r}, not a number"
        raise DataError(f"{self.table}.csv", problem, _COLUMN_HINT)

    def read_count(self, column: str) -> int:
        return int(self.read_number(column))

    def read_choice(self, column: str, choices: Mapping[str, _T]) -> _T:
        """Map the column's value through choices."""
        return self.read_word(column, self.read_text(column), choices)

    def read_word(self, column: str, word: str, choices: Mapping[str, _T]) -> _T:
        """Map a word of the column's value through choices."""
        if word in choices:
            return choices[word]
        problem, allowed = f"{column} of {self.id} is {word!r}", ", ".join(choices)
        raise DataError(f"{self.table}.csv", problem, f"known values: {allowed}")

    def compare(
        self,
        what: str,
        published: float,
        predicted: float,
        unit: str,
        tolerance: float = 0.0,
        case: str = "",
    ) -> ValidationRow:
        """A published number of this row and a predicted one; case is another id than the row's."""
        return ValidationRow(
            self.table, case or self.id, what, published, predicted, unit, tolerance
        )

    def has_value(self, column: str) -> bool:
        """Whether the column exists and is not empty."""
        return bool(self.values.get(column, "").strip())


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """A published and a predicted number, both in unit.

    tolerance is the difference up to which they count as equal (rounding of the printed digits).
    fitted: a constant of the model was fitted on this row, so the row is not reported. low and
    high are the ends of the prediction's error band; 0 without a band.
    """

    table: str
    case: str
    what: str
    published: float
    predicted: float
    unit: str
    tolerance: float = 0.0
    fitted: bool = False
    low: float = 0.0
    high: float = 0.0

    @property
    def is_inside(self) -> bool:
        """Whether the published number is in the error band."""
        return self.low <= self.published <= self.high

    @property
    def error(self) -> float:
        """predicted / published - 1, a ratio."""
        if self.published == self.predicted:
            return 0.0
        return self.predicted / self.published - 1 if self.published else math.inf

    @property
    def equal(self) -> bool:
        return abs(self.predicted - self.published) <= self.tolerance * (1 + 1e-9) + 1e-12


# A published run and its step time.

Family = Literal[
    "A100 Megatron", "A100 ZeRO-3", "B200 dense", "B200 experts", "llm-foundry", "torchtitan",
    "H100 recipes, bf16", "H100 recipes, fp8", "Blackwell recipes, bf16", "Blackwell recipes, fp8",
    "Blackwell recipes, nvfp4", "LoRA recipes", "recipes with experts",
    "A100 reports", "H100 reports", "Blackwell reports", "AMD reports", "reports with experts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A published run; step_ns is the published step time, or computed from the throughput.

    source is the publisher, whose runs are not independent of one another.
    """

    table: str
    id: str
    family: Family
    job: JobConfig
    step_ns: float
    source: str


# A check from the records of a table; records that cannot be modelled are listed apart.

Build = Callable[[PublishedRow], tuple[ValidationRow, ...]]


def check_equality(name: str, records: Iterable[PublishedRow], build: Build) -> Check:
    """Check that all rows are equal to the published values."""
    return check_records(name, records, build, "equality", (1.0,))


def check_records(
    name: str,
    records: Iterable[PublishedRow],
    build: Build,
    measure: Measure,
    bar: tuple[float, ...],
    fitted: Collection[str] = (),
    note: str = "",
) -> Check:
    """Check the rows that build returns for each record.

    Records for which build raises an error (an unknown model, an invalid job) go to left_out.
    """
    rows: list[ValidationRow] = []
    left_out: list[str] = []
    for record in records:
        try:
            rows.extend(build(record))
        except StepsplitError as error:
            left_out.append(f"{record.id}: {error}")
        except ArithmeticError as error:
            left_out.append(f"{record.id}: a value is zero or too large ({error})")
    result = check(name, mark_fitted(rows, fitted), measure, bar, note=note)
    return replace(result, left_out=tuple(left_out))


# The checks: rows of published and predicted numbers, and a bar for their errors.

Measure = Literal["equality", "mean/max", "mean/p90", "mean", "median"]

WORST = 5


@dataclass(frozen=True, slots=True)
class Check:
    """Rows with one bar for all of them.

    A check without rows (other than those used in a fit) is skipped; without a bar it is
    only reported. Both count as met. The numbers of bar and result are ratios in the order of
    measure.

    Attributes:
        name: What is checked.
        rows: Published and predicted values; those used in a fit are not part of the result.
        measure: "equality" is the share of equal rows; the others are of the absolute relative
            errors: mean and maximum, mean and 90th percentile, mean, or median.
        bar: Limits of the result: minimum for "equality", else maximum; () for none.
        result: The measure of the rows; () if the check is skipped.
        baseline: Result of a fitted constant utilization per kind of run on the same rows; None if
            there is none.
        note: Why the check is skipped, or a remark on its rows; "" if none.
        left_out: Records that cannot be modelled, each with the reason.
        sources: Publishers of the rows, if the check counts them; its rows are then those of other
            checks, in another order.

    Examples:
        >>> from stepsplit.analyzer import Check
        >>> check = Check("step time", (), "mean/max", bar=(0.05, 0.1), result=(0.03, 0.12))
        >>> check.skipped, check.met
        (False, False)
    """

    name: str
    rows: tuple[ValidationRow, ...]
    measure: Measure
    bar: tuple[float, ...]
    result: tuple[float, ...] = ()
    baseline: tuple[float, ...] | None = None
    note: str = ""
    left_out: tuple[str, ...] = ()
    sources: int = 0

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
    def reported(self) -> tuple[ValidationRow, ...]:
        """The rows of the result: those that were not used in a fit."""
        return tuple(row for row in self.rows if not row.fitted)

    @property
    def banded(self) -> tuple[ValidationRow, ...]:
        """The reported rows with an error band."""
        return tuple(row for row in self.reported if row.high)

    @property
    def inside(self) -> int:
        """How many of the banded rows are inside of their band."""
        return sum(row.is_inside for row in self.banded)

    @property
    def worst(self) -> tuple[ValidationRow, ...]:
        """The reported rows with the largest errors; for equality, only rows that are not equal."""
        rows = sorted(self.reported, key=lambda row: -abs(row.error))
        if self.measure == "equality":
            rows = [row for row in rows if not row.equal]
        return tuple(rows[:WORST])


def check(
    name: str,
    rows: Iterable[ValidationRow],
    measure: Measure,
    bar: tuple[float, ...],
    baseline: tuple[float, ...] | None = None,
    note: str = "",
) -> Check:
    """Build the check, with its result over the rows that were not used in a fit."""
    all_rows = tuple(rows)
    reported = [row for row in all_rows if not row.fitted]
    fitted = {row.case for row in all_rows if row.fitted}
    both = fitted & {row.case for row in reported}
    assert not both, f"fitted on and reported: {sorted(both)}"
    result = compute_measure(measure, reported) if reported else ()
    if not reported:
        note = "all rows were used in the fit" if all_rows else "no rows in this folder"
    return Check(name, all_rows, measure, bar, result, baseline, note)


def compute_measure(measure: Measure, rows: Collection[ValidationRow]) -> tuple[float, ...]:
    """Compute the measure of one or more rows."""
    if measure == "equality":
        return (sum(row.equal for row in rows) / len(rows),)
    errors = [abs(row.error) for row in rows]
    match measure:
        case "mean/max":
            return fmean(errors), max(errors)
        case "mean/p90":
            # Linear interpolation between the two nearest values, as numpy's default.
            several = len(errors) > 1
            p90 = quantiles(errors, n=10, method="inclusive")[8] if several else errors[0]
            return fmean(errors), p90
        case "mean":
            return (fmean(errors),)
    return (median(errors),)


def mark_fitted(
    rows: Iterable[ValidationRow], fitted: Collection[str]
) -> tuple[ValidationRow, ...]:
    """Mark the rows whose case is one of the fitted ones."""
    return tuple(replace(row, fitted=row.case in fitted) for row in rows)


# The rows of a folder of published tables, with their ids.

PUBLISHED = Path(__file__).parent / "published"

_T = TypeVar("_T")

_COLUMN_HINT = "use the columns of stepsplit's published tables"


@dataclass(frozen=True, slots=True)
class Published:
    """A folder of tables; unused columns are ignored."""

    folder: Path = PUBLISHED

    def has(self, table: str) -> bool:
        return (self.folder / f"{table}.csv").is_file()

    def read_records(self, table: str) -> tuple[PublishedRow, ...]:
        """The table's rows, empty if there is no such file. Raises DataError."""
        if not self.has(table):
            return ()
        rows = _read(self.folder / f"{table}.csv")
        if not rows:
            raise DataError(f"{table}.csv", "has no rows", _COLUMN_HINT)
        try:
            names = [format_row_id(table, row) for row in rows]
        except KeyError as missing:
            raise DataError(f"{table}.csv", f"no column {missing}", _COLUMN_HINT) from None
        # Repeated names get #2, #3 ...
        counts: Counter[str] = Counter()
        records = []
        for name, row in zip(names, rows, strict=True):
            counts[name] += 1
            number = "" if counts[name] == 1 else f"#{counts[name]}"
            records.append(PublishedRow(table, f"{name}{number}", row))
        return tuple(records)


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(path, f"cannot be read ({error})", "give a CSV file in UTF-8") from None


# Ids of the rows of published tables (table/case), the same in any copy of a table.

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
    "measured_jobs": "measured/{case}",
    "megascale_table2": "megascale/{model}_{system}_{gpus}_{global_batch}",
    "megatron_bridge_performance": (
        "bridge/{release}_{kind}_{model}_{system}_{gpus}_{precision}_{tp}x{pp}"
    ),
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
    "nccl_sweeps_over_nodes": "nodes/{system}_{collective}_{ranks}_{size_bytes}",
    "published_scalars": "scalar/{model}_{quantity}",
    "simumax_b200_measured": "simumax/{case}",
    "torchtitan_throughput_memory": (
        "torchtitan/{model}_{seq}_{gpus}_{config}_ckpt-{activation_ckpt}"
    ),
    "training_reports": "report/{case}",
    "training_runs": (
        "recipe/{framework}_{kind}_{model}_{gpu}_{gpus}_{precision}_{global_batch}_{micro_batch}"
    ),
    "zero_bubble_table4_throughput_memory": "zb-t4/{model}_m{num_microbatches}_{schedule}",
    "zero_bubble_table5_9_bubble_rates": "zb-t5/{model}_m{num_microbatches}",
    "zero_table1_model_states": "zero-t1/{model}_{stage}_dp{dp}",
    "zero_table2_max_model": "zero-t2/mp{mp}",
}
"""File name -> template of a row's id."""


def format_row_id(table: str, values: Mapping[str, str]) -> str:
    """The id of one row; of a recipe with what is recomputed in which layout.
    Raises KeyError for a missing column."""
    name, recomputed = IDS[table].format_map(values), values.get("recompute", "")
    if table != RECIPES_TABLE or recomputed in ("", "none"):
        return name
    return f"{name}_{recomputed}_{values['tp']}x{values['pp']}"


# Values of printed formulas and numbers.

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

_ARITHMETIC_HINT = "use letters, numbers, + - * / and parentheses"


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """Evaluate a formula with values for its symbols. Raises DataError for other than arithmetic.

    Only + - * / and max(...) are allowed, so that a table cannot run code.
    """
    try:
        return _evaluate_node(ast.parse(formula, mode="eval").body, symbols)
    except (SyntaxError, KeyError, ZeroDivisionError) as error:
        raise DataError(
            f"formula {formula!r}", f"not arithmetic ({error})", _ARITHMETIC_HINT
        ) from None


def _evaluate_node(node: ast.expr, symbols: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return float(symbols[name])
        case ast.BinOp(left=left, op=op, right=right):
            compute = _OPERATORS[type(op)]
            return compute(_evaluate_node(left, symbols), _evaluate_node(right, symbols))
        case ast.Call(func=ast.Name(id="max"), args=arguments):
            return max(_evaluate_node(each, symbols) for each in arguments)
    raise KeyError(ast.dump(node)[:40])


def round_as_printed(value: float, printed: str) -> float:
    """Round or truncate the value to the printed digits, whichever is closer to the printed one.

    Tables do either: ZeRO's prints 4046.875 as 4046 and 0.46875 as 0.47.
    """
    scale = 10.0 ** count_decimals(printed)
    candidates = (math.floor(value * scale + 1e-9) / scale, round(value * scale) / scale)
    return min(candidates, key=lambda way: abs(way - float(printed)))


def count_decimals(printed: str) -> int:
    """Number of digits after the decimal point."""
    return len(printed.partition(".")[2])


def compute_half_digit(printed: str) -> float:
    """Half of the last printed digit: the rounding error of a printed number."""
    return 0.5 * 10.0 ** -count_decimals(printed)


def parse_count(printed: str) -> float:
    """Parse a count with a suffix: "7.6B" -> 7.6e9, "0.5T" -> 5e11."""
    units = {"M": 1e6, "B": 1e9, "T": 1e12}
    try:
        return float(printed[:-1]) * units[printed[-1:]]
    except (KeyError, ValueError):
        raise DataError(repr(printed), "is not a count", 'write it as "7.6B"') from None


# Published runs of training recipes (NeMo, Megatron-Bridge, DGX Cloud, MaxText) as jobs.

RECIPES_TABLE, BRIDGE_TABLE = "training_runs", "megatron_bridge_performance"

_HINT = "give rows of dense or mixture-of-experts decoders with a whole layout"

GROK = ModelConfig(
    layers=64, hidden=6144, heads=48, kv_heads=8, head_size=128, ffn=32768, vocab=131072,
    gated=True, tied=True, norm="rms", biases=False, experts=Experts(8, 2, 32768), name="grok-1",
)  # fmt: skip
"""config of xai-org/grok-1."""


def _scale_gpt3(layers: int, hidden: int) -> ModelConfig:
    """The sizes in between that NeMo trains, with heads of 128."""
    heads = hidden // 128
    return replace(
        load_model("gpt3-175b"), layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        ffn=4 * hidden, name="gpt3",
    )  # fmt: skip


OTHER_MODELS: Mapping[str, Callable[[], ModelConfig]] = {
    "gpt320b": lambda: _scale_gpt3(44, 6144),
    "gpt35b": lambda: _scale_gpt3(24, 4096),
    "grok1314b": lambda: GROK,
}
"""Models of recipes that have no preset, by their names in letters and digits."""

GPUS: tuple[tuple[str, tuple[str, str]], ...] = (
    ("GB300", ("gb300", "ib-xdr-800")),
    ("GB200", ("gb200", "ib-ndr-400")),
    ("B300", ("b300-sxm", "ib-xdr-800")),
    ("B200", ("b200-sxm", "ib-ndr-400")),
    ("H200", ("h200-sxm", "ib-ndr-400")),
    ("H100", ("h100-sxm", "ib-ndr-400")),
    ("A100", ("a100-sxm-80gb", "ib-hdr-200")),
)
"""Word in a system's name -> its GPU and the network of DGX systems."""


def build_recipe(row: PublishedRow) -> Case:
    """A run with a step time or tokens/s; the columns of both tables.

    Recipes overlap data- and tensor-parallel communication and shard optimizer states. Raises
    DataError if the row does not say what ran, or ran something that has no model.
    """
    software = find_software(row)
    name = row.read_text("model")
    plain = _spell_plainly(name)
    known = {_spell_plainly(preset): preset for preset in list_model_names()}
    found = max(filter(plain.startswith, (*known, *OTHER_MODELS)), key=len, default="")
    if not found:
        raise _refuse(row, f"no preset of {name}")
    model = load_model(known[found]) if found in known else OTHER_MODELS[found]()
    job = JobConfig(
        replace(model, layers=_read_size(row, "layers", model.layers)),
        _build_layout(row, software),
        _build_training(row, software),
        _find_hardware(row),
    )
    job = replace(job, parallel=_place_layers(job))
    family = _name_family(job)
    return Case(row.table, row.id, family, job, _read_step_ns(row, job), _name_source(row))


def _refuse(row: PublishedRow, problem: str) -> DataError:
    return DataError(f"{row.table}.csv", f"{row.id}: {problem}", _HINT)


def _spell_plainly(name: str) -> str:
    """The name in letters and digits: "LLAMA3_70B" and "Llama 3 70B" are one."""
    return re.sub("[^a-z0-9]", "", name.lower())


def _find_hardware(row: PublishedRow) -> HardwareConfig:
    system = _read_system(row)
    for word, (name, link) in GPUS:
        if word in system:
            return load_hardware(name, link)
    raise _refuse(row, f"no preset of {system}")


def _read_system(row: PublishedRow) -> str:
    return row.read_text("gpu" if row.has_value("gpu") else "system")


def _read_size(row: PublishedRow, column: str, default: int) -> int:
    """A count; the default where the table leaves it out or prints n/a or 0."""
    if not row.has_value(column) or row.read_text(column) in ("n/a", "NA"):
        return default
    return row.read_count(column) or default


def _build_layout(row: PublishedRow, software: Software) -> ParallelConfig:
    tp, pp, cp = (_read_size(row, axis, 1) for axis in ("tp", "pp", "cp"))
    gpus = row.read_count("gpus")
    if gpus % (tp * pp * cp):
        raise _refuse(row, f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
    common = ParallelConfig(
        tp=tp, pp=pp, cp=cp, ep=_read_size(row, "ep", 1), sequence_parallel=tp > 1,
        expert_tp=tp if software.shards_experts else 1, dispatcher=software.dispatcher,
    )  # fmt: skip
    dp = gpus // (tp * pp * cp)
    shard = _read_shard_size(row)
    if shard > 1:
        if dp % shard:
            raise _refuse(row, f"groups of {shard} do not divide {dp} data-parallel ranks")
        return replace(
            common, dp_shard=shard, dp_replicate=dp // shard, zero=3, overlap=frozenset({"dp"})
        )
    chunks = _read_size(row, "vp", 1) if pp > 1 else 1
    if "VP printed NA" in row.values.get("other", ""):
        chunks = NEMOTRON_CHUNKS
    overlap = {"dp", "tp", "ep"} if software.overlaps_experts else {"dp", "tp"}
    return replace(
        common, dp_replicate=dp, zero=1, overlap=frozenset(overlap), chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )  # fmt: skip


def _read_shard_size(row: PublishedRow) -> int:
    """Ranks that share the parameters; 1 without FSDP."""
    return max(_read_size(row, "fsdp", 1), _read_size(row, "fsdp_group", 1))


NEMOTRON_CHUNKS = 12
"""Virtual stages of Nemotron-4 340B in all other versions of the recipe."""


def _place_layers(job: JobConfig) -> ParallelConfig:
    """An even split, or one with a layer less at both ends, or the first stages one more."""
    stages = job.parallel.pp * job.parallel.chunks
    layers, rest = divmod(job.model.layers, stages)
    if not rest:
        return job.parallel
    if rest == stages - 2:
        sizes = [layers, *[layers + 1] * rest, layers]
    else:
        sizes = [layers + (1 <= stage <= rest) for stage in range(stages)]
    return replace(job.parallel, layers_per_stage=tuple(sizes))


def _build_training(row: PublishedRow, software: Software) -> TrainingConfig:
    for column in ("seq", "global_batch", "tp"):
        if not row.has_value(column):
            raise _refuse(row, f"no {column}")
    if "MaxText" in row.read_text("model"):
        raise _refuse(row, "MaxText's compiled kernels and remat policy are not modelled")
    if "AutoModel" in row.values.get("framework", ""):
        raise _refuse(row, "which kernels NeMo AutoModel ran is not published")
    kind = row.read_text("kind")
    offloaded = software.offload_layers if _read_shard_size(row) > 1 else 0
    return TrainingConfig(
        seq_len=row.read_count("seq"),
        micro_batch=_read_size(row, "micro_batch", 1),
        global_batch=row.read_count("global_batch"),
        dtype=_read_dtype(row),
        gradient_dtype="fp32" if _name_source(row) == "megatron-lm" else "bf16",
        attention_kernel=software.attention_kernel,
        cuda_graph=software.cuda_graph,
        unfused=frozenset() if software.fuses_experts else None,
        recompute_parts=_read_recomputed(row) | software.recomputes,
        document_tokens=DOCUMENT_TOKENS if kind.startswith(("SFT", "LoRA")) else 0,
        offload_layers=offloaded,
        offload=frozenset({"activations"}) if offloaded else frozenset(),
        **LORA if kind.startswith("LoRA") else {},
    )


RECOMPUTED: dict[str, RecomputePart] = {
    "core_attn": "core-attention",
    "layernorm": "norms",
    "mla_up_proj": "mla-up",
    "mlp": "mlp",
    "moe": "experts",
    "moe_act": "activation",
}
"""Megatron-LM's recompute_modules."""


def _read_recomputed(row: PublishedRow) -> frozenset[RecomputePart]:
    names = row.values.get("recompute", "")
    if names in ("", "none"):
        return frozenset()
    parts = {name: RECOMPUTED.get(name) for name in names.split(", ")}
    if None in parts.values():
        raise _refuse(row, f"recomputation of {names} is not modelled")
    return frozenset(filter(None, parts.values()))


# What each release ran beside the columns of its table, from its scripts.

LORA: Mapping[str, Any] = {"lora_rank": 16, "lora_targets": frozenset({"qkv"})}
"""Adapters on queries, keys and values alone, as in NeMo's recipes in performance mode."""

DOCUMENT_TOKENS = 200
"""SFT and LoRA recipes pack SQuAD: paragraphs of about 120 words with a question (Rajpurkar et al.,
arXiv:1606.05250)."""


@dataclass(frozen=True, slots=True)
class Software:
    """Settings of a run that its table leaves out; offload_layers with FSDP alone."""

    dispatcher: Dispatcher = "all-to-all"
    overlaps_experts: bool = False
    cuda_graph: CudaGraph = "none"
    attention_kernel: AttentionKernel = ""
    shards_experts: bool = False
    recomputes: frozenset[RecomputePart] = frozenset()
    fuses_experts: bool = False
    offload_layers: int = 0


ONE_GRAPH = Software("hybridep", True, "step", "cudnn-fp8", fuses_experts=True)
GRAPH_OF_LAYERS = Software("hybridep", cuda_graph="layers")
_MLA_UP: frozenset[RecomputePart] = frozenset({"mla-up"})
_NORMS_AND_ACTIVATION: frozenset[RecomputePart] = frozenset({"norms", "activation"})

BRIDGE_SETTINGS: tuple[tuple[str, str, str, str, Software], ...] = (
    ("qwen3", "25.09", "GB200", "", Software(cuda_graph="layers")),
    ("qwen3", "25.09", "H100", "", Software("deepep", overlaps_experts=True)),
    ("qwen3", "25.11", "GB", "", GRAPH_OF_LAYERS),
    ("qwen3", "25.11", "H100", "", Software(overlaps_experts=True)),
    ("qwen3", "26.02.01", "H100", "", Software("deepep", overlaps_experts=True)),
    ("qwen3", "26.02.01", "", "", GRAPH_OF_LAYERS),
    ("qwen3", "26.02", "B200", "", Software(cuda_graph="layers")),
    ("qwen3", "26.02", "H100", "", Software(overlaps_experts=True)),
    ("qwen3", "26.02", "", "", GRAPH_OF_LAYERS),
    ("qwen3", "26.0", "H100", "", Software("hybridep")),
    ("qwen3", "26.04", "", "", GRAPH_OF_LAYERS),
    ("qwen3", "26.0", "", "", ONE_GRAPH),
    ("gptoss", "26.06.01", "GB", "fp8", replace(ONE_GRAPH, cuda_graph="none")),
    ("gptoss", "26.", "GB", "fp8", ONE_GRAPH),
    ("gptoss", "26.", "B300", "fp8", replace(ONE_GRAPH, cuda_graph="layers")),
    ("gptoss", "26.", "GB300", "bf16", Software(cuda_graph="layers")),
    (
        "gptoss", "26.", "GB200", "bf16",
        Software(overlaps_experts=True, recomputes=_NORMS_AND_ACTIVATION),
    ),
    ("gptoss", "26.02 ", "B300", "bf16", Software(cuda_graph="layers")),
    ("gptoss", "26.", "B300", "bf16", GRAPH_OF_LAYERS),
    ("gptoss", "26.", "", "bf16", Software(recomputes=_NORMS_AND_ACTIVATION)),
    ("deepseekv3", "26.06", "GB", "fp8", replace(ONE_GRAPH, recomputes=_MLA_UP)),
    ("deepseekv3", "26.08", "GB", "fp8", replace(ONE_GRAPH, recomputes=_MLA_UP)),
    ("deepseekv3", "26.06", "B300", "fp8", replace(ONE_GRAPH, recomputes=_MLA_UP)),
    ("deepseekv3", "26.08", "B300", "fp8", replace(ONE_GRAPH, recomputes=_MLA_UP)),
    ("deepseekv3", "", "GB", "", replace(GRAPH_OF_LAYERS, recomputes=_MLA_UP)),
    ("deepseekv3", "", "B300", "", replace(GRAPH_OF_LAYERS, recomputes=_MLA_UP)),
    ("deepseekv3", "", "", "", Software("hybridep", recomputes=_MLA_UP)),
    ("kimik2", "", "", "", Software("hybridep", recomputes=_MLA_UP)),
    ("llama370b", "", "GB300", "bf16", Software(offload_layers=30)),
    ("llama370b", "", "GB300", "fp8", Software(offload_layers=20)),
    ("llama370b", "", "GB200", "bf16", Software(offload_layers=20)),
    ("llama370b", "", "GB200", "fp8", Software(offload_layers=40)),
    ("llama370b", "", "B200", "fp8", Software(offload_layers=5)),
    ("llama31405b", "", "GB300", "bf16", Software(offload_layers=40)),
    ("llama31405b", "", "GB300", "fp8", Software(offload_layers=10)),
    ("llama31405b", "", "GB200", "fp8", Software(offload_layers=92)),
)  # fmt: skip
"""Model, release, GPU, precision -> settings in Megatron-Bridge's scripts/performance, tags
v0.1.0rc4 to v0.6.0 (files *_workload_base_configs); the first match counts. 26.06 has one CUDA
graph of the step, fused experts and fp8 attention (pull request 4211); 26.02 had no DeepEP (known
issues); GPT-OSS in 26.06.01 is 1.6 times as slow as in 26.06 and 26.08, as without its graph."""


def find_software(row: PublishedRow) -> Software:
    """Settings of the release in a row."""
    name, system = _spell_plainly(row.read_text("model")), _read_system(row)
    release = row.read_text("release" if row.has_value("release") else "framework")
    if name.startswith("grok"):
        # DGX Cloud's grok1: the NeMo 1 recipe of v25.02 shards experts over tp by default; ET of
        # launch.sh in v25.05 is 4 on GB200 and 1 on H100.
        shards = "v25.02" in release or "GB200" in system
        return Software(shards_experts=shards, cuda_graph="step" if "GB200" in system else "none")
    precision = row.read_text("precision").lower()
    for model, version, gpu, dtype, software in BRIDGE_SETTINGS:
        is_its_gpu = system.removeprefix("DGX-").startswith(gpu)
        if name.startswith(model) and version in release and is_its_gpu and dtype in precision:
            return software
    return Software()


def _read_dtype(row: PublishedRow) -> GemmDtype:
    precision = row.read_text("precision").lower()
    for dtype in QUANTIZED:
        if dtype in precision:
            return dtype
    if "bf16" in precision:
        return "bf16"
    raise _refuse(row, f"{precision} is not modelled")


def _read_step_ns(row: PublishedRow, job: JobConfig) -> float:
    if row.has_value("step_s"):
        return row.read_number("step_s") * 1e9
    if not row.has_value("tokens_per_s_per_gpu") and _name_source(row) == "megatron-bridge":
        flops_per_s = row.read_number("tflops_per_gpu") * 1e12 * row.read_count("gpus")
        return count_model_flops(job, "C5") / flops_per_s * 1e9
    tokens = job.training.global_batch * job.training.seq_len
    rate = row.read_number("tokens_per_s_per_gpu") * row.read_count("gpus")
    return tokens / rate * 1e9


def _name_family(job: JobConfig) -> Family:
    if job.model.experts is not None:
        return "recipes with experts"
    if job.training.lora_rank:
        return "LoRA recipes"
    if job.hardware.family == "hopper":
        return "H100 recipes, fp8" if job.training.dtype == "fp8" else "H100 recipes, bf16"
    families: dict[GemmDtype, Family] = {
        "bf16": "Blackwell recipes, bf16",
        "fp8": "Blackwell recipes, fp8",
        "nvfp4": "Blackwell recipes, nvfp4",
    }
    return families[job.training.dtype]


def _name_source(row: PublishedRow) -> str:
    """The publisher: versions of one recipe and releases of one program are not independent."""
    if row.table == BRIDGE_TABLE:
        return "megatron-lm" if "Megatron-LM" in row.read_text("release") else "megatron-bridge"
    source = row.read_text("source")
    for word, name in (
        ("dgxc", "dgx-cloud"), ("Megatron-Bridge", "megatron-bridge"), ("NeMo", "nemo"),
    ):  # fmt: skip
        if word in source:
            return name
    return source

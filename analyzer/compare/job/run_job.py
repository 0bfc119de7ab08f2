"""The job that a recording is of: what run.json says, what the steps show, what a RUN.toml adds."""

from __future__ import annotations

from collections.abc import Mapping

from stepsplit.analyzer.compare.job.hardware_seen import hardware_seen
from stepsplit.analyzer.compare.job.model_seen import model_seen
from stepsplit.analyzer.compare.job.parallel_seen import parallel_seen
from stepsplit.analyzer.compare.job.training_seen import training_seen
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.config_file import job_in
from stepsplit.analyzer.model.config_table import Table
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors.run_spec import RunSpec

NAMES = ("model", "parallel", "training", "hardware")
_WHOLE = ("preset", "file")
"""Keys that state a table's numbers all at once: what was seen is no part of such a table."""
_INSTEAD = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp",),
    "dp_shard": ("dp",),
    "world_size": ("dp", "dp_replicate", "dp_shard"),
    "gpus": ("dp", "dp_replicate", "dp_shard"),
    "global_batch": ("microbatches",),
    "microbatches": ("global_batch",),
}
"""Keys that say the same in other words: a stated one replaces those that were seen."""
_AXES = ("tp", "pp", "dp", "dp_replicate", "dp_shard", "world_size", "gpus")
"""Keys of which one at least says over how many ranks a job runs."""


def job_of_run(spec: RunSpec | None, found: RunSplit, stated: Table | None = None) -> Job:
    """The job of the recording; what the tables of stated say wins over what was seen.

    spec is what run.json says, None where there is none; stated is a RUN.toml, whole or a part.
    Raises UsageError, one line with all that nobody tells; DataError for a job that cannot be.
    """
    return job_in(run_table(spec, found, stated))


def run_table(spec: RunSpec | None, found: RunSplit, stated: Table | None = None) -> Table:
    """The RUN.toml of the recording, as a table. Raises UsageError where something is missing."""
    seen = (
        model_seen(spec),
        parallel_seen(spec, found),
        training_seen(spec, found),
        hardware_seen(spec, found),
    )
    where = "run.json" if stated is None else stated.where
    if stated is not None:
        stated.knows(*NAMES)
    tables = {table.name: _merged(table, stated).values for table in seen}
    _complete(tables, found, stated)
    return Table(where, "", tables)


def _merged(seen: Table, stated: Table | None) -> Table:
    """The table of that name with what is stated, and what was seen where nothing is."""
    own = None if stated is None else stated.table(seen.name, None)
    if own is None:
        return seen
    if any(key in own.values for key in _WHOLE):
        return own
    replaced = {other for key in own.values for other in _INSTEAD.get(key, ())}
    kept = {key: value for key, value in seen.values.items() if key not in replaced}
    return Table(own.where, seen.name, kept | dict(own.values))


def _complete(
    tables: Mapping[str, Mapping[str, object]], found: RunSplit, stated: Table | None
) -> None:
    """Raises UsageError that lists, table by table, what is needed and not told."""
    lacking = [
        f"[{name}] {', '.join(keys)}" for name in NAMES if (keys := _lacks(name, tables, found))
    ]
    if not lacking:
        return
    mend = "write them in a RUN.toml and give it with --run"
    if stated is not None:
        mend = f"write them in {stated.where}"
    raise UsageError(f"the recording does not tell {_listed(lacking)}: {mend}")


def _lacks(
    name: str, tables: Mapping[str, Mapping[str, object]], found: RunSplit
) -> tuple[str, ...]:
    table = tables[name]
    if any(key in table for key in _WHOLE):
        return ()
    return tuple(key for key in _needed(name, table, found) if key not in table)


def _needed(name: str, table: Mapping[str, object], found: RunSplit) -> tuple[str, ...]:
    match name:
        case "model":
            experts = any(one.name == "ep" for one in found.strategies)
            return (
                "layers", "hidden", "heads", "vocab",
                *(("ffn",) if table.get("gated") else ()),
                *(("experts", "top_k") if experts else ()),
            )  # fmt: skip
        case "parallel":
            return () if any(key in table for key in _AXES) else ("tp", "pp", "dp")
        case "training":
            batch = () if "microbatches" in table else ("global_batch",)
            return ("seq_len", "micro_batch", *batch)
        case "hardware":
            return () if "family" in table else ("preset",)
    return ()


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))

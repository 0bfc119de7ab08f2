"""A job with keys of other programs becomes one with ours: passes over its tables, one after the
other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from stepsplit.analyzer.model.config_decode import Mistakes, TomlTable, format_toml_keys
from stepsplit.analyzer.model.job_files.deepspeed import OWN_FLAGS, OWN_KEYS, put_settings
from stepsplit.analyzer.model.job_files.job_file import JobTablesBuilder
from stepsplit.analyzer.model.job_files.megatron_names import MegatronSettings, put_all
from stepsplit.analyzer.model.key_aliases import (
    ACCUMULATIONS,
    ALIASES,
    FIXED,
    HINTS,
    LOCAL_BATCHES,
    OWN_WORDS,
    TABLE_NAMES,
    is_same_value,
    squash,
)
from stepsplit.analyzer.model.preset_names import normalize_model_name


@dataclass(frozen=True, slots=True)
class NormalizedTable:
    """A job's tables with our keys, and with those stated, and what of it was read as what:
    "training: mbs = 1 as micro_batch = 1"."""

    table: TomlTable
    stated: TomlTable
    notes: tuple[str, ...] = ()


def replace_key_aliases(
    table: TomlTable,
    mistakes: Mistakes,
    keys: Mapping[str, Collection[str]],
    is_whole: bool = True,
) -> NormalizedTable:
    """Replaces the keys of other programs in the tables of a job with ours.

    A key stands for nothing but itself if what it stands for is in the table too: that is a
    mistake, as is every value that our key may not have. keys: ours of each table. is_whole: no
    other file or setting belongs to the job, so that keys can be checked beside each other.
    """
    job = _Job(table.where, dict(table.values), mistakes, keys)
    for run in _PASSES:
        run(job)
    stated = TomlTable(table.where, table.name, dict(job.tables))
    _convert_keys(job)
    if is_whole:
        check_relations(stated, job.tables, mistakes)
    return NormalizedTable(TomlTable(table.where, table.name, job.tables), stated, tuple(job.notes))


def check_relations(stated: TomlTable, read: Mapping[str, Any], mistakes: Mistakes) -> None:
    """Adds the keys that mean something else or nothing beside others of the job to the mistakes.

    Args:
        stated: tables of the job with the keys of other programs.
        read: all tables of the job with ours; what a later file says in another way is not judged.
        mistakes: where each such key is added.
    """
    training, layout = stated.get_subtable("training"), stated.get_subtable("parallel")
    sizes, batches = (read.get(name, {}) for name in ("parallel", "training"))
    if not isinstance(sizes, Mapping) or not isinstance(batches, Mapping):
        return
    pp = sizes.get("pp", 1)
    is_pipeline = (isinstance(pp, int) and pp > 1) or "layers_per_stage" in sizes
    for key in filter(training.values.__contains__, LOCAL_BATCHES if is_pipeline else ()):
        if training.values[key] == batches.get("micro_batch"):
            problem = "may be one microbatch or all of them, as there is a pipeline"
            hint = "write micro_batch and microbatches (or global_batch) instead"
            mistakes.append(training.build_error(key, problem, hint))
    if sizes.get("zero") == 3 and not {"dp_shard", "dp_replicate"} & sizes.keys():
        for key in ("strategy", "dp_type", "fsdp", "sharding_strategy"):
            value = layout.values.get(key)
            # Shards with replicas of each, whose numbers are in other keys.
            if squash(value).replace("autowrap", "") in ("hsdp", "hybridshard"):
                problem = f"{value} does not say how many replicas there are"
                hint = "add dp_replicate (replicas), or dp_shard (ranks of each)"
                mistakes.append(layout.build_error(key, problem, hint))


def remove_misplaced_keys(
    table: TomlTable, mistakes: Mistakes, keys: Mapping[str, Collection[str]]
) -> TomlTable:
    """The tables of a job without keys of ours, or of other programs, that stand before all tables
    or in another one, and without those that stand for several; these are mistakes."""
    own = {key: name for name, known in keys.items() for key in known if key not in keys}
    for key in filter(own.__contains__, table.values):
        hint = f"move it under [{own[key]}]"
        mistakes.append(table.build_error(key, "stands outside of the tables", hint))
    values = {key: value for key, value in table.values.items() if key not in own}
    for name, known in keys.items():
        section = table.get_subtable(name)
        for key in [one for one in section.values if one not in known]:
            others = [one for one in keys if one != name and key in (*keys[one], *ALIASES[one])]
            if key not in HINTS and (key in ALIASES[name] or len(others) != 1):
                continue
            hint = HINTS.get(key) or f"move it under [{others[0]}]"
            mistakes.append(section.build_error(key, "unknown key", hint))
            values[name] = {k: v for k, v in values[name].items() if k != key}
            if key == "batch_size":
                # Either may be meant: neither is missing.
                values[name] = {"micro_batch": 1, "microbatches": 1, **values[name]}
    return TomlTable(table.where, table.name, values)


# The passes.


@dataclass
class _Job:
    """What the passes work on.

    where: the file. tables: of the job, as they are after the passes so far. keys: ours of each
    table. notes: what was read as what. added: keys of ours that a pass found, by who wrote the
    settings that say so and by table; they join the others at the end, as values of ours.
    """

    where: str
    tables: dict[str, Any]
    mistakes: Mistakes
    keys: Mapping[str, Collection[str]]
    notes: list[str] = field(default_factory=list)
    added: dict[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def get(self, name: str) -> Mapping[str, Any]:
        """The keys of a table; none if it is none."""
        value = self.tables.get(name)
        return value if isinstance(value, Mapping) else {}

    def note(self, name: str, said: Mapping[str, Any], read: Mapping[str, Any]) -> None:
        self.notes.append(f"{name}: {format_toml_keys(said)} as {format_toml_keys(read)}")

    def refuse(self, name: str, key: str, problem: str) -> None:
        table = TomlTable(self.where, name, {})
        self.mistakes.append(table.build_error(key, problem, "remove one of them"))


def _rename_tables(job: _Job) -> None:
    for theirs, usual in TABLE_NAMES.items():
        if theirs in job.tables and usual not in job.tables:
            job.tables[usual] = job.tables.pop(theirs)
            job.notes.append(f"[{theirs}] as [{usual}]")


def _lower_capitals(job: _Job) -> None:
    """A key in capitals is that in small letters, unless the table has both."""
    for name in ALIASES:
        stated = job.get(name)
        capitals = [key for key in stated if key.isupper()]
        if capitals and not {key.lower() for key in capitals} & stated.keys():
            small = {key: key.lower() if key in capitals else key for key in stated}
            job.tables[name] = {small[key]: value for key, value in stated.items()}
            job.notes.append(f"{name}: {', '.join(capitals)} in small letters")


_DEEPSPEED = "deepspeed"
"""A table of keys of DeepSpeed's JSON."""


def _move_keys(job: _Job) -> None:
    """Moves keys, as they are, that their own table does not know, and one other does, into that;
    one that it has with another value is a mistake. Neither a key of a model, which would override
    sizes, nor one that is read as nothing moves: either may mean something else where it stands."""
    known = {
        name: {*own, *ALIASES[name], *OWN_WORDS.get(name, ())} for name, own in job.keys.items()
    }
    unmoved = {*known["model"], *HINTS, *FIXED}
    for name in (*known, _DEEPSPEED):
        for key, value in job.get(name).items():
            others = [one for one in known if key in known[one]]
            if key in {*known.get(name, ()), *unmoved} or len(others) != 1:
                continue
            # Beside keys of DeepSpeed's JSON stand those that say of its training what ours do.
            is_own = key in OWN_KEYS | OWN_FLAGS or isinstance(value, Mapping)
            if name == _DEEPSPEED and (is_own or key not in ALIASES[others[0]]):
                continue
            (section,) = others
            target = job.tables.get(section, {})
            if not isinstance(target, Mapping):
                continue
            job.tables[name] = {k: v for k, v in job.tables[name].items() if k != key}
            # Two tables may have it that both are not its own.
            ours = {**_read_key(section, key, value), key: value}
            if differing := [one for one in ours if target.get(one, ours[one]) != ours[one]]:
                problem = f"says the same as {section}.{differing[0]}, with another value"
                job.refuse(name, key, problem)
                continue
            job.tables[section] = {**target, key: value}
            job.notes.append(f"{name}: {format_toml_keys({key: value})} as of [{section}]")


def _read_key(name: str, key: str, value: object) -> Mapping[str, object]:
    """What a key of other programs in a table is here; any other key is itself."""
    return ALIASES[name][key](value) if key in ALIASES[name] else {key: value}


def _read_batch_size(job: _Job) -> None:
    """Reads batch_size beside steps of accumulation as that of a microbatch. nanoGPT, which calls
    the length of a sequence block_size, counts the steps of all ranks (train.py divides them)."""
    training = dict(job.get("training"))
    size = training.get("batch_size")
    accumulation = next((key for key in ACCUMULATIONS if key in training), "")
    steps = training.get(accumulation)
    has_micro_batch = {"micro_batch", "mbs", "micro_batch_size"} & training.keys()
    if type(size) is not int or type(steps) is not int or has_micro_batch:
        return
    read: dict[str, object] = {"micro_batch": size}
    said = {"batch_size": training.pop("batch_size")}
    if "block_size" in {**training, **job.get("model")}:
        said[accumulation] = training.pop(accumulation)
        read |= {"global_batch": size * steps, "framework": training.pop("framework", "ddp")}
    job.tables["training"] = {**training, **read}
    job.note("training", said, read)


def _read_fp8_over_bf16(job: _Job) -> None:
    """Leaves out bf16 = true beside a format of 8 bits: the dtype of what is not multiplied, as
    Megatron's --bf16 --fp8-format hybrid."""
    training = job.get("training")
    if not {"bf16", "fp8"} <= training.keys():
        return
    if all(_read_key("training", k, training[k]) == {"dtype": k} for k in ("bf16", "fp8")):
        job.tables["training"] = {key: value for key, value in training.items() if key != "bf16"}
        said = format_toml_keys({"bf16": training["bf16"]})
        job.notes.append(f"training: {said} as nothing, beside fp8")


def _find_trainer(job: _Job) -> None:
    """A job in words of transformers' TrainingArguments, without a layout of ours, is of it."""
    training, layout = job.get("training"), job.get("parallel")
    ours = {one for key, value in layout.items() for one in _read_key("parallel", key, value)}
    is_trainer = "per_device_train_batch_size" in training and ours <= {"gpus", "nodes"}
    # Whoever names what trains it needs no guess.
    if is_trainer and not {"framework"} & training.keys() and _DEEPSPEED not in job.tables:
        job.tables["training"] = {**training, "framework": "huggingface"}
        job.notes.append('training: per_device_train_batch_size as of framework = "huggingface"')


_MEGATRON_NAMES = {"layers": "num_layers", "pp": "pipeline_model_parallel_size"}
"""What Megatron-LM calls those of our keys that its own settings depend on."""

_SHARED = frozenset({"sequence_parallel", "optimizer", "world_size"})
"""Keys that Megatron-LM's arguments and a job.toml have in common."""


@lru_cache(maxsize=1)
def _list_megatron_names() -> frozenset[str]:
    """The names that Megatron-LM's arguments are asked for, whatever they are."""
    settings = MegatronSettings({})
    put_all(settings, JobTablesBuilder())
    return frozenset(settings.read - _SHARED)


def _read_megatron(job: _Job) -> None:
    """Takes the settings of Megatron-LM that depend on others, such as those of recomputation and
    of virtual stages, out of the tables, and adds what its arguments of these values are here."""
    names = ("model", "parallel", "training")
    every: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for name in names:
        values = job.get(name)
        every |= values
        every |= {theirs: values[key] for key, theirs in _MEGATRON_NAMES.items() if key in values}
        # Nor does a size of a model in another table override its own.
        known = {*ALIASES[name], *ALIASES["model"]}
        unknown |= {key: value for key, value in values.items() if key not in known}
    if not unknown.keys() & _list_megatron_names():
        return
    settings, with_all = MegatronSettings(every), JobTablesBuilder()
    put_all(settings, with_all)
    # Which layers have experts is a pattern that depends on keys of the experts.
    consumed = (unknown.keys() & settings.read) - _SHARED - {"moe_layer_freq"}
    for name in names:
        if values := job.get(name):
            job.tables[name] = {key: value for key, value in values.items() if key not in consumed}
    without = JobTablesBuilder()
    put_all(MegatronSettings({k: v for k, v in every.items() if k not in consumed}), without)
    added = {
        name: {k: v for k, v in keys.items() if without.sections[name].get(k) != v}
        for name, keys in with_all.list_stated()
    }
    said = format_toml_keys({k: v for k, v in unknown.items() if k in consumed})
    read = "; ".join(f"{k}: {format_toml_keys(v)}" for k, v in added.items() if v)
    job.notes.append(f"{said} as Megatron-LM's: {read or 'nothing'}")
    job.added["Megatron-LM"] = added


def _read_deepspeed(job: _Job) -> None:
    """Takes a table of DeepSpeed's keys out of the job, and adds what they are here."""
    if _DEEPSPEED not in job.tables:
        return
    values, builder = job.tables.pop(_DEEPSPEED), JobTablesBuilder()
    if not isinstance(values, Mapping) or (values and not OWN_KEYS & values.keys()):
        hint = (
            "paste the keys of the JSON, such as train_micro_batch_size_per_gpu, or name the JSON"
            " behind the job.toml: stepsplit model job.toml ds_config.json"
        )
        table = TomlTable(job.where, "", {})
        job.mistakes.append(table.build_error(_DEEPSPEED, "has no key of DeepSpeed's JSON", hint))
        return
    put_settings(values, builder)
    stated = dict(builder.list_stated())
    read = "; ".join(f"{name}: {format_toml_keys(keys)}" for name, keys in stated.items())
    job.notes.append(f"[{_DEEPSPEED}] as {read}")
    job.notes += [f"[{_DEEPSPEED}]: not read: {one}" for one in builder.omitted]
    job.added["DeepSpeed"] = stated


def _name_preset(job: _Job) -> None:
    """A model by its name alone, or by its type and size (type = "llama", size = "7b"), is the
    preset of that name; beside sizes of its own they are its name."""
    model = job.get("model")
    parts = [k for k in ("name", "type", "model_type", "size") if isinstance(model.get(k), str)]
    numbers = {key: value for key, value in model.items() if key not in parts}
    if parts not in (["name"], ["name", "size"], ["type", "size"], ["model_type", "size"]):
        return
    name = "-".join(model[key] for key in parts)
    if numbers and parts == ["name"]:
        return
    read = {"name": name} if numbers else {"preset": normalize_model_name(name) or name}
    job.tables["model"] = {**read, **numbers}
    job.note("model", {key: model[key] for key in model if key in parts}, read)


_PASSES: tuple[Callable[[_Job], None], ...] = (
    _rename_tables,
    _lower_capitals,
    # Before those that read keys beside others, which so do wherever they were typed.
    _move_keys,
    _read_batch_size,
    _read_fp8_over_bf16,
    _find_trainer,
    _read_megatron,
    _read_deepspeed,
    _name_preset,
)
"""What depends on several keys, in order; then each key that is left is converted by itself."""


def _convert_keys(job: _Job) -> None:
    """Converts each key by the table of aliases, and joins those that passes added."""
    for name, known in ALIASES.items():
        aliases = {**known, **OWN_WORDS[name]}
        values = job.get(name)
        converted: dict[str, object] = {}
        for key, value in values.items():
            ours = aliases[key](value) if key in aliases else {key: value}
            for other, read in ours.items():
                if other == key or not (other in values or other in converted):
                    converted[other] = read
                elif not is_same_value(other, converted.get(other, values.get(other)), read):
                    job.refuse(name, key, f"says the same as {other}, with another value")
            # 0.0 equals False, but is not what our key takes.
            if repr(ours) != repr({key: value}):
                job.note(name, {key: value}, ours)
        for writer, added in job.added.items():
            for key, value in added.get(name, {}).items():
                if not is_same_value(key, converted.setdefault(key, value), value):
                    problem = f"is said by settings of {writer}, too, with another value"
                    job.refuse(name, key, problem)
        if values or converted:
            job.tables[name] = converted

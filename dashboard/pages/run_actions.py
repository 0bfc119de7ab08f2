"""What a user may do with a run on its pages: edit its name, note and tags, analyze it again,
delete it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.gap.config_from_trace import KEY_DEFAULTS, KEY_MEANINGS, list_missing_keys
from stepsplit.analyzer.model.config import DTYPES, OPTIMIZERS
from stepsplit.analyzer.model.config_decode import TomlTable, parse_table
from stepsplit.analyzer.model.hardware_config import list_link_names
from stepsplit.analyzer.model.preset_names import list_hardware_names, list_model_names
from stepsplit.analyzer.model.profile import list_frameworks
from stepsplit.analyzer.model.schedule_names import SCHEDULES
from stepsplit.analyzer.model.training_table import RECOMPUTES
from stepsplit.dashboard.pages.address import format_query
from stepsplit.dashboard.pages.components import build_choice_link
from stepsplit.dashboard.store.job_files import JOB_FILE
from stepsplit.dashboard.store.run_row import RunRow


@dataclass(frozen=True, slots=True)
class RunRights:
    """Whether the user may change the run and analyze it again, and whether he may delete it."""

    edit: bool = True
    delete: bool = True


def build_pick_bar(*more: Component) -> html.Div:
    """How many runs of the list are selected in this tab, with a link that compares them; hidden
    while none is. assets/choose.js fills it and handles clicks."""
    return html.Div(
        [
            html.Span("", id="compare-hint", className="note", role="status"),
            build_pick_button("clear selection", "clear-picks"),
            html.A("compare selected", href="/compare", id="compare-link", className="button off"),
            *more,
        ],
        id="picks", className="picks card", hidden=True,
    )  # fmt: skip


def build_pick_button(text: str, button_id: str) -> html.Button:
    """A button of that bar."""
    return html.Button(text, id=button_id, type="button", className="button")


def build_run_actions(run: RunRow, rights: RunRights) -> list[Component]:
    """The buttons that the user may use; assets/run_actions.js handles clicks."""
    buttons: list[Component] = []
    if rights.edit:
        buttons.append(_build_button("edit", "data-edit", run))
    if rights.edit and run.can_be_analyzed_again:
        # Dumps are not compared with a model, nor are several programs with that of one.
        if not (run.is_hang or run.has_roles):
            buttons.append(build_job_button(run.id, run.name))
        buttons.append(_build_button("analyze again", "data-retry", run))
    if rights.delete:
        buttons.append(_build_button("delete", "data-delete", run))
    return buttons


def build_job_button(run_id: str, name: str) -> html.Button:
    """The button that opens the form of the run's job.toml; assets/job_form.js handles clicks."""
    return _build_named_button("describe the job", "data-job", run_id, name)


def _build_button(text: str, attribute: str, run: RunRow) -> html.Button:
    return _build_named_button(text, attribute, run.id, run.name)


def _build_named_button(text: str, attribute: str, run_id: str, name: str) -> html.Button:
    attributes: Any = {attribute: run_id, "data-name": name}
    return html.Button(text, type="button", className="delete", **attributes)


def build_run_labels(run: RunRow, rights: RunRights) -> list[Component]:
    """The run's tags and note, if any, and the form that changes them, until it is opened."""
    shown: list[Component] = []
    if run.tags:
        shown.append(html.Div(build_tags(run), className="run-tags"))
    if run.note:
        shown.append(html.P(run.note, className="run-note"))
    if not rights.edit:
        return shown
    lines = "\n".join(f"{tag.key}={tag.value}" for tag in run.tags)
    buttons = [
        html.Button("Save", id="edit-save", type="button"),
        html.Button("Cancel", id="edit-cancel", type="button"),
    ]
    named: Any = {"aria-labelledby": "edit-title"}
    parts = [
        html.H2("Edit this run", id="edit-title"),
        html.Label(["name", dcc.Input(id="edit-name", value=run.name, maxLength=200)]),
        html.Label(["tags, one KEY=VALUE per line", dcc.Textarea(id="edit-tags", value=lines)]),
        html.Label(["note", dcc.Textarea(id="edit-note", value=run.note, maxLength=1000)]),
        html.Div(buttons, className="drop-buttons"),
        html.Div(id="edit-status", className="drop-status failed", role="status"),
    ]
    shown.append(html.Dialog(parts, id="edit-run", className="card form", **named))
    return shown


def build_tags(run: RunRow) -> list[html.A]:
    """The tags of the run; each leads to the runs that have it, in the list of those that it shows
    already."""
    texts = [f"{tag.key}={tag.value}" for tag in run.tags]
    return [
        build_choice_link(text, "/" + format_query({"tag": text}), "tag", css="tag", add=text)
        for text in texts
    ]


# The form of a job.toml: its keys in groups, with the values of a text.

_SWITCH = ("true", "false")

_RECOMPUTE_EVERY = "every-2"


@dataclass(frozen=True, slots=True)
class JobField:
    """A key that the form changes: its table, its choices (none: any value), and a hint."""

    table: str
    key: str
    hint: str
    choices: tuple[str, ...] = ()


@cache
def list_job_fields() -> Mapping[str, tuple[JobField, ...]]:
    """The fields of the form, by the title of their group."""
    return {
        "Mesh": _build_fields(
            "parallel",
            tp="", pp="", dp="data-parallel ranks, or give the next two",
            dp_replicate="replicas (DDP, HSDP)", dp_shard="shards (FSDP)",
            cp="context-parallel ranks", ep="expert-parallel ranks",
            zero="ZeRO stage, 3 for FSDP", schedule=SCHEDULES,
            chunks="stages of a pipeline rank",
            sequence_parallel=_SWITCH,
        ),
        "Hardware": _build_fields(
            "hardware",
            preset=list_hardware_names(), gpus_per_node="default of the preset",
            nodes_link=list_link_names(),
        ),
        "Model": _build_fields(
            "model",
            preset=list_model_names(), layers="", hidden="", heads="", kv_heads="", head_size="",
            ffn="", vocab="", gated=_SWITCH, tied=_SWITCH, learned_positions="", experts="",
            top_k="",
        ),
        "Training": _build_fields(
            "training",
            seq_len="", micro_batch="", global_batch="",
            microbatches="microbatches of a rank, instead of global_batch",
            dtype=DTYPES, optimizer=OPTIMIZERS, recompute=(*RECOMPUTES, _RECOMPUTE_EVERY),
            framework=list_frameworks(),
        ),
    }  # fmt: skip


_HINTS = {
    ("model", "preset"): "replaces the sizes below",
    ("hardware", "preset"): "accelerator and links",
    ("hardware", "nodes_link"): "link between nodes",
    ("model", "head_size"): "default hidden / heads",
    ("parallel", "schedule"): "of the pipeline",
    ("training", "recompute"): "of activations",
}


def _build_fields(table: str, **keys: str | tuple[str, ...]) -> tuple[JobField, ...]:
    """The fields of keys with a hint or choices; without a hint, the one of a draft."""
    return tuple(
        JobField(table, key, given or _build_hint(table, key))
        if isinstance(given, str)
        else JobField(table, key, _build_hint(table, key), given)
        for key, given in keys.items()
    )


def _build_hint(table: str, key: str) -> str:
    default = KEY_DEFAULTS.get(table, {}).get(key)
    meaning = _HINTS.get((table, key), KEY_MEANINGS.get(key, ""))
    return ", ".join(filter(None, (meaning, f"default {default}" if default else "")))


def build_job_form_json(text: bytes) -> dict[str, Any]:
    """What assets/job_form.js shows of a job.toml: the text, and its groups of fields. Raises
    DataError if it is not TOML."""
    table = parse_table(JOB_FILE, text)
    groups = [
        {"title": title, "fields": [_build_field_json(field, table) for field in fields]}
        for title, fields in list_job_fields().items()
    ]
    return {"toml": text.decode(), "groups": groups}


def _build_field_json(field: JobField, table: TomlTable) -> dict[str, Any]:
    """The field with its value as text; a value that needs TOML, such as a list, as "other"."""
    own = table.get_subtable(field.table).values
    value = own.get(field.key)
    if isinstance(value, bool):
        shown: str | None = "true" if value else "false"
    else:
        is_plain = isinstance(value, str | int | float)
        shown = str(value) if is_plain else "" if value is None else None
    has_experts = "ep" in table.get_subtable("parallel").values
    missing = list_missing_keys(field.table, own, has_experts)
    of_preset = field.table == "model" and field.key != "preset" and "preset" in own
    choices = field.choices
    if choices and shown and shown not in choices:
        choices = (*choices, shown)
    return {
        "table": field.table,
        "key": field.key,
        "hint": "default of the preset" if of_preset else field.hint,
        "choices": choices,
        "value": shown or "",
        "other": shown is None,
        "needed": field.key in missing,
    }

"""What a user may do with a run on its pages: edit its name, note and tags, analyze it again,
delete it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.model.config_file import list_hardware_names
from stepsplit.dashboard.store.runs import RunRow


@dataclass(frozen=True, slots=True)
class RunRights:
    """Whether the user may change the run and analyze it again, and whether he may delete it."""

    edit: bool = True
    delete: bool = True


def build_run_actions(run: RunRow, rights: RunRights) -> list[Component]:
    """The buttons that the user may use; assets/run_actions.js handles clicks."""
    buttons: list[Component] = []
    if rights.edit:
        buttons.append(_build_button("edit", "data-edit", run))
    if rights.edit and run.can_be_analyzed_again:
        buttons.append(_build_button("describe the job", "data-job", run))
        buttons.append(_build_button("analyze again", "data-retry", run))
    if rights.delete:
        buttons.append(_build_button("delete", "data-delete", run))
    return buttons


def _build_button(text: str, attribute: str, run: RunRow) -> html.Button:
    attributes: Any = {attribute: run.id, "data-name": run.name}
    return html.Button(text, type="button", className="delete", **attributes)


def build_run_labels(run: RunRow, rights: RunRights) -> list[Component]:
    """The run's tags and note, if any, and the form that changes them, until it is opened."""
    shown: list[Component] = []
    if run.tags:
        shown.append(html.Div(build_tags(run), className="run-tags"))
    if run.note:
        shown.append(html.P(run.note, className="run-note"))
    if rights.edit:
        shown.append(_build_form(run))
    if rights.edit and run.can_be_analyzed_again:
        shown.append(_build_job_form())
    return shown


def build_tags(run: RunRow) -> list[html.Span]:
    """The tags of the run."""
    return [html.Span(f"{tag.key}={tag.value}", className="tag") for tag in run.tags]


_AXIS = "(tp|pp|cp|ep|dp|dp_shard|dp_replicate)=[0-9]+"

_MESH = rf"\s*{_AXIS}(\s*,\s*{_AXIS})*\s*"


def _build_job_form() -> html.Dialog:
    """The form that describes the job by a job.toml, or by its hardware and mesh."""
    presets = [html.Option("as recorded", value="")]
    presets += [html.Option(name, value=name) for name in list_hardware_names()]
    mesh = dcc.Input(id="job-mesh", placeholder="as recorded, or pp=2,dp=2,tp=2", pattern=_MESH)
    fields = [
        html.Label(["hardware", html.Select(presets, id="job-hardware")]),
        html.Label(["mesh", mesh]),
    ]
    buttons = [
        html.Button("Analyze", id="job-send", type="button"),
        html.Button("Use a job.toml", id="job-file", type="button"),
        html.Button("Cancel", id="job-cancel", type="button"),
    ]
    note = html.P("The run is analyzed again and compared with the model.", className="note")
    return _build_dialog("job-form", "job", "Describe the job", [note, *fields], buttons)


def _build_form(run: RunRow) -> html.Dialog:
    lines = "\n".join(f"{tag.key}={tag.value}" for tag in run.tags)
    fields = [
        html.Label(["name", dcc.Input(id="edit-name", value=run.name, maxLength=200)]),
        html.Label(["tags, one KEY=VALUE per line", dcc.Textarea(id="edit-tags", value=lines)]),
        html.Label(["note", dcc.Textarea(id="edit-note", value=run.note, maxLength=1000)]),
    ]
    buttons = [
        html.Button("Save", id="edit-save", type="button"),
        html.Button("Cancel", id="edit-cancel", type="button"),
    ]
    return _build_dialog("edit-run", "edit", "Edit this run", fields, buttons)


def _build_dialog(
    name: str,
    prefix: str,
    title: str,
    fields: Sequence[Component],
    buttons: Sequence[html.Button],
) -> html.Dialog:
    """A form that its script opens; the prefix begins the ids of its title and its status."""
    named: Any = {"aria-labelledby": f"{prefix}-title"}
    parts = [
        html.H2(title, id=f"{prefix}-title"),
        *fields,
        html.Div(buttons, className="drop-buttons"),
        html.Div(id=f"{prefix}-status", className="drop-status failed", role="status"),
    ]
    return html.Dialog(parts, id=name, className="card form", **named)

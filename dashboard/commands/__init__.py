"""The commands: one entry each, from which `stepsplit --help` is written without their modules.

A module is imported when one of its commands runs, and imports within its functions what is slow to
import: numpy, torch, dash.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import click


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a command is: the function NAME_command of a module of this folder; and its line in the
    list of commands, which is the first of its docstring."""

    module: str
    summary: str


COMMANDS = {
    "analyze": CommandEntry(
        "analyze", "Split each step into compute, communication, bubble and idle."
    ),
    "attach": CommandEntry("record", "Record some steps of a running job."),
    "audit": CommandEntry("access", "Print the audit log: logins, uploads, deletions, tokens."),
    "baseline": CommandEntry("check", "Write a baseline file for check from recorded runs."),
    "calibrate": CommandEntry(
        "model", "Fit the model's hardware constants to your own recordings."
    ),
    "check": CommandEntry("check", "Check runs against budgets: pass, regressed or inconclusive."),
    "compare": CommandEntry("check", "Compare two runs, or how a job scales over several."),
    "dashboard": CommandEntry(
        "server", "Serve the dashboard: runs, uploads and the report of each run."
    ),
    "delete": CommandEntry("runs", "Delete runs of a store, by id or by age, with their files."),
    "demo": CommandEntry("record", "Train and record a small GPT here, then show its report."),
    "doctor": CommandEntry(
        "doctor", "Check what is installed, what can be recorded here, and what would fail."
    ),
    "edit": CommandEntry("runs", "Change the name, note and tags of a run."),
    "export": CommandEntry("analyze", "Export all ranks of a recording as one Perfetto trace."),
    "gather": CommandEntry("record", "Merge the recordings of several hosts into one folder."),
    "hang": CommandEntry("analyze", "Say which rank a hanging job waits for, and what it does."),
    "mcp": CommandEntry(
        "agents", "Serve read-only tools to an agent by the Model Context Protocol."
    ),
    "model": CommandEntry("model", "Predict time, split, memory and communication of a step."),
    "plan": CommandEntry("model", "Find the fastest layout that fits, and why others are slower."),
    "record": CommandEntry("record", "Record some steps of an unmodified training command."),
    "redact": CommandEntry("analyze", "Copy a recording without hosts, users, paths and names."),
    "reduce": CommandEntry(
        "analyze", "Write the small tables of each rank that analyze takes for its trace."
    ),
    "retry": CommandEntry("runs", "Queue runs for another analysis of their files."),
    "runs": CommandEntry("runs", "List the runs of a store, newest first."),
    "schema": CommandEntry("agents", "Print the JSON Schema of a report or another result."),
    "skill": CommandEntry("agents", "Say where SKILL.md for agents is, or print it."),
    "token": CommandEntry("access", "Create, list and revoke access tokens of a dashboard."),
    "upload": CommandEntry("upload", "Upload a recording to a dashboard and print its URL."),
    "validate": CommandEntry("model", "Compare the analytical model with published measurements."),
    "watch": CommandEntry(
        "watch", "Sample a training command or a running job for as long as it runs."
    ),
    "what-if": CommandEntry(
        "model", "Estimate the step time of a recording with something changed."
    ),
    "worker": CommandEntry("server", "Analyze uploads one after the other until Ctrl-C."),
}
"""Entries by the name of the command, in the order of the list."""


def load_command(name: str) -> click.Command:
    """The command of this name, whose module is imported."""
    module = import_module(f"stepsplit.dashboard.commands.{COMMANDS[name].module}")
    command: click.Command = getattr(module, f"{name.replace('-', '_')}_command")
    return command

"""The terminal's answer to a plan: the best layouts, why the others lose, and the way there."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.plan_space import Candidate, Place, Plan, Searched, Trial, toml_lines
from stepsplit.dashboard.reporters.bare_table import bare_table
from stepsplit.dashboard.reporters.plan_words import (
    axes_words,
    lost_words,
    settings_words,
)

_DIM = "bright_black"
MOST_REFUSED = 3


def screen(job: Job, plan: Plan) -> RenderableType:
    """The whole screen of one plan, to be printed by a rich console of any width."""
    parts: list[RenderableType] = [_heading(job, plan), _searched(plan.searched), Text()]
    parts += [_ranking(job, plan), Text(), _details(plan), Text(), *_tree(job, plan)]
    lines = toml_lines(plan.best.choice, job.model.experts is not None)
    parts += [Text(), Text("to RUN.toml", style="bold"), *map(Text, lines)]
    return Group(*parts)


def _heading(job: Job, plan: Plan) -> Text:
    recipe, name = job.recipe, job.model.name or f"of {job.model.layers} layers"
    text = Text(f"model {name}   {plan.gpus:,} x {job.hardware.name}", style="bold")
    text.append(
        f"\n{recipe.global_batch:,} sequences of {recipe.seq_len:,} tokens a step   "
        f"{recipe.dtype} {recipe.optimizer}, {recipe.framework}",
        style="not bold",
    )
    return text


def _searched(searched: Searched) -> Text:
    refused = searched.considered - searched.too_big - searched.fit
    text = f"{searched.considered:,} layouts considered: {searched.fit:,} fit, "
    text += f"{searched.too_big:,} do not, {refused:,} cannot be"
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in searched.refused[:MOST_REFUSED])
    text += f" ({kinds})" if kinds else ""
    return Text(f"{text}; {searched.timed:,} timed, the others cannot be faster", style=_DIM)


def _ranking(job: Job, plan: Plan) -> Table:
    """One line a split of the GPUs."""
    table = bare_table("", "layout", "step", "behind", "MFU", "peak memory", "confidence")
    table.columns[1].justify = "left"
    for rank, one in enumerate((plan.best, *(each.candidate for each in plan.runners_up)), 1):
        behind = one.step_ns / plan.best.step_ns - 1
        table.add_row(
            str(rank),
            Text(axes_words(one.choice), style="bold" if rank == 1 else ""),
            units.milliseconds(one.step_ns),
            units.signed_percent(behind) if rank > 1 else "",
            "" if one.mfu is None else units.percent(one.mfu),
            f"{units.gibibytes(one.peak_bytes)}",
            one.confidence,
        )
    return table


def _details(plan: Plan) -> Table:
    """The settings of each, and why it lost."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("1", _settings(plan.best))
    for rank, one in enumerate(plan.runners_up, 2):
        text = Text(lost_words(plan.best, one), style="yellow")
        table.add_row(str(rank), Group(_settings(one.candidate), text))
    return table


def _settings(one: Candidate) -> Text:
    return Text(settings_words(one))


def _tree(job: Job, plan: Plan) -> list[RenderableType]:
    """The questions that people ask by hand, and on which links the best layout lies."""
    table = bare_table("as people decide", "a GPU needs", "")
    for trial in _told(plan.tree):
        needs = units.gibibytes(trial.peak_bytes)
        answer = Text("fits", style="green") if trial.fits else Text("does not fit", style=_DIM)
        table.add_row(_question(trial), needs, answer)
    links = ", ".join(_place(place) for place in plan.places) or "no other GPU to talk to"
    there = f"a GPU has {units.gibibytes(job.hardware.memory_bytes)}"
    rest = Text(f"leanest layouts, all recomputed; {there}", style=_DIM)
    return [table, rest, _by_hand(plan), Text(f"its links: {links}")]


def _by_hand(plan: Plan) -> Text:
    """Where the questions end, beside where the search does."""
    last, best = plan.tree[-1], axes_words(plan.best.choice)
    sizes = [f"{axis} {size}" for axis, size in (("tp", last.tp), ("pp", last.pp)) if size > 1]
    alone = "data parallelism alone" if plan.gpus > 1 else "one GPU"
    by_hand = f"{' '.join(sizes)} and data parallelism" if sizes else alone
    return Text(f"by hand: {by_hand}; fastest of all: {best}")


def _told(tree: tuple[Trial, ...]) -> list[Trial]:
    """Of each question the answer, and of a pipeline the last that does not fit too."""
    last = {trial.question: trial for trial in tree}
    before = [trial for trial in tree[-2:-1] if trial.pp > 1]
    return [*list(last.values())[:-1], *before, *list(last.values())[-1:]]


def _question(trial: Trial) -> str:
    words = [f"tp {trial.tp}"] * (trial.tp > 1) + [f"pp {trial.pp}"] * (trial.pp > 1)
    words += [f"ZeRO-{trial.zero}"] * (trial.zero > 0)
    return f"{trial.question}{': ' if words else ''}{' '.join(words)}"


def _place(place: Place) -> str:
    where = "in a node" if place.nodes == 1 else f"over {place.nodes:,} nodes"
    return f"{place.axis} {place.ranks:,} {where} ({place.link})"

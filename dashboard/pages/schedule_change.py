"""The page Pipeline's verdict, and what another schedule would make of the measured passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.diagnose.hang.sentences import format_ranks
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule_graph import Costs
from stepsplit.analyzer.model.schedule_names import SCHEDULES, Schedule
from stepsplit.analyzer.model.schedule_time import PipelineTime, compute_pipeline_time
from stepsplit.analyzer.report.headline import compute_mean_step_ns
from stepsplit.analyzer.report.report import SCHEDULE_NAMES, Pipeline, Report, describe_ideal_bubble
from stepsplit.analyzer.report.step_rows import list_full_steps
from stepsplit.analyzer.report.tables import PHASES, Boxes
from stepsplit.analyzer.units import (
    format_microbatches,
    format_milliseconds,
    format_percent,
    format_signed_milliseconds,
    format_signed_percent,
)
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import (
    View,
    build_card,
    build_menu,
    build_section,
    format_mean_step,
)

# The measured pipeline as a schedule with a cost for each stage.


@dataclass(frozen=True, slots=True)
class MeasuredPipeline:
    """What a simulation of the recorded schedule needs: the median passes of each stage.

    Attributes:
        schedule: the schedule as detected.
        ranks: ranks of a pipeline.
        microbatches: microbatches of a step.
        chunks: stages of a rank.
        costs: median forward, input gradient and weight gradient of each stage.
        transfer_ns: median transfer of a message between stages; 0 if unknown.
    """

    schedule: Schedule
    ranks: int
    microbatches: int
    chunks: int
    costs: Costs
    transfer_ns: float

    @property
    def equal_costs(self) -> Costs:
        """The mean of the stages, for each of them."""
        mean = tuple(sum(part) / len(self.costs) for part in zip(*self.costs, strict=True))
        return (mean,) * len(self.costs)

    def simulate(
        self,
        costs: Costs,
        transfer_ns: float,
        schedule: Schedule | None = None,
        microbatches: int | None = None,
    ) -> PipelineTime:
        """Window and bubble. More microbatches share the same work. Raises UsageError."""
        number = microbatches or self.microbatches
        share = self.microbatches / number
        scaled = tuple((f * share, b * share, w * share) for f, b, w in costs)
        return compute_pipeline_time(
            schedule or self.schedule, self.ranks, number, self.chunks, scaled, transfer_ns * share
        )

    def list_schedules(self, microbatches: int) -> list[Schedule]:
        """The recorded schedule, and the others that have as many stages on a rank and take this
        number of microbatches."""
        found = []
        for one in SCHEDULES:
            # With one stage on a rank, interleaved is 1F1B.
            if one != self.schedule and one == "interleaved" and self.chunks == 1:
                continue
            with suppress(UsageError):
                self.simulate(self.costs, 0.0, one, min(microbatches, _MOST_MICROBATCHES))
                found.append(one)
        return found if self.schedule in found else [self.schedule, *found]


def measure_pipeline(report: Report, boxes: Boxes) -> MeasuredPipeline | None:
    """The median passes over full steps and all ranks of a stage; None without a known schedule or
    without passes of all stages."""
    pipeline = report.pipeline
    own = np.isin(boxes.step, list_full_steps(report.steps))
    schedule = next((one for one in SCHEDULES if pipeline and one == pipeline.schedule), None)
    if pipeline is None or schedule is None or not own.any():
        return None
    stages = np.unique(boxes.stage[own]).tolist()
    lowest = {int(boxes.rank[own & (boxes.stage == stage)].min()) for stage in stages}
    if stages != list(range(len(stages))) or len(stages) % len(lowest):
        return None
    has_weights = bool((boxes.phase[own] == PHASES.index("weight")).any())
    costs = []
    for stage in stages:
        of_stage = own & (boxes.stage == stage)
        passes = [boxes.dur_ns[of_stage & (boxes.phase == phase)] for phase in range(len(PHASES))]
        forward, backward, weight = (float(np.median(one)) if len(one) else 0.0 for one in passes)
        # A backward that is not split counts half as input gradient, half as weight gradient.
        costs.append(
            (forward, backward, weight) if has_weights else (forward, backward / 2, backward / 2)
        )
    axes = {group.id: group.axis for group in report.groups}
    messages = [
        row.transfer_ns_median
        for row in report.collectives
        if row.op == "send" and axes.get(row.group) == "pp"
    ]
    return MeasuredPipeline(
        schedule, len(lowest), pipeline.microbatches, len(stages) // len(lowest), tuple(costs),
        float(median(messages)) if messages else 0.0,
    )  # fmt: skip


# The verdict: what the measured bubble consists of.

_LEAST_POINTS = 0.001
"""Smaller parts are not named."""


@dataclass(frozen=True, slots=True)
class BubblePart:
    """A part of the measured bubble, as a share of the pipeline window."""

    words: str
    share: float


def explain_bubble(pipeline: Pipeline, measured: MeasuredPipeline) -> tuple[BubblePart, ...]:
    """The measured bubble in parts that add up to it: that of the schedule with equal stages, then
    what a simulation of the measured passes adds, then what that does not explain. Raises
    UsageError."""
    equal = measured.simulate(measured.equal_costs, 0.0).bubble_fraction
    uneven = measured.simulate(measured.costs, 0.0).bubble_fraction
    sent = measured.simulate(measured.costs, measured.transfer_ns).bubble_fraction
    return (
        BubblePart("the schedule itself, with equal stages", equal),
        BubblePart("stages of unequal length", uneven - equal),
        BubblePart("messages between stages", sent - uneven),
        BubblePart(
            "the rest: passes that vary, the host, and waits within a stage",
            pipeline.bubble_fraction - sent,
        ),
    )


def build_verdict(pipeline: Pipeline, measured: MeasuredPipeline | None) -> html.Section:
    """The measured bubble, the schedule's ideal, and what the rest is, largest first."""
    name = SCHEDULE_NAMES.get(pipeline.schedule or "", pipeline.schedule or "")
    words = f"{format_percent(pipeline.bubble_fraction)} of the pipeline window is bubble"
    items: list[Component] = []
    try:
        found = () if measured is None else explain_bubble(pipeline, measured)
    except UsageError:
        found = ()
    if found:
        schedule, *others = found
        of_schedule = f"{name} with {format_microbatches(pipeline.microbatches)} and equal stages"
        # Stages of unequal length may leave less bubble than equal ones, which are no ideal then.
        if schedule.share > pipeline.bubble_fraction:
            words += f", less than the {format_percent(schedule.share)} of {of_schedule}"
        else:
            words += f". {of_schedule} has {format_percent(schedule.share)}"
        items = [
            html.Li([html.B(f"{100 * one.share:+.1f} points"), f" {one.words}"])
            for one in sorted(others, key=lambda one: -one.share)
            if abs(one.share) >= _LEAST_POINTS
        ]
        words += ", and in this run" if items else ", and nothing else adds to it"
    elif (ideal := pipeline.ideal_bubble_fraction) is not None:
        words += f"; {describe_ideal_bubble(pipeline.bubble_fraction, ideal)}"
    else:
        words += "; the schedule is unknown, so that nothing is said of its ideal"
    note = "by a simulation of the schedule with the median passes of each stage" if items else ""
    causes = [html.Ul(items, className="findings")] if items else []
    return build_section(
        "Verdict", note, html.P(html.B(f"{words}{':' if items else '.'}")), *causes
    )


# What another schedule would do.

_TIMES = {"half": 0.5, "same": 1.0, "double": 2.0, "four": 4.0}

_STAGES = {"": "as measured", "equal": "equal"}

_MESSAGES = {"": (1.0, "as measured"), "half": (0.5, "twice as fast"), "free": (0.0, "free")}


def build_change_section(
    view: View, measured: MeasuredPipeline, chosen: AddressQuery
) -> list[html.Section]:
    """Menus of microbatches, schedule, stages, messages and stragglers, and the step that they
    would make."""
    if not view.run_id or view.report.pipeline is None:
        return []
    number = chosen.parse_int("microbatches") or measured.microbatches
    schedule = next(
        (one for one in SCHEDULES if one == chosen.find_text("schedule")), measured.schedule
    )
    stages, messages = chosen.find_text("stages") or "", chosen.find_text("messages") or ""
    times, _ = _MESSAGES.get(messages, _MESSAGES[""])
    numbers = sorted({max(1, round(measured.microbatches * one)) for one in _TIMES.values()})
    menus = [
        build_menu(
            "microbatches", {str(one): str(one) for one in sorted({*numbers, number})},
            str(number), str(measured.microbatches),
        ),
        build_menu(
            "schedule",
            {one: SCHEDULE_NAMES.get(one, one) for one in measured.list_schedules(number)},
            schedule, measured.schedule,
        ),
        build_menu("stages", _STAGES, stages if stages in _STAGES else "", ""),
        build_menu("messages", {key: words for key, (_, words) in _MESSAGES.items()},
                   messages if messages in _MESSAGES else "", ""),
    ]  # fmt: skip
    # Findings that name ranks; their savings are those of the replay, as on the overview.
    stragglers = {
        ",".join(map(str, one.ranks)): one for one in reversed(view.report.findings)
        if 0 < len(one.ranks) <= _MOST_STRAGGLERS and one.gain_ns > 0
    }  # fmt: skip
    without = stragglers.get(chosen.find_text("without") or "")
    if stragglers:
        names = {key: f"without {format_ranks(one.ranks)}" for key, one in stragglers.items()}
        options = {"": "as measured", **dict(reversed(names.items()))}
        wanted = chosen.find_text("without") if without else ""
        menus.append(build_menu("without", options, wanted or "", "", "straggler"))
    costs = measured.equal_costs if stages == "equal" else measured.costs
    note = "the measured passes in another schedule, by simulation; as many samples in a step"
    parts: Sequence[Component]
    try:
        if number > _MOST_MICROBATCHES:
            raise UsageError(f"at most {_MOST_MICROBATCHES:,} microbatches are simulated")
        now = measured.simulate(measured.costs, measured.transfer_ns)
        new = measured.simulate(costs, times * measured.transfer_ns, schedule, number)
    except UsageError as error:
        parts = [html.P(f"This schedule is not possible: {error}", className="message")]
    else:
        step_ns, gain_ns = (
            compute_mean_step_ns(view.report.steps),
            new.makespan_ns - now.makespan_ns,
        )
        change, value = f"of the mean step of {format_mean_step(step_ns)}", "none"
        if gain_ns:
            change = f"{format_signed_percent(gain_ns / step_ns)} {change}"
            value = format_signed_milliseconds(gain_ns)
        # The window is simulated on both sides, so that what the simulation leaves out (the host,
        # waits within a stage) is in neither.
        window = f"was {format_milliseconds(now.makespan_ns)}, both simulated"
        bubble = f"was {format_percent(now.bubble_fraction)}, both simulated"
        cards = [
            build_card("change of the step", value, change),
            build_card("simulated window", format_milliseconds(new.makespan_ns), window),
            build_card("simulated bubble", format_percent(new.bubble_fraction), bubble),
        ]
        parts = [html.Div(cards, className="cards")]
    if number > measured.microbatches:
        words = "if kernels are as efficient on smaller microbatches, which they may not be"
        parts = [*parts, html.P(words, className="note")]
    if without is not None:
        share = without.gain_ns / compute_mean_step_ns(view.report.steps)
        named = f"without {format_ranks(without.ranks)}"
        parts = [
            *parts,
            html.Div(
                build_card(
                    named, format_signed_milliseconds(-without.gain_ns),
                    f"{format_signed_percent(-share)} of the mean step, by replay",
                ),
                className="cards",
            ),
            html.P(
                f"{without.message}. By replay of the recording as it ran: the saving does not add"
                " up with that of another schedule.",
                className="note",
            ),
        ]  # fmt: skip
    return [build_section("What if", note, html.Div(menus, className="choices"), *parts)]


_MOST_MICROBATCHES = 4_096

_MOST_STRAGGLERS = 4
"""More ranks than that are no stragglers."""

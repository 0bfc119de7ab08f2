"""Causes that mask each other: of two equally slow ranks, fixing one alone gains nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import Remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.report.report import MIN_GAIN_SHARE

_MASKED = 1.1
"""Causes mask each other if fixing all gains more than this multiple of fixing each alone: less is
within the error of a replay. At 1.05 and 1.2 the same of two slow ranks are named as a set."""

_MAX_MEMBERS = 16
"""Only this many causes of one kind, those that cost most, are tried as a set."""

_MAX_MASKS = 3
"""Only so many causes, those that gain most, are tried as what masks another."""


def unmask(context: CauseContext, remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """The remedies of single ranks and links, those that mask each other as sets.

    Causes of one kind whose joint gain exceeds the sum of their own gains are one finding, also if
    that shows only once the largest cause is fixed. A cause that the largest one masks says what it
    gains once that one is fixed, and that is its gain if it gains next to nothing alone.
    """
    joined = [one for alike in _group_by_code(remedies) for one in _join_masked(context, alike)]
    joined.sort(key=lambda remedy: -remedy.finding.gain_ns)
    if not joined:
        return ()
    if joined[0].finding.gain_ns < MIN_GAIN_SHARE * context.mean_ns:
        return tuple(_join_masked(context, joined))
    top, *others = joined
    groups = _group_by_code(others)
    if any(len(alike) > 1 for alike in groups):
        fixed = context.replay_with(top.apply(context.graph))
        others = [one for alike in groups for one in _join_if_fixed(context, fixed, alike)]
        others.sort(key=lambda remedy: -remedy.finding.gain_ns)
    masks = [top, *others][:_MAX_MASKS]
    return (top, *(_find_behind_any(context, masks, remedy) for remedy in others))


def _group_by_code(remedies: Sequence[Remedy]) -> list[list[Remedy]]:
    by_code: dict[str, list[Remedy]] = defaultdict(list)
    for remedy in remedies:
        by_code[remedy.finding.code].append(remedy)
    return list(by_code.values())


def _join_masked(context: CauseContext, remedies: Sequence[Remedy]) -> list[Remedy]:
    """The remedies, those that mask each other as one."""
    members = sorted(remedies, key=_estimate_cost_ns, reverse=True)[:_MAX_MEMBERS]
    if len(members) < 2:
        return list(remedies)
    gain = context.compute_gain_ns(_apply_all(context.graph, members))
    return _join_members(context, remedies, members, gain)


def _join_members(
    context: CauseContext, remedies: Sequence[Remedy], members: list[Remedy], gain: int
) -> list[Remedy]:
    """The remedies; these members of them, which gain so much together, as one without those that
    add next to nothing, if they mask each other."""
    alone = sum(max(one.finding.gain_ns, 0) for one in members)
    least = MIN_GAIN_SHARE * context.mean_ns
    if gain <= _MASKED * alone or gain < least:
        return list(remedies)
    for one in reversed(members):
        others = [member for member in members if member is not one]
        if not others:
            break
        without = context.compute_gain_ns(_apply_all(context.graph, others))
        if without >= gain - least / 2:
            members, gain = others, without
    rest = [one for one in remedies if not any(one is member for member in members)]
    return [_join_remedies(context, members, gain) if len(members) > 1 else members[0], *rest]


def _estimate_cost_ns(remedy: Remedy) -> int:
    finding = remedy.finding
    return (finding.measured_ns or 0) - (finding.predicted_ns or 0)


def _apply_all(graph: DependencyGraph, remedies: Sequence[Remedy]) -> DependencyGraph:
    for remedy in remedies:
        graph = remedy.apply(graph)
    return graph


def _join_remedies(context: CauseContext, members: Sequence[Remedy], gain_ns: int) -> Remedy:
    """One remedy for causes that mask each other; the first of them costs most."""
    findings = [member.finding for member in members]
    first = findings[0]
    ranks = tuple(sorted({rank for one in findings for rank in one.ranks}))
    alone = units.format_milliseconds(max(one.gain_ns for one in findings))
    kinds = " and ".join(dict.fromkeys(member.as_set for member in members))
    who = f"ranks {units.format_number_list(ranks)}{_describe_host(context, ranks)} are {kinds}"
    fixing = f"(fixing one of {len(findings)} saves at most {alone})"
    message = f"{who} and mask each other {fixing}: {first.message}"
    if not all(one.ranks for one in findings):
        # A rank and how the work of all is divided.
        both = "; ".join(one.message for one in findings)
        message = f"{both}; these mask each other {fixing}"
    finding = replace(
        first,
        gain_ns=gain_ns,
        ranks=ranks,
        steps=tuple(sorted({step for one in findings for step in one.steps})),
        message=message,
    )
    return Remedy(
        finding,
        lambda graph: _apply_all(graph, members),
        members[0].as_set,
        names_steps=members[0].names_steps,
        does_more=all(member.does_more for member in members),
    )


def _describe_host(context: CauseContext, ranks: Sequence[int]) -> str:
    """The host of these ranks, if it is one of several; whether it has other ranks."""
    host_of = {one.trace.rank: one.trace.host for one in context.split.ranks}
    hosts = {host_of.get(rank) for rank in ranks}
    if len(hosts) > 1 or hosts >= set(host_of.values()):
        return ""
    (host,) = hosts
    others = [rank for rank, at in host_of.items() if at == host and rank not in ranks]
    return f" (on host {host})" if others else f" (all of host {host})"


def _join_if_fixed(
    context: CauseContext, fixed: CauseContext, alike: Sequence[Remedy]
) -> list[Remedy]:
    """The causes of one kind, those that mask each other in the fixed context as one."""
    ordered = sorted(alike, key=_estimate_cost_ns, reverse=True)
    members, rest = ordered[:_MAX_MEMBERS], ordered[_MAX_MEMBERS:]
    if len(members) < 2:
        return list(alike)
    together = fixed.compute_gain_ns(_apply_all(fixed.graph, members))
    if together < MIN_GAIN_SHARE * context.mean_ns:
        return list(alike)
    there = {id(one.change): one for one in members}
    measured = [_measure_gain(fixed, one) for one in members]
    joined = _join_members(fixed, measured, measured, together)
    kept = [there.get(id(one.change)) or _measure_gain(context, one) for one in joined]
    return [*kept, *rest]


def _measure_gain(context: CauseContext, remedy: Remedy) -> Remedy:
    gain_ns = context.compute_gain_ns(remedy.apply(context.graph))
    return replace(remedy, finding=replace(remedy.finding, gain_ns=gain_ns))


def _find_behind_any(context: CauseContext, masks: Sequence[Remedy], remedy: Remedy) -> Remedy:
    """The remedy, with what it gains once the largest cause is fixed if that one masks it; if not,
    and if it gains next to nothing alone, behind the next ones. A cause of one rank gains at most
    what it costs that rank."""
    least, finding = MIN_GAIN_SHARE * context.mean_ns, remedy.finding
    if len(finding.ranks) == 1 and _estimate_cost_ns(remedy) < least / 2:
        return remedy
    for mask in masks:
        if mask is remedy or mask.finding.gain_ns < least:
            continue
        both_ns = context.compute_gain_ns(remedy.apply(mask.apply(context.graph)))
        gain = both_ns - mask.finding.gain_ns
        if gain < least or gain <= _MASKED * max(finding.gain_ns, 0):
            if finding.gain_ns >= least:
                return remedy
            continue
        # Without ranks, the mask costs all of them.
        ranks, once = mask.finding.ranks, "once the largest bottleneck is fixed"
        if len(ranks) == 1:
            once = f"once rank {ranks[0]} is fixed"
        elif ranks:
            once = f"once ranks {units.format_number_list(ranks)} are fixed"
        if finding.gain_ns >= least:
            text = f"{finding.message}; saves {units.format_milliseconds(gain)} {once}"
            return replace(remedy, finding=replace(finding, message=text))
        # It gains next to nothing alone: what it gains behind the mask is its gain.
        alone = units.format_milliseconds(max(finding.gain_ns, 0))
        text = f"{finding.message}; saves {alone} alone, the rest {once}"
        found = replace(finding, gain_ns=gain, message=text, gain_kind="behind_another")
        return replace(remedy, finding=found)
    return remedy

"""Which rules of thumb of the field touch on a job's formulas and do not hold as they are said."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.model.explain.explained import Explained
from stepsplit.analyzer.model.explain.folk import Folk, folk_rules


def heard(explained: Sequence[Explained]) -> tuple[Folk, ...]:
    """The field's rules about these formulas, without those that are right.

    What a formula already says of a rule, with the job's own numbers, is not said again.
    """
    formulas = {one.formula.id for one in explained}
    told = {name for one in explained for rule in one.folk for name in rule.folk}
    return tuple(
        folk
        for folk in folk_rules()
        if folk.verdict != "right"
        and folk.id not in told
        and not formulas.isdisjoint(folk.formulas)
    )

"""All published steps that a step time is predicted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.spec.checks import check
from stepsplit.analyzer.model.validate.jobs import llm_foundry, megatron, simumax, torchtitan
from stepsplit.analyzer.model.validate.jobs.case import Case
from stepsplit.analyzer.model.validate.records import Published, Record

TABLES: tuple[tuple[str, Callable[[Record], tuple[Case, ...]]], ...] = (
    ("megatron_sc21_table1", megatron.sc21_table1),
    ("megatron_sc21_table2_zero3_vs_ptd", megatron.sc21_table2),
    ("korthikanti_table5_end_to_end", megatron.korthikanti),
    ("mtnlg_530b", megatron.mt_nlg),
    ("megascale_table2", megatron.megascale),
    ("megatron_2020_tp_weak_scaling", megatron.tensor_2020),
    (simumax.TABLE, lambda row: (simumax.simumax(row),)),
    (llm_foundry.TABLE, lambda row: (llm_foundry.llm_foundry(row),)),
    (torchtitan.TABLE, lambda row: (torchtitan.torchtitan(row),)),
)


@dataclass(frozen=True, slots=True)
class Cases:
    """What could be made of the tables' rows; left_out says of each other row why not."""

    found: tuple[Case, ...]
    left_out: tuple[str, ...]


def step_time_cases(published: Published) -> tuple[Case, ...]:
    """Every case of every family, in the tables' order."""
    return possible_cases(published).found


def possible_cases(published: Published) -> Cases:
    """The cases, and the rows that are none: of unknown models, or jobs that cannot be."""
    found: list[Case] = []
    left_out: list[str] = []
    for table, build in TABLES:
        for row in published.records(table):
            try:
                cases = build(row)
                for case in cases:
                    check(case.job)
            except StepsplitError as error:
                left_out.append(f"{row.id}: {error}")
            else:
                found.extend(cases)
    return Cases(tuple(found), tuple(left_out))

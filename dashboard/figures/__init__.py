"""Figures of a run, each by one call on its report: plotly figures that may be changed.

Examples:
    >>> from stepsplit.analyzer import examine
    >>> from stepsplit.dashboard import figures
    >>> analysis = examine(["runs/exp1"])  # doctest: +SKIP
    >>> figures.plot_split_by_rank(analysis).update_layout(title="exp1").show()  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepsplit.dashboard.figures.of_report import (
        plot_bandwidth,
        plot_busy_ranks,
        plot_critical_path,
        plot_difference,
        plot_memory,
        plot_pipeline,
        plot_predicted_and_measured,
        plot_split_by_rank,
        plot_split_by_step,
        plot_stage_bubbles,
        plot_wait_against_transfer,
        plot_waits,
        plot_waterfall,
    )

__all__ = [
    "plot_bandwidth",
    "plot_busy_ranks",
    "plot_critical_path",
    "plot_difference",
    "plot_memory",
    "plot_pipeline",
    "plot_predicted_and_measured",
    "plot_split_by_rank",
    "plot_split_by_step",
    "plot_stage_bubbles",
    "plot_wait_against_transfer",
    "plot_waits",
    "plot_waterfall",
]


def __getattr__(name: str) -> Any:
    """Imports plotly when a figure is asked for, not before."""
    if name not in __all__:
        raise AttributeError(name)
    from stepsplit.dashboard.figures import of_report

    return getattr(of_report, name)

"""explain: a prediction in, the formulas that it rests on out, each with the job's numbers."""

from __future__ import annotations

from stepsplit.analyzer.model.explain.calls import of_calls
from stepsplit.analyzer.model.explain.explained import Explained as Explained
from stepsplit.analyzer.model.explain.links import of_links
from stepsplit.analyzer.model.explain.memory import of_memory
from stepsplit.analyzer.model.explain.messages import of_messages
from stepsplit.analyzer.model.explain.pipeline import of_pipeline
from stepsplit.analyzer.model.explain.routes import of_routes
from stepsplit.analyzer.model.explain.work import of_work
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.spec.job import Job


def explain(job: Job, prediction: Prediction) -> tuple[Explained, ...]:
    """The formulas of this job, from its size to its messages, and the folk rules that differ."""
    return (
        *of_work(job, prediction),
        *of_memory(job, prediction),
        *of_pipeline(job, prediction),
        *of_messages(job, prediction),
        *of_routes(job, prediction),
        *of_calls(job, prediction),
        *of_links(job),
    )

"""What tied embeddings on two pipeline ranks send."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.calls import Place, all_reduce
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.work.parameters import vocabulary_share

TIED = Formula(
    "comm.tied",
    "1 all_reduce of g V'h/t between the first and the last stage",
    "NVIDIA/Megatron-LM, core/distributed/finalize_model_grads.py",
)


def embedding_messages(job: Job, stage: Stage) -> tuple[Message, ...]:
    """The sum of the two gradients of one matrix; none where both uses lie on one rank."""
    if not job.model.tied or stage.embedding == stage.head:
        return ()
    size = vocabulary_share(job) * job.recipe.gradient_bytes
    if job.layout.zero == 3:
        size //= job.layout.shard_size
    return (all_reduce(Place("tied", "pp", stage.index, "grad_sync"), 1, size, 2),)

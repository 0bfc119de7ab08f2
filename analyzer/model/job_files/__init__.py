"""Config files of other programs, read as the tables of a job.toml: one module a kind of file."""

from stepsplit.analyzer.model.job_files import (
    deepspeed,
    hugging_face,
    megatron,
    megatron_bridge,
    torchtitan,
)

KINDS = (hugging_face.KIND, deepspeed.KIND, torchtitan.KIND, megatron_bridge.KIND, megatron.KIND)
"""In the order in which a file is compared with them."""

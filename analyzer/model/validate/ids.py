"""What each row of a published table is called: table/case, the same in any copy of the table."""

from __future__ import annotations

from collections.abc import Mapping

IDS: dict[str, str] = {
    "activation_coefficient_measured": "activation-coefficient/{model}",
    "ccl_bench_training_traces": "ccl-bench/{trace}",
    "deepspeed_estimator_formulas": "deepspeed-formula/{stage}_{offload}",
    "deepspeed_estimator_outputs": "deepspeed/{model}_{stage}_{options}_{gpus_per_node}x{nodes}",
    "korthikanti_fig1_memory_formula_values": "korthikanti-fig1/{model}",
    "korthikanti_table2_activation_formulas": "korthikanti-t2/{configuration}",
    "korthikanti_table5_end_to_end": "korthikanti-t5/{model}",
    "llama3_405b_table4": "llama-3/{gpus}_{seq}",
    "llm_foundry_mpt_throughput": (
        "llm-foundry/{model}_{seq}_{gpus}x{gpu}_{precision}_{micro_batch}x{grad_accum}"
        "_{fsdp_strategy}_ckpt-{activation_ckpt}"
    ),
    "megascale_table2": "megascale/{model}_{system}_{gpus}_{global_batch}",
    "megatron_2020_tp_weak_scaling": "megatron-2020/{case}_{gpus}",
    "megatron_dist_optimizer_bytes": "megatron-bytes/{param_dtype}_{grad_dtype}",
    "megatron_h100_weak_scaling": "megatron-h100/{model}_{gpus}",
    "megatron_sc21_table1": "sc21-t1/{params_B}B",
    "megatron_sc21_table2_zero3_vs_ptd": "sc21-t2/{scheme}_{params_B}B_{gpus}",
    "mtnlg_530b": "mt-nlg/{gpus}",
    "nanotron_best_configs_h100": "nanotron/{params_B}B_{gpus}",
    "nccl_allreduce_alps_gh200": "alps/{nodes}x4_{size_bytes}",
    "nccl_allreduce_sweeps": "sweep/{system}_{tool}_{size_bytes}",
    "nccl_busbw_by_ranks_and_algo": "busbw/{system}_{collective}_{ranks}",
    "nccl_busbw_definitions": "nccl-tests/{collective}",
    "published_scalars": "scalar/{model}_{quantity}",
    "simumax_b200_measured": "simumax/{case}",
    "torchtitan_throughput_memory": (
        "torchtitan/{model}_{seq}_{gpus}_{config}_ckpt-{activation_ckpt}"
    ),
    "zero_bubble_table4_throughput_memory": "zb-t4/{model}_m{num_microbatches}_{schedule}",
    "zero_bubble_table5_9_bubble_rates": "zb-t5/{model}_m{num_microbatches}",
    "zero_table1_model_states": "zero-t1/{model}_{stage}_dp{dp}",
    "zero_table2_max_model": "zero-t2/mp{mp}",
}
"""File name -> the id of a row, made of its columns."""


def row_id(table: str, values: Mapping[str, str]) -> str:
    """The id of one row. Raises KeyError for a column that the row lacks."""
    return IDS[table].format_map(values)

"""The fields of each kind of file that are copied, and the form of each. All others are dropped.

To let a field through, add its line.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepsplit.analyzer.model.config import Experts, LatentAttention, Link
from stepsplit.analyzer.model.config_decode import collect_kinds
from stepsplit.analyzer.model.hardware_config import list_hardware_kinds
from stepsplit.analyzer.model.layout_table import PARALLEL_KEYS
from stepsplit.analyzer.model.model_table import MODEL_KEYS
from stepsplit.analyzer.model.training_table import TRAINING_KEYS
from stepsplit.analyzer.redact.forms import (
    AXIS,
    BACKEND,
    CALL,
    CATEGORY,
    COLLECTIVE,
    COUNTER,
    DESCRIPTION,
    DETAIL,
    DEVICE,
    DTYPE,
    DUMP_VERSION,
    FILE,
    FLOW,
    FUNCTION,
    GROUP,
    HOST,
    KERNEL,
    NUMBER,
    NUMBERS,
    OP,
    PHASE,
    PYTHON,
    REASON,
    ROLE,
    RUN,
    SCHEMA,
    SETTING,
    STATE,
    TASK,
    TEXT,
    TRACK,
    UNIT,
    VALUES,
    VERSION,
    AnyKey,
    Fields,
    Form,
    Rule,
    TextOr,
)
from stepsplit.analyzer.trace import Category


def _number(*keys: str) -> Fields:
    return dict.fromkeys(keys, NUMBER)


# run.json and rank records.

_GROUP_INFO: Fields = {"name": GROUP, "description": DESCRIPTION, "ranks": NUMBERS}

_RANK: Fields = {**_number("rank", "local_rank", "pid"), "host": HOST, "device": DEVICE}

_HOST: Fields = {
    "host": HOST,
    "cpu": DEVICE,
    "gpu": DEVICE,
    **_number("cores", "memory_bytes", "gpus", "gpu_memory_bytes"),
}

_VERSIONS: Fields = dict.fromkeys(
    ("python", "torch", "cuda", "hip", "nccl", "cupti", "driver"), VERSION
)

_JOB: Fields = {
    "schema": SCHEMA,
    "world_size": NUMBER,
    "backend": BACKEND,
    "groups": [_GROUP_INFO],
    "versions": _VERSIONS,
    "max_connections": NUMBER,
    "role": ROLE,
}

RUN_FIELDS: Fields = {
    **_JOB,
    "name": RUN,
    "mesh": [{"axis": AXIS, "size": NUMBER}],
    "model": {
        **_number(
            "layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocab", "tied", "parameters",
            "learned_positions", "biases", "experts", "top_k",
        ),
        "norm": SETTING,
    },
    "training": {
        **_number(
            "seq_len", "micro_batch", "global_batch", "microbatches", "zero", "split_vocab",
            "root_unit", "bucket_bytes",
        ),
        "dtype": SETTING,
        "optimizer": SETTING,
        "schedule": SETTING,
        "framework": SETTING,
        "recompute": SETTING,
        "offload": SETTING,
    },
    "ranks": [_RANK],
    "hosts": [_HOST],
}  # fmt: skip

RECORD_FIELDS: Fields = {
    **_JOB,
    "run": RUN,
    "rank": _RANK,
    "detail": DETAIL,
    "machine": _HOST,
    **_number("first_step", "device_stopped_step", "steps_before", "end_step"),
    "steps": dict.fromkeys(
        (
            "before_ns", "profiled_ns", "after_ns", "gpu_before_ns", "gpu_profiled_ns",
            "gpu_after_ns",
        ),
        NUMBERS,
    ),
    "memory": _number(
        "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes",
        "peak_allocated_bytes", "peak_reserved_bytes", "allocation_retries",
    ),
    "clocks": [_number("offset_ns", "round_trip_ns", "at_unix_ns")],
    "gpu": [_number("at_unix_ns", "sm_clock_mhz", "throttle_reasons", "link_errors")],
    "gpu_note": TEXT,
    "module_names": {"why": REASON, **_number("step", "cost_ns", "step_ns")},
    "host": {
        "places": [[{"function": FUNCTION, "file": FILE, "line": NUMBER}]],
        "at_unix_ns": NUMBERS,
        "place": NUMBERS,
        "gc_pauses": [_number("at_unix_ns", "took_ns", "generation")],
    },
    "work": {"origin": COUNTER, "steps": [_number("step", "tokens", "samples", "flops")]},
}  # fmt: skip

# Traces: the fields around the entries, the entries, and their arguments.

TRACE_FIELDS: Fields = {
    **_number(
        "schemaVersion", "baseTimeNanoseconds", "cuda_driver_version", "cuda_runtime_version",
        "cupti_version", "hip_driver_version", "hip_runtime_version", "roctracer_version",
        "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules",
    ),
    "displayTimeUnit": UNIT,
    "host_name": HOST,
    "distributedInfo": {
        **_number("rank", "world_size", "pg_count"),
        "backend": BACKEND,
        "nccl_version": VERSION,
        "pg_config": [
            {"pg_name": GROUP, "pg_desc": DESCRIPTION, "pg_size": NUMBER, "ranks": NUMBERS}
        ],
    },
    "deviceProperties": [
        {
            "name": DEVICE,
            **_number(
                "id", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock",
                "maxThreadsPerMultiprocessor", "regsPerBlock", "regsPerMultiprocessor", "warpSize",
                "sharedMemPerBlock", "sharedMemPerBlockOptin", "sharedMemPerMultiprocessor",
                "numSms", "maxSharedMemoryPerMultiProcessor",
            ),
        }
    ],
}  # fmt: skip

ENTRY_FIELDS: Mapping[str, Form] = {
    "ph": PHASE,
    "cat": CATEGORY,
    "pid": TRACK,
    "tid": TRACK,
    "ts": NUMBER,
    "dur": NUMBER,
    "id": NUMBER,
    "s": FLOW,
    "bp": FLOW,
}
"""Besides args and the name, whose form is that of the category, or METADATA."""

NAME_FIELDS: Mapping[int, Form] = {
    Category.OTHER: TASK,
    Category.OP: OP,
    Category.ANNOTATION: OP,
    Category.GPU_ANNOTATION: OP,
    Category.RUNTIME: CALL,
    Category.KERNEL: KERNEL,
    Category.MEMCPY: KERNEL,
    Category.MEMSET: KERNEL,
    Category.PYTHON: PYTHON,
    Category.SYNC: CALL,
}

METADATA_ARGS: Fields = {"name": TRACK, "labels": TRACK, "sort_index": NUMBER}

EVENT_ARGS: Fields = {
    **_number(
        "External id", "Ev Idx", "Record function id", "Sequence number", "Fwd thread id",
        "Python id", "Python parent id", "Python module id", "Op count", "correlation", "device",
        "stream", "context", "cbid", "bytes", "memory bandwidth (GB/s)", "queued",
        "registers per thread", "shared memory", "blocks per SM", "warps per SM",
        "est. achieved occupancy %", "wait_on_stream", "wait_on_cuda_event_record_corr_id",
        "wait_on_cuda_event_id", "graph id", "graph node id", "priority", "Rank", "Src Rank",
        "Dst Rank", "Group size", "Global rank start", "Global rank stride", "In msg nelems",
        "Out msg nelems", "Seq",
    ),
    "grid": NUMBERS,
    "block": NUMBERS,
    "In split size": NUMBERS,
    "Out split size": NUMBERS,
    "Process Group Ranks": NUMBERS,
    "Process Group Name": GROUP,
    "Process Group Description": DESCRIPTION,
    "Collective name": COLLECTIVE,
    "dtype": DTYPE,
    "Input Dims": NUMBERS,
    "Input Strides": NUMBERS,
    "Input type": DTYPE,
    "Concrete Inputs": VALUES,
}  # fmt: skip

# Flight Recorder dumps.

FLIGHT_FIELDS: Fields = {
    "version": DUMP_VERSION,
    "pg_config": AnyKey(
        GROUP, TextOr(NUMBERS, {"name": GROUP, "desc": DESCRIPTION, "ranks": NUMBERS})
    ),
    "pg_status": AnyKey(
        GROUP,
        _number(
            "last_enqueued_collective", "last_started_collective", "last_completed_collective"
        ),
    ),
    "entries": [
        {
            **_number(
                "record_id", "op_id", "pg_id", "seq_id", "collective_seq_id", "p2p_seq_id",
                "is_p2p", "time_created_ns", "time_created_us", "time_discovered_started_ns",
                "time_discovered_completed_ns", "duration_ms", "timeout_ms", "retired",
            ),
            "profiling_name": OP,
            "process_group": (GROUP, DESCRIPTION),
            "pg_name": GROUP,
            "pg_desc": DESCRIPTION,
            "input_sizes": NUMBERS,
            "output_sizes": NUMBERS,
            "input_dtypes": DTYPE,
            "output_dtypes": DTYPE,
            "state": STATE,
            "thread_name": TRACK,
            "frames": [{"name": FUNCTION, "filename": FILE, "line": NUMBER}],
        }
    ],
}  # fmt: skip

# job.toml.

JOB_FIELDS: dict[str, Rule] = {}

JOB_FIELDS |= dict.fromkeys(
    {
        "model", "parallel", "training", "hardware", "preset", *MODEL_KEYS, *PARALLEL_KEYS,
        *TRAINING_KEYS, *list_hardware_kinds(), *collect_kinds(Experts),
        *collect_kinds(LatentAttention), *collect_kinds(Link),
    } - {"file"},
    TextOr(SETTING, JOB_FIELDS),
)  # fmt: skip
"""The keys of docs/model.md in any table, without that which names a file."""

JOB_FIELDS["name"] = TEXT

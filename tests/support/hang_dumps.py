"""Flight Recorder dumps of two ranks, as torch writes them."""

from __future__ import annotations

import json

T0 = 1_790_000_000_000_000_000


def write_dump(seqs: int, state: str) -> bytes:
    """A dump of the calls 1 to seqs of the group of both ranks; the last is in this state."""
    entries = [
        {
            "process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": seq,
            "p2p_seq_id": seq, "is_p2p": False, "profiling_name": "nccl:all_reduce",
            "state": state if seq == seqs else "completed", "retired": seq < seqs,
            "time_created_ns": T0 + seq * 1000, "input_sizes": [[1000]], "output_sizes": [[1000]],
            "input_dtypes": ["Float"], "output_dtypes": ["Float"],
        }
        for seq in range(1, seqs + 1)
    ]  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    body = {"version": "2.10", "pg_config": groups, "entries": entries}
    return json.dumps(body).encode()

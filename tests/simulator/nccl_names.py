"""How a trace of NCCL names and describes a call."""

from __future__ import annotations

from typing import Any

from simulator.program import Collective, Message, ProcessGroup
from simulator.style import Nccl

DTYPE, ELEMENT_BYTES = "BFloat16", 2
_OF_OP = {
    "all_reduce": ("AllReduce_Sum_bf16_RING_LL", "allreduce"),
    "all_gather": ("AllGather_RING_LL", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter_Sum_bf16_RING_LL", "_reduce_scatter_base"),
    "all_to_all": ("SendRecv", "all_to_allv"),
    "broadcast": ("Broadcast_RING_LL", "broadcast"),
    "reduce": ("Reduce_Sum_bf16_RING_LL", "reduce"),
    "send": ("SendRecv", "send"),
    "recv": ("SendRecv", "recv"),
}


_BEFORE_2_19 = {
    "all_reduce": "AllReduce_RING_LL_Sum___nv_bfloat16",
    "all_gather": "AllGather_RING_LL_Sum_int8_t",
    "reduce_scatter": "ReduceScatter_RING_LL_Sum___nv_bfloat16",
    "all_to_all": "SendRecv_RING_SIMPLE_Sum_int8_t",
    "broadcast": "Broadcast_RING_LL_Sum_int8_t",
    "reduce": "Reduce_RING_LL_Sum___nv_bfloat16",
    "send": "SendRecv_RING_SIMPLE_Sum_int8_t",
    "recv": "SendRecv_RING_SIMPLE_Sum_int8_t",
}
"""What only moves bytes is compiled once, for int8_t."""


def kernel_name(op: str, nccl: Nccl = "2.27") -> str:
    """The kernel that carries out an op."""
    if nccl == "2.17":
        return f"ncclKernel_{_BEFORE_2_19[op]}(ncclDevComm*, unsigned long, ncclWork*)"
    return f"ncclDevKernel_{_OF_OP[op][0]}(ncclDevKernelArgsStorage<4096ul>)"


def collective_args(work: Collective, group: ProcessGroup, seq: int) -> dict[str, Any]:
    """The arguments of a collective's kernel; seq -1 leaves the number out, as older torch does."""
    whole, size = work.message_bytes // ELEMENT_BYTES, len(group.ranks)
    sent = whole // size if work.op == "all_gather" else whole
    received = whole // size if work.op == "reduce_scatter" else whole
    numbered = {"Seq": seq} if seq >= 0 else {}
    return _args(work.op, sent, received, group) | numbered


def message_args(message: Message, group: ProcessGroup) -> dict[str, Any]:
    """The arguments of a single message's kernel."""
    nelems = message.message_bytes // ELEMENT_BYTES
    side = "Dst Rank" if message.op == "send" else "Src Rank"
    return _args(message.op, nelems, nelems, group) | {side: message.peer}


def _args(op: str, sent: int, received: int, group: ProcessGroup) -> dict[str, Any]:
    return {
        "Collective name": _OF_OP[op][1],
        "In msg nelems": sent,
        "Out msg nelems": received,
        "Group size": len(group.ranks),
        "dtype": DTYPE,
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": str(list(group.ranks)),
    }

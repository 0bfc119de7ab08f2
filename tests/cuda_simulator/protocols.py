"""Communication without arguments: the kernels of a call of each library, and what they wait for.

Written from the libraries' public sources: deepseek-ai/DeepEP (csrc/kernels/legacy, impls of
deep_ep/include, branch hybrid-ep), NVIDIA/nccl (contrib/nccl_ep), ROCm/mori (ops/dispatch_combine),
pytorch/pytorch (symm_mem/CUDASymmetricMemoryOps.cu, torch/distributed/_symmetric_memory), and the
custom all_reduce of vllm-project/vllm, sgl-project/sglang and NVIDIA/TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtocolKernel:
    """A kernel of a call: it takes fixed_ns, and a share of the call's transfer.

    role: meet, post and receive as in program.Call; local computes on its own rank. phase: kernels
    of one phase meet. host_reads: the host spins until it has ended. computes_ns: what the compute
    stream does meanwhile.
    """

    name: str
    role: str
    phase: str = ""
    fixed_ns: int = 0
    share: float = 0.0
    host_reads: bool = False
    computes_ns: int = 0
    op: str = ""
    together: bool = False
    """It ends with a barrier: its transfer is that of the rank that has most to receive."""


Call = Sequence[ProtocolKernel]

_BARRIER_NS = 6_000


def _use_deep_ep(backward: bool, ranks: int) -> tuple[Call, Call]:
    """Normal mode: a kernel with barriers exchanges counts, which the host reads in the forward;
    the backward has the counts. Beyond a node of 8 the kernels state the number of nodes."""
    if ranks > 8:
        place, nodes = "void deep_ep::internode::", ranks // 8
        names = (
            "cached_notify<false>" if backward else f"notify_dispatch<false, {nodes}>",
            f"dispatch<false, {nodes}, {'true' if backward else 'false'}, 8>",
            "cached_notify<false>", f"combine<false, {nodes}, __nv_bfloat16, 8, 2, 16, 24>",
        )  # fmt: skip
    else:
        place = "void deep_ep::intranode::"
        names = (
            f"{'cached_' if backward else ''}notify_dispatch<{ranks}>",
            f"dispatch<{ranks}, 768, 8192>",
            f"cached_notify_combine<{ranks}>", f"combine<__nv_bfloat16, {ranks}, 768>",
        )  # fmt: skip
    dispatch = (
        ProtocolKernel("void deep_ep::layout::get_dispatch_layout<256>", "local", "", 12_000),
        ProtocolKernel(place + names[0], "meet", "notify", _BARRIER_NS, host_reads=not backward),
        ProtocolKernel(place + names[1], "meet", "dispatch", 0, 1.0),
    )
    combine = (
        ProtocolKernel(place + names[2], "meet", "notify", _BARRIER_NS),
        ProtocolKernel(place + names[3], "meet", "combine", 0, 1.0),
    )
    return dispatch[backward:], combine


def _use_low_latency(backward: bool, ranks: int) -> tuple[Call, Call]:
    """Low latency with a hook: a kernel that sends, the shared expert, and a kernel that
    receives."""
    place = "void deep_ep::internode_ll::"
    return (
        _send_and_receive(f"{place}dispatch<true, false, 7168>", "dispatch"),
        _send_and_receive(f"{place}combine<false, 7168, 8>", "combine"),
    )


def _send_and_receive(name: str, phase: str) -> Call:
    return (
        ProtocolKernel(name, "post", phase, 8_000, 0.2, computes_ns=30_000),
        ProtocolKernel(name, "receive", phase, 4_000, 1.0),
    )


def _use_nccl_ep(backward: bool, ranks: int) -> tuple[Call, Call]:
    """High throughput within a node: a dispatch ends when all have written to all; a combine begins
    to read when all have come, and ends by itself."""
    name = "nccl_ep_jit_ht_{}_kernel"
    return (
        (
            ProtocolKernel(name.format("scan"), "local", "", 9_000),
            ProtocolKernel(name.format("dispatch"), "meet", "dispatch", 0, 1.0, together=True),
        ),
        (ProtocolKernel(name.format("combine"), "meet", "combine", 0, 1.0),),
    )


def _use_staged_nccl_ep(backward: bool, ranks: int) -> tuple[Call, Call]:
    """Low latency with send_only: the call sends, and its completion receives."""
    place = "void nccl_ep::internode_ll::"
    return (
        _send_and_receive(
            f"{place}dispatch<false, false, 7168, (ncclEpLayout_t)1, true>", "dispatch"
        ),
        _send_and_receive(f"{place}combine<false, 7168, 11, 4, (ncclEpLayout_t)1>", "combine"),
    )


def _use_mori(backward: bool, ranks: int) -> tuple[Call, Call]:
    """Within a node: a dispatch ends when all have said that they sent; a combine begins to read
    when all have come, and ends by itself."""
    place = "void mori::moe::Ep{}IntraNodeKernel<hip_bfloat16>"
    dispatch, combine = (place.format(kind) for kind in ("Dispatch", "Combine"))
    return (
        (ProtocolKernel(dispatch, "meet", "dispatch", 0, 1.0, together=True),),
        (ProtocolKernel(combine, "meet", "combine", 0, 1.0),),
    )


def _use_hybrid_ep(backward: bool, ranks: int) -> tuple[Call, Call]:
    """Without fused permutation: a barrier before and after a kernel that writes to its peers."""

    def build_call(name: str, phase: str) -> Call:
        sync = "void hybrid_ep::device_sync_kernel<8>"
        return (
            ProtocolKernel(sync, "meet", "sync", _BARRIER_NS),
            ProtocolKernel(f"void hybrid_ep::{name}_kernel<16, 4>", "post", phase, 0, 1.0),
            ProtocolKernel(sync, "meet", "sync", _BARRIER_NS),
        )

    return build_call("dispatch", "dispatch"), build_call("combine", "combine")


def _use_elastic(backward: bool, ranks: int) -> tuple[Call, Call]:
    """DeepEP 2: kernels with a barrier at both ends, and a local kernel that unpacks or adds."""
    place = "void deep_ep::elastic::"
    return (
        (
            ProtocolKernel(
                place + "dispatch_impl<true, 8>", "meet", "dispatch", 0, 1.0, together=True
            ),
            ProtocolKernel(place + "dispatch_copy_epilogue_impl<8>", "local", "", 15_000),
        ),
        (
            ProtocolKernel(
                place + "combine_impl<true, 8>", "meet", "combine", 0, 1.0, together=True
            ),
            ProtocolKernel(place + "combine_reduce_epilogue_impl<8>", "local", "", 15_000),
        ),
    )


EXPERT_PROTOCOLS: dict[str, Callable[[bool, int], tuple[Call, Call]]] = {
    "deep_ep": _use_deep_ep,
    "low_latency": _use_low_latency,
    "hybrid_ep": _use_hybrid_ep,
    "elastic": _use_elastic,
    "nccl_ep": _use_nccl_ep,
    "staged_nccl_ep": _use_staged_nccl_ep,
    "mori": _use_mori,
}
"""The kernels of a dispatch and of a combine; the arguments say whether it is a backward,
and of how many ranks."""

LIBRARY_NAMES = {
    "deep_ep": "DeepEP", "low_latency": "DeepEP", "hybrid_ep": "HybridEP", "elastic": "DeepEP",
    "nccl_ep": "NCCL_EP", "staged_nccl_ep": "NCCL_EP", "mori": "MORI",
}  # fmt: skip

_SUMS = {
    "symm_mem": (
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, {}>"
    ),
    "vllm_one_shot": "void vllm::cross_device_reduce_1stage<__nv_bfloat16, {}>(vllm::RankData*)",
    "sglang_two_shot": (
        "void sglang::cross_device_reduce_2stage<__nv_bfloat16, {}>(sglang::RankData*)"
    ),
    "trt_one_shot": (
        "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport"
        "<(tensorrt_llm::kernels::ar_fusion::AllReduceFusionPattern)1, __nv_bfloat16, {}, true>"
    ),
    "trt_two_shot": "void tensorrt_llm::kernels::twoShotAllReduceKernel<__nv_bfloat16, {}, true>",
}

SUM_LIBRARIES = tuple(_SUMS)


def sum_by_kernel(library: str, ranks: int) -> Call:
    """The kernel of an all_reduce, which runs on the current stream, that of compute."""
    op = "symm_mem::two_shot_all_reduce_" if library == "symm_mem" else ""
    return (ProtocolKernel(_SUMS[library].format(ranks), "meet", "sum", 0, 1.0, op=op),)


BARRIER = "c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)"

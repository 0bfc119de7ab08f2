"""Communication without arguments: the kernels of a call of each library, and what they wait for.

Written from the libraries' public sources: deepseek-ai/DeepEP (csrc/kernels/legacy, impls of
deep_ep/include, branch hybrid-ep) and pytorch/pytorch (symm_mem/CUDASymmetricMemoryOps.cu,
torch/distributed/_symmetric_memory).
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

    def build_call(name: str, phase: str) -> Call:
        name = f"void deep_ep::internode_ll::{name}"
        return (
            ProtocolKernel(name, "post", phase, 8_000, 0.2, computes_ns=30_000),
            ProtocolKernel(name, "receive", phase, 4_000, 1.0),
        )

    return (
        build_call("dispatch<true, false, 7168>", "dispatch"),
        build_call("combine<false, 7168, 8>", "combine"),
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
}
"""The kernels of a dispatch and of a combine; the arguments say whether it is a backward,
and of how many ranks."""

LIBRARY_NAMES = {"deep_ep": "DeepEP", "low_latency": "DeepEP", "hybrid_ep": "HybridEP",
                 "elastic": "DeepEP"}  # fmt: skip

SUM_BY_SYMMETRIC_MEMORY = (
    ProtocolKernel(
        "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>",
        "meet", "sum", 0, 1.0, op="symm_mem::two_shot_all_reduce_",
    ),
)  # fmt: skip
"""torch runs it on the current stream, that of compute."""

BARRIER = "c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)"

"""Libraries whose kernels communicate without arguments: what one call launches, and what ends
together."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.ops import SYMMETRIC_OPS, parse_op
from stepsplit.analyzer.readers.kineto.copy_engine import COPIES, READY
from stepsplit.analyzer.trace import OPS, Bool, Int64, RankTrace

# The names of a kernel are those of the sources, demangled or not: deep_ep::intranode::dispatch<8>
# or _ZN7deep_ep9intranode8dispatchILi8E.


class ProtocolKernel(Struct, frozen=True):
    """One kind of kernel of a protocol.

    Attributes:
        step: What it does: "dispatch" and "combine" move the tokens of experts, "meet" is a barrier
            of all members that belongs to the next or the last kernel which moves data.
        name: What it is called.
        together: It ends on all members at once, as it ends with a barrier.
        of_node: Only on the members of one node.
        halves: It may be launched twice for one call: to send, and to receive.
        writes: It waits for none of the peers whose memory it accesses: the barriers around it do.
            For data that comes over the network it waits.
        reach: Of such a barrier the expression that finds in its name how many ranks access each
            other's memory.
        size: Where its name states the number of members, the expression that finds it there.
        times: The number of members for each that the name states.
    """

    step: str
    name: re.Pattern[str]
    together: bool = False
    of_node: bool = False
    halves: bool = False
    writes: bool = False
    reach: re.Pattern[str] | None = None
    size: re.Pattern[str] | None = None
    times: int = 1


class Protocol(Struct, frozen=True):
    """A library that communicates by kernels of its own.

    Attributes:
        name: Its name.
        axis: The mesh axis of its groups, "" if the name of the library does not tell.
        kernels: Its kernels; the first one with the name of a kernel decides.
    """

    name: str
    axis: str
    kernels: tuple[ProtocolKernel, ...]


def _compile(*parts: str) -> re.Pattern[str]:
    """The pattern of nested names, with :: or the lengths of mangled names in between."""
    return re.compile(r"(?:::|\d+)".join(parts))


_FIRST_NUMBER = r"(?:<|I)(?:\(int\)|Li)?(\d+)"

_INTRANODE, _INTERNODE, _LOW_LATENCY = (
    r"(?:deep_)?ep(?:(?:::|\d+)legacy)?(?:::|\d+)intranode",
    r"(?:deep_)?ep(?:(?:::|\d+)legacy)?(?:::|\d+)internode",
    r"(?:deep_)?ep(?:(?:::|\d+)legacy)?(?:::|\d+)internode_ll",
)

_NODES = re.compile(
    r"(?:dispatch|combine)(?:<|I)(?:\(bool\)|Lb)?(?:true|false|[01])"
    r"(?:, ?(?:\(int\))?|ELi)(\d+)(?:\b|E)"
)
"""Of internode kernels: the mode, then the number of nodes, each of 8 ranks
(LEGACY_NUM_MAX_NVL_PEERS)."""

_MORI = r"(?<![A-Za-z_])Ep"

_NCCL_LOW_LATENCY = _compile("nccl_ep", "internode_ll").pattern

PROTOCOLS = (
    # NVIDIA/nccl, contrib/nccl_ep (0.1): of high throughput a dispatch ends with a barrier of its
    # node, a combine begins with one; the kernels of low latency have two halves.
    Protocol(
        "NCCL EP", "ep",
        (
            ProtocolKernel(
                "dispatch", re.compile(r"nccl_ep_jit_ht_dispatch"), together=True, of_node=True
            ),
            ProtocolKernel("dispatch", _compile(_NCCL_LOW_LATENCY, "dispatch"), halves=True),
            ProtocolKernel("combine", _compile(_NCCL_LOW_LATENCY, "combine"), halves=True),
            ProtocolKernel("dispatch", re.compile(r"nccl_ep[\w:]{0,160}dispatch")),
            ProtocolKernel("combine", re.compile(r"nccl_ep[\w:]{0,160}combine")),
        ),
    ),
    # deepseek-ai/DeepEP, branch hybrid-ep, csrc/hybrid_ep/backend: compiled when a job starts.
    # device_sync_kernel runs before and after, or with fused permutation only after the others.
    Protocol(
        "HybridEP", "ep",
        (
            ProtocolKernel(
                "meet", _compile("hybrid_ep", "device_sync_kernel"), together=True,
                reach=re.compile("device_sync_kernel" + _FIRST_NUMBER),
            ),
            ProtocolKernel("dispatch", _compile("hybrid_ep", "dispatch_kernel"), writes=True),
            ProtocolKernel("combine", _compile("hybrid_ep", "combine_kernel"), writes=True),
        ),
    ),
    # deepseek-ai/DeepEP: csrc/kernels/legacy, and from version 2 on deep_ep/include/deep_ep/impls.
    # notify_ kernels exchange counts between barriers before the kernel that moves the tokens.
    Protocol(
        "DeepEP", "ep",
        (
            ProtocolKernel(
                "meet", _compile(_INTRANODE, r"(?:cached_)?notify_(?:dispatch|combine)"),
                together=True, size=re.compile(r"notify_(?:dispatch|combine)" + _FIRST_NUMBER),
            ),
            ProtocolKernel(
                "meet", _compile(_INTERNODE, r"(?:notify_dispatch|cached_notify)"), together=True,
                size=_NODES, times=8,
            ),
            ProtocolKernel(
                "dispatch", _compile(_INTRANODE, "dispatch"),
                size=re.compile("dispatch" + _FIRST_NUMBER),
            ),
            ProtocolKernel("combine", _compile(_INTRANODE, "combine")),
            ProtocolKernel("dispatch", _compile(_INTERNODE, "dispatch"), size=_NODES, times=8),
            ProtocolKernel("combine", _compile(_INTERNODE, "combine"), size=_NODES, times=8),
            ProtocolKernel("dispatch", _compile(_LOW_LATENCY, "dispatch"), halves=True),
            ProtocolKernel("combine", _compile(_LOW_LATENCY, "combine"), halves=True),
            ProtocolKernel(
                "dispatch", _compile("deep_ep", r"elastic(?:::|\d+)(?:hybrid_)?dispatch_impl"),
                together=True,
            ),
            ProtocolKernel(
                "combine", _compile("deep_ep", r"elastic(?:::|\d+)(?:hybrid_)?combine_impl"),
                together=True,
            ),
        ),
    ),
    # ROCm/mori: within a node a dispatch ends when all have sent, a combine begins with a barrier.
    Protocol(
        "MORI", "ep",
        (
            ProtocolKernel(
                "dispatch", re.compile(_MORI + r"DispatchIntraNode\w*Kernel"), together=True
            ),
            ProtocolKernel("dispatch", re.compile(_MORI + r"Dispatch\w*Kernel")),
            ProtocolKernel("combine", re.compile(_MORI + r"Combine\w*Kernel")),
        ),
    ),
    # pytorch/pytorch, c10d/symm_mem: each kernel begins and ends with a barrier; the copies of
    # _low_contention_all_gather run between two barrier_kernels.
    Protocol(
        "symmetric memory", "",
        (
            ProtocolKernel("meet", _compile("symmetric_memory", "barrier_kernel"), together=True),
            ProtocolKernel("copy", re.compile(r"^Memcpy PtoP")),
            ProtocolKernel(
                "sum",
                re.compile(
                    r"(?:one|two)_shot_all_reduce|multimem_(?:(?:one|two)_shot_)?(?:all_)?reduce"
                ),
                together=True, size=re.compile(r"all_reduce\w*<[\w:]+, \d+, (\d+)\b"),
            ),
            ProtocolKernel("gather", re.compile(r"multimem_all_gather"), together=True),
        ),
    ),
    # NVIDIA/nccl, src/ce_coll.cc: the two events that readers/kineto/copy_engine.py makes of its
    # copies. Data begins to move on all members when the last one has set its flags.
    Protocol(
        "NCCL copy engine", "",
        (
            ProtocolKernel("meet", re.compile(READY), together=True),
            ProtocolKernel("move", re.compile(COPIES)),
        ),
    ),
    # vllm-project/vllm and sgl-project/sglang, custom_all_reduce: barriers at both ends, or equal
    # work behind the last one. NVIDIA/TensorRT-LLM and FlashInfer: customAllReduceKernels.cu,
    # allReduceFusionKernels.cu.
    Protocol(
        "custom all_reduce", "",
        (
            ProtocolKernel(
                "sum", re.compile(r"allreduce_fusion_kernel_(?:oneshot|twoshot)"), together=True,
                size=re.compile(r"shot\w*<\([\w:]+\)\d+, [\w:]+, (\d+)\b"),
            ),
            ProtocolKernel(
                "sum", re.compile(r"(?:one|two)ShotAllReduceKernel"), together=True,
                size=re.compile(r"ShotAllReduceKernel<[\w:]+, (\d+)\b"),
            ),
            ProtocolKernel(
                "sum", re.compile(r"cross_device_reduce_[12]stage"), together=True,
                size=re.compile(r"cross_device_reduce_[12]stage<\w+, (\d+)\b"),
            ),
        ),
    ),
)  # fmt: skip
"""The table: a library is one entry, and nothing else knows its kernels."""

MEET, COPY = "meet", "copy"


class KernelRole(Struct, frozen=True):
    """What a kernel's name says of its call.

    protocol is "" for kernels of collectives that are no library's of the table. size is the number
    of members that the name states, and reach that of ranks which access each other's memory; 0 if
    none.
    """

    protocol: str
    axis: str
    step: str
    op: str
    together: bool
    of_node: bool
    halves: bool
    writes: bool
    reach: int
    size: int

    @property
    def is_part(self) -> bool:
        """Whether it is a barrier of a call that another kernel carries out."""
        return self.step == MEET


@cache
def find_role(name: str, op: str) -> KernelRole:
    """The role of a kernel by its name, and by the op that the rules give it."""
    for protocol in PROTOCOLS:
        kernel = next((one for one in protocol.kernels if one.name.search(name)), None)
        if kernel is not None:
            found = kernel.size.search(name) if kernel.size else None
            size = kernel.times * int(found[1]) if found else 0
            near = kernel.reach.search(name) if kernel.reach else None
            # A copy that a collective of c10d launched is that collective.
            together = op in SYMMETRIC_OPS if kernel.step == COPY else kernel.together
            return KernelRole(
                protocol.name, protocol.axis, kernel.step, op, together, kernel.of_node,
                kernel.halves, kernel.writes, int(near[1]) if near else 0, size,
            )  # fmt: skip
    return KernelRole("", "", parse_op(name), op, op in SYMMETRIC_OPS, False, False, False, 0, 0)


class CallRoles(Struct, frozen=True):
    """The roles of a rank's calls: kinds are the distinct ones, of has the index of each call's."""

    kinds: tuple[KernelRole, ...]
    of: Int64

    def list(self, rows: Int64) -> list[KernelRole]:
        """The roles of these calls."""
        return [self.kinds[kind] for kind in self.of[rows].tolist()]

    @property
    def reach(self) -> int:
        """How many ranks access each other's memory, as the barriers state; 0 if none does."""
        return max((kind.reach for kind in self.kinds), default=0)

    def mask(self, attribute: str) -> Bool:
        """The calls whose role has this attribute."""
        kinds = [bool(getattr(kind, attribute)) for kind in self.kinds]
        return np.array(kinds, dtype=np.bool_)[self.of]


def find_call_roles(trace: RankTrace) -> CallRoles:
    """The role of each call of a rank."""
    calls, events = trace.calls, trace.events
    both = events.name_id[calls.event].astype(np.int64) * len(OPS) + calls.op
    distinct, of = np.unique(both, return_inverse=True)
    pairs = (divmod(one, len(OPS)) for one in distinct.tolist())
    kinds = tuple(find_role(events.names[name], OPS[op]) for name, op in pairs)
    return CallRoles(kinds, of.ravel().astype(np.int64))


def find_carriers(trace: RankTrace, roles: CallRoles) -> Int64:
    """For each call the one that carries it out: for a barrier of a protocol the next kernel of the
    protocol on its stream that moves data, for a barrier after a transfer the last one, for copies
    behind a barrier the first; all others are their own."""
    calls, events = trace.calls, trace.events
    carrier = np.arange(len(calls), dtype=np.int64)
    if not any(kind.is_part for kind in roles.kinds):
        return carrier
    in_protocol, lane = roles.mask("protocol"), events.lane[calls.event]
    start = events.start_ns[calls.event]
    for stream in np.unique(lane[roles.mask("is_part")]).tolist():
        rows = np.flatnonzero((lane == stream) & in_protocol)
        rows = rows[np.argsort(start[rows], kind="stable")]
        # The kernel that moved data since the last barrier, and the barriers before the next one.
        last, waiting, has_barrier = -1, list[int](), False
        for row, role in zip(rows.tolist(), roles.list(rows), strict=True):
            if role.step == COPY and last >= 0 and not waiting and has_barrier:
                carrier[row] = last
            elif not role.is_part:
                carrier[waiting] = row
                has_barrier = len(waiting) > 0
                last, waiting = row, []
            elif last >= 0 and role.protocol in _CLOSED:
                carrier[row], last = last, -1
            else:
                waiting.append(row)
    return carrier


_CLOSED = ("HybridEP", "symmetric memory")
"""Protocols with a barrier after a transfer, too."""


_STATED = re.compile(r"stepsplit::(dispatch|combine) library=(\w+) ", re.ASCII)
"""The collector's range around a call."""


def name_expert_library(trace: RankTrace) -> tuple[str, int] | None:
    """The library that dispatches tokens to experts and combines their results, and the
    number of ranks that their names state (0 if none); None without one."""
    found: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    kernels = trace.events.names
    used = np.unique(trace.events.name_id[trace.calls.event]).tolist()
    for name in (kernels[number] for number in used):
        role = find_role(name, "all_to_all")
        if role.axis == "ep":
            found.setdefault(role.protocol, set()).add(role.step)
            sizes[role.protocol] = max(sizes.get(role.protocol, 0), role.size)
    for name in kernels:
        if (stated := _STATED.match(name)) is not None:
            library = stated[2].replace("_", " ")
            found.setdefault(library, set()).add(stated[1])
            sizes.setdefault(library, 0)
    for protocol in PROTOCOLS:
        if {"dispatch", "combine"} <= found.get(protocol.name, set()):
            return protocol.name, sizes[protocol.name]
    return None

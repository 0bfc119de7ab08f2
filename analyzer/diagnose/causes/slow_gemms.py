"""Slow GEMMs: those that run outside of the tensor cores, or on them by slow kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.replay import reduce_work
from stepsplit.analyzer.split.kernels import find_kernel_work


class Generation(Struct, frozen=True):
    """GPUs whose tensor cores have other dtypes, or other ratios, than those of A100 and H100.

    Attributes:
        devices: Their names, as the driver reports them.
        saved: How much of the time of fp32 GEMMs the remedy saves, 0 without tensor cores.
        remedy: What to change on them.
    """

    devices: re.Pattern[str]
    saved: float
    remedy: str = ""


_FP16 = (
    "fp16 (autocast with a GradScaler) has {} times the FLOP/s; these tensor cores have neither"
    " bf16 nor TF32"
)
_BF16 = "bf16 has {} times the FLOP/s, TF32 no more than fp32"
_BOTH = "bf16 has {} times the FLOP/s, TF32 (torch.set_float32_matmul_precision) {} times"

GENERATIONS = (
    Generation(re.compile(r"V100|TITAN V\b"), 7 / 8, _FP16.format(8)),
    Generation(re.compile(r"\bT4G?\b|Quadro RTX|TITAN RTX"), 7 / 8, _FP16.format(8)),
    Generation(re.compile(r"RTX 20\d\d"), 3 / 4, _FP16.format(4)),
    Generation(
        re.compile(r"\b[PMK]\d{1,4}\w?\b|\bT\d{3,4}\b|GTX|GP100|TITAN X|\b[GM][TX] ?\d"), 0.0
    ),
    Generation(
        re.compile(r"\bA(?:2|10|16|40)\b|RTX A\d|\bL4\b|L40S|RTX \d000.*Ada|RTX PRO"),
        1 / 2,
        _BOTH.format(4, 2),
    ),
    Generation(re.compile(r"A10G|\bL40\b|RTX [345]0\d\d"), 1 / 2, _BF16.format(2)),
    Generation(re.compile(r"\bH20\b"), 2 / 5, _BOTH.format(3.4, 1.7)),
)
"""Dense TFLOP/s in NVIDIA's data sheets, against fp32 outside of the tensor cores: V100 125 (fp16)
and 15.7, T4 65 and 8.1, RTX 2080 Ti 53.8 (summed in fp32) and 13.4; bf16, TF32 and fp32: A40 149.7,
74.8 and 37.4, L4 121, 60 and 30.3, L40 181, 90.5 and 90.5, RTX 3090 71, 35.6 and 35.6, RTX 4090
165, 82.6 and 82.6, H20 148, 74 and 44. bf16 and TF32 came with Ampere; Pascal and older and GTX
have no tensor cores. The first that matches counts."""


class SlowKernels(Struct, frozen=True):
    """Kernels of GEMMs that others would be faster than.

    Attributes:
        pattern: Their names.
        saved: How much of their time the fast ones would save.
        what: What they do.
        remedy: What to change.
        generations: GPUs on which something else helps.
        op, op_remedy: An op that leads to them, "" for none, and what is known to help where the
            recording has it.
    """

    pattern: re.Pattern[str]
    saved: float
    what: str
    remedy: str
    op: str = ""
    op_remedy: str = ""
    generations: tuple[Generation, ...] = ()

    def adapt(self, device: str) -> SlowKernels | None:
        """The same kernels on a device of this name; None if it has no faster ones."""
        own = next((one for one in self.generations if one.devices.search(device)), None)
        if own is None:
            return self
        return replace(self, saved=own.saved, remedy=own.remedy) if own.saved else None


FP32 = SlowKernels(
    pattern=re.compile(r"simt_sgemm|_ffma_|(?:ampere|volta|maxwell|turing)_sgemm"),
    saved=7 / 8,
    what="run in fp32, outside of the tensor cores",
    remedy="bf16 has 16 times the FLOP/s, TF32 (torch.set_float32_matmul_precision) 8 times",
    op="grouped_mm",
    op_remedy="autocast does not cast torch's grouped_mm, which experts call: load the model in "
    "bf16",
    generations=GENERATIONS,
)
"""Saved: TF32 has 8 times the FLOP/s of fp32 on A100, 7.4 on H100 (NVIDIA's data sheets)."""

UNALIGNED = SlowKernels(
    pattern=re.compile(r"tensorop\w*_align[12]\b"),
    saved=1 / 2,
    what="have rows that are not multiples of 16 bytes, for which tensor cores have no fast "
    "kernels",
    remedy="pad that size to a multiple of 8, a vocabulary to one of 64",
)
"""Saved: at least half. GPT-2's head runs at 124 TFLOP/s on an H200, others at 800; padding it made
the whole step of nanoGPT a quarter faster on an A100 (A. Karpathy, 2023)."""

_NAME_CHARACTERS = 60


def find_slow_gemms(context: CauseContext, kind: SlowKernels) -> Iterator[Remedy]:
    """Find kernels of this kind, replayed with the time that others would save."""
    traces = [rank.trace for rank in context.split.ranks]
    adapted = [kind.adapt(trace.device) for trace in traces]
    own_kind = next((one for one in adapted if one is not None), None)
    if own_kind is None:
        return
    kernels = []
    for trace, own in zip(traces, adapted, strict=True):
        # On mixed devices each rank with another one than the first is left out: one remedy is one
        # finding.
        names = trace.events.names if own == own_kind and trace.on_device else ()
        slow = [place for place, name in enumerate(names) if kind.pattern.search(name)]
        rows = np.flatnonzero(trace.kinds.computes) if slow else np.empty(0, dtype=np.int64)
        kernels.append(rows[np.isin(trace.events.name_id[rows], slow)])
    kind = own_kind
    if not any(map(len, kernels)):
        return
    spent_ns = context.measure_events(kernels)
    cut_ns = np.rint(spent_ns * kind.saved).astype(np.int64)
    with_some = np.flatnonzero([len(rows) > 0 for rows in kernels])
    total_ns = [
        int(trace.events.dur_ns[rows].sum()) for trace, rows in zip(traces, kernels, strict=True)
    ]
    index = max(with_some.tolist(), key=lambda one: total_ns[one])
    step_ns = context.average_step_ns(spent_ns)
    events = traces[index].events
    longest = kernels[index][np.argsort(-events.dur_ns[kernels[index]], kind="stable")][:3]
    (work, *_), _ = find_kernel_work(traces[index], longest[:1])
    found = re.search(r"cutlass_\d\w+|\w*gemm\w*", work.name)
    name = (found.group(0) if found else work.name)[:_NAME_CHARACTERS]
    # Without recorded shapes there is the grid, which says nothing to a reader.
    shapes = f" of {work.shapes}" if (work.shapes or "").startswith("[") else ""
    has_op = kind.op and any(kind.op in name for trace in traces for name in trace.events.names)
    yield replay_remedy(
        context,
        lambda graph: reduce_work(graph, "compute", cut_ns),
        bucket="compute",
        measured_ns=round(step_ns),
        predicted_ns=round(step_ns * (1 - kind.saved)),
        rows=np.isin(context.graph.steps.rank, with_some) & context.counted,
        message=f"GEMMs {kind.what}: {units.format_milliseconds(round(step_ns))} of a step"
        f" ({name}{shapes}); {kind.remedy}"
        f"{f'; {kind.op_remedy}' if has_op else ''}",
        ranks=() if len(with_some) == len(traces) else tuple(context.ranks[with_some].tolist()),
        events=tuple(context.make_event_ref(index, row) for row in longest.tolist()),
    )


FP32_GEMMS = CauseEntry("fp32_gemms", partial(find_slow_gemms, kind=FP32), basis="measured")
UNALIGNED_GEMMS = CauseEntry(
    "unaligned_gemms", partial(find_slow_gemms, kind=UNALIGNED), basis="measured"
)

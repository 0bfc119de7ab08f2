"""What the calls of a rank are for, from the ranges of autograd and of frameworks around them.

A collective that is issued in a hook of autograd reduces gradients, one in an FSDP range moves
weights, and one in a layer of tensor parallelism reduces activations: whatever its size, and
whatever else runs on its group.
"""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals, is_inside, make_empty_intervals, union
from stepsplit.analyzer.split.work import mask_families
from stepsplit.analyzer.trace import COMPILES, Bool, Category, Events, Int64, RankTrace

SHARDS = ("FSDP::", "FullyShardedDataParallel._")
"""Prefixes of the annotations of PyTorch's fully sharded data parallelism."""

DDP_FORWARD = "DistributedDataParallel.forward"
"""torch's annotation of the forward of a replicated module."""

ENGINE = "autograd::engine"
"""Prefix of autograd's ranges, one for each function of a backward."""

_HOOKS = (
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "torch::autograd::AccumulateGrad",
)
"""Ranges in which the gradient of a weight is complete: DDP, DeepSpeed and Megatron-LM reduce it
in a hook of theirs."""

_TENSOR_LAYERS = re.compile(
    r"(?:Model|Tensor|Sequence)ParallelRegion(?!ToMOE)"
    r"|VocabParallel|(?:Column|Row)ParallelLinear"
    r"|LinearWithGradAccumulationAndAsyncCommunication"
)
"""Functions and modules of tensor parallelism in Megatron-LM and in what descends from it."""

_REDISTRIBUTES = re.compile(r"^Redistribute\Z")
"""DTensor's function that changes the placement of an activation or of a weight."""


_EXPERTS = ("stepsplit::dispatch ", "stepsplit::combine ")
"""The collector's ranges around calls of libraries of expert parallelism."""


class CallPurposes(Struct, frozen=True):
    """For each call of a rank, whether a range shows its purpose; columns of one length.

    backward: issued in a range of autograd. weights: issued by FSDP. gradients: in a hook of
    autograd. activations: in a layer of tensor parallelism, or in a redistribution of DTensor in
    the forward. experts: by a library that moves the tokens of experts.
    """

    backward: Bool
    weights: Bool
    gradients: Bool
    activations: Bool
    experts: Bool

    @property
    def known(self) -> Bool:
        """Which calls move tensors, by their purpose."""
        return self.weights | self.gradients | self.activations | self.experts


def find_call_purposes(trace: RankTrace) -> CallPurposes:
    """The purpose of each call, by the ranges that contain the instant at which it was issued."""
    events, when = trace.events, find_issue_ns(trace)
    hooked = is_in_gradient_hook(events, when)
    layers = _find_ranges(events, events.match_names(_TENSOR_LAYERS))
    redistributes = _find_ranges(events, events.match_names(_REDISTRIBUTES))
    # A redistribution counts before the first backward of a step only: DTensor also reduces norms
    # of gradients and gradients themselves.
    forward = when < find_first_backward_ns(trace, when)
    activations = is_inside(layers, when) | (is_inside(redistributes, when) & forward)
    return CallPurposes(
        backward=is_inside(find_backward_spans(trace), when),
        weights=is_inside(find_spans(events, *SHARDS), when),
        gradients=hooked,
        activations=activations & ~hooked,
        experts=is_inside(find_spans(events, *_EXPERTS), when),
    )


def is_in_gradient_hook(events: Events, when: Int64) -> Bool:
    """Whether each instant is in a hook of autograd, where gradients are reduced."""
    return is_inside(find_spans(events, *_HOOKS), when)


def find_spans(events: Events, *prefixes: str) -> Intervals:
    """The intervals of host events whose name has one of these prefixes; without what a compiler
    traces, which runs no pass of the step."""
    return _find_ranges(events, events.match_prefix(*prefixes), Category.OP, Category.ANNOTATION)


def is_traced(events: Events, when: Int64) -> Bool:
    """Whether each instant is in a range of torch.compile, which traces forwards and backwards of
    tensors without data."""
    mask = events.match_names(COMPILES)
    if not mask.any():
        return np.zeros(len(when), dtype=np.bool_)
    mask = mask & events.is_category(Category.OP, Category.ANNOTATION)
    return is_inside(union(events.start_ns[mask], events.ends_of(mask)), when)


def _find_ranges(events: Events, mask: Bool, *categories: Category) -> Intervals:
    """The union of these host events, of all host categories by default."""
    if not mask.any():
        return make_empty_intervals()
    chosen = categories or (Category.OP, Category.ANNOTATION, Category.PYTHON)
    mask = mask & events.is_category(*chosen)
    mask[mask] = ~is_traced(events, events.start_ns[mask])
    return union(events.start_ns[mask], events.ends_of(mask))


def find_issue_ns(trace: RankTrace) -> Int64:
    """The instant at which the host issued each call, else its start."""
    calls = trace.calls
    return np.where(calls.issued_ns >= 0, calls.issued_ns, trace.events.start_ns[calls.event])


# Backward passes on the host, and what comes before the first one of a step.

_MIN_THREAD_SHARE = 0.05
"""A thread that launches less than this fraction of the compute runs no pass of the step. Pools of
workers launch copies; the gradients of a pass take at least half of it."""


def has_engine(events: Events) -> bool:
    """Whether autograd's own ranges were recorded."""
    return any(name.startswith(ENGINE) for name in events.names)


def find_backward_spans(trace: RankTrace) -> Intervals:
    """When the host ran backwards: the ranges of autograd, else the launches of autograd's thread.

    torch runs the backward of a device on a thread of its own, which a recording of the device
    alone shows by its launches. Nothing is found unless exactly two threads launch the compute.
    """
    events = trace.events
    spans = find_spans(events, ENGINE)
    if len(spans) or not trace.on_device:
        return spans
    kernels = np.flatnonzero(events.is_category(Category.KERNEL))
    launches = events.find_launches(kernels)
    kernels, launches = kernels[launches >= 0], launches[launches >= 0]
    lane, computes = events.lane[launches], trace.kinds.computes[kernels]
    work = np.bincount(lane[computes], events.dur_ns[kernels[computes]], len(events.lanes))
    threads = np.flatnonzero(work > _MIN_THREAD_SHARE * work.sum())
    if len(threads) != 2:
        return make_empty_intervals()
    # The thread of the training script marks the steps and runs the optimizer.
    marks = events.match_prefix("ProfilerStep#") & events.is_category(Category.ANNOTATION)
    updates = mask_families(trace, {"optimizer"})[kernels]
    script = next(
        (
            thread
            for lanes in (events.lane[marks], lane[updates])
            for thread in threads.tolist()
            if (lanes == thread).any() and not np.isin(threads[threads != thread], lanes).any()
        ),
        None,
    )
    if script is None:
        return make_empty_intervals()
    chosen = np.isin(lane, threads)
    launches = launches[chosen][np.argsort(events.start_ns[launches[chosen]], kind="stable")]
    backward = events.lane[launches] != script
    edges = np.flatnonzero(np.diff(backward.astype(np.int8), prepend=0, append=0))
    first, last = launches[edges[::2]], launches[edges[1::2] - 1]
    return Intervals(events.start_ns[first], events.ends_of(last))


def classify_parts(trace: RankTrace, is_tensor: Bool) -> Int64:
    """0 for calls before the first backward of their step, 1 for later ones, -1 for ignored ones.

    Ignored are messages, calls that move no tensor, calls of unknown time, and calls outside steps
    with a backward.
    """
    calls, when = trace.calls, find_issue_ns(trace)
    counts = is_tensor & ~calls.is_message & ((calls.issued_ns >= 0) | (not trace.on_device))
    backward = find_first_backward_ns(trace, when)
    return np.where(counts & (backward >= 0), (when >= backward).astype(np.int64), -1)


def find_first_backward_ns(trace: RankTrace, when: Int64) -> Int64:
    """The first backward in the step of each instant; -1 if there is none."""
    events = trace.events
    on_host = events.is_category(Category.OP, Category.ANNOTATION)
    backward = find_backward_spans(trace).start_ns
    steps = events.start_ns[on_host & events.match_prefix("ProfilerStep#")]
    # A trace without marks is one step.
    steps = steps if len(steps) else events.start_ns[:1]
    if not len(backward) or not len(steps):
        return np.full(len(when), -1, dtype=np.int64)
    ends = np.append(steps[1:], np.iinfo(np.int64).max)
    first = np.searchsorted(backward, steps)
    start = backward[np.minimum(first, len(backward) - 1)]
    of_step = np.where((first < len(backward)) & (start < ends), start, -1)
    step = np.searchsorted(steps, when, side="right") - 1
    return np.where(step >= 0, of_step[np.maximum(step, 0)], -1)

"""Where in the model the host was at each instant, by the ranges of its threads."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import is_inside, list_distinct, sort_distinct
from stepsplit.analyzer.parts.layer_sequence import ForwardPlaces, find_forward_places
from stepsplit.analyzer.parts.part import NO_LAYER, UNPLACED, Part, PartKind, PartPhase
from stepsplit.analyzer.parts.scope_names import (
    ScopeName,
    nest_kind,
    parse_node_kind,
    parse_op_kind,
    parse_range_name,
)
from stepsplit.analyzer.split.call_purposes import ENGINE, find_issue_ns, find_spans
from stepsplit.analyzer.split.host_threads import STEP, build_nested, find_host_threads
from stepsplit.analyzer.split.kernel_shapes import is_backward
from stepsplit.analyzer.trace import MODULE_MARK, Bool, Category, Events, Int64, RankTrace

_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class PartNumbers(dict[Part, int]):
    """Numbers distinct parts in order of appearance; UNPLACED is 0."""

    def __init__(self) -> None:
        super().__init__()
        self[UNPLACED] = 0

    def __missing__(self, part: Part) -> int:
        self[part] = number = len(self)
        return number


class _Timeline(Struct, frozen=True):
    """The part of a thread from each edge on, as numbers; edges ascend, the first is the begin of
    time. begin_ns is the start of the innermost range there, module_ns of the innermost module."""

    edges_ns: Int64
    part: Int64
    begin_ns: Int64
    module_ns: Int64

    def find_at(self, when_ns: Int64) -> Int64:
        return np.searchsorted(self.edges_ns, when_ns, side="right") - 1


class _Nodes(Struct, frozen=True):
    """Disjoint ranges of autograd on a thread, in order, and their parts."""

    start_ns: Int64
    end_ns: Int64
    part: Int64


class HostScopes(Struct, frozen=True):
    """The parts on the threads of a rank's host.

    Attributes:
        events: The events of the rank.
        numbers: The parts by number, which the other methods return.
        thread_of_lane: The thread of each lane.
        main: The thread that steps the job, -1 if unknown.
        timelines: The parts over time of each thread with any.
        has_modules: Whether ranges of modules were recorded.
        has_names: Whether modules have the names of the model, and layers its numbers.
        n_layers: The number of distinct layers.
        by_sequence: Whether these are known by the sequence of ops alone.
    """

    events: Events
    numbers: PartNumbers
    thread_of_lane: Int64
    main: int
    timelines: dict[int, _Timeline]
    has_modules: bool
    has_names: bool
    n_layers: int
    by_sequence: bool

    def find_parts(self, thread: Int64, when_ns: Int64) -> Int64:
        """The number of the part at each instant on each thread; 0 where nothing is known."""
        found = np.zeros(len(when_ns), dtype=np.int64)
        for one, line in self.timelines.items():
            here = np.flatnonzero(thread == one)
            if len(here):
                found[here] = line.part[line.find_at(when_ns[here])]
        return found

    def find_parts_of(self, rows: Int64) -> Int64:
        """The part at the start of each of these host events; 0 for row -1."""
        thread = np.where(rows >= 0, self.thread_of_lane[self.events.lane[rows]], -1)
        return self.find_parts(thread, self.events.start_ns[rows])


def find_host_scopes(trace: RankTrace, numbers: PartNumbers) -> HostScopes:
    """Find where in the model each thread of the rank's host was."""
    events = trace.events
    threads = find_host_threads(events)
    scopes = _collect_scopes(events)
    scopes, layers = _number_layers(events, scopes, threads.of_lane)
    timelines = {}
    rows = np.flatnonzero(scopes.is_scope)
    thread_of = threads.of_lane[events.lane[rows]]
    for thread in list_distinct(thread_of).tolist():
        mask = np.zeros(len(events), dtype=np.bool_)
        mask[rows[thread_of == thread]] = True
        timelines[thread] = _build_timeline(events, mask, scopes, layers, numbers)
    n_layers = len(set(layers.values()))
    by_sequence = False
    if not layers and threads.main >= 0:
        on_main = threads.of_lane[events.lane] == threads.main
        messages_ns = find_issue_ns(trace)[trace.calls.is_message]
        if (forward := find_forward_places(trace, on_main, messages_ns)) is not None:
            line = timelines.get(threads.main, _NO_RANGES)
            timelines[threads.main] = _merge_sequence(line, forward, numbers)
            n_layers, by_sequence = 1 + max(layer for layer, _ in forward.places), True
    found = HostScopes(
        events=events,
        numbers=numbers,
        thread_of_lane=threads.of_lane,
        main=threads.main,
        timelines=timelines,
        has_modules=scopes.has_modules,
        has_names=scopes.has_names,
        n_layers=n_layers,
        by_sequence=by_sequence,
    )
    # The nodes are placed by the forward, then put into the same timelines.
    nodes = _place_nodes(found)
    op_rows = np.flatnonzero(events.is_category(Category.OP))
    steps = _find_steps(events, scopes)
    calls = _find_backward_calls(events)
    calls_ns, thread_of_call = events.start_ns[calls], threads.of_lane[events.lane[calls]]
    for thread in sorted({*timelines, *nodes}):
        line = timelines.get(thread, _NO_RANGES)
        node_starts_ns = np.empty(0, dtype=np.int64)
        if thread in nodes:
            line = _merge_nodes(line, nodes[thread], numbers)
            node_starts_ns = nodes[thread].start_ns
        ops = op_rows[threads.of_lane[events.lane[op_rows]] == thread]
        timelines[thread] = _fill_gaps(
            line,
            events.start_ns[ops],
            node_starts_ns,
            calls_ns[thread_of_call == thread],
            numbers,
            has_forward=scopes.has_modules or by_sequence,
        )
        timelines[thread] = _repeat_named_step(timelines[thread], events, ops, steps)
    return found


_BEGIN = np.array([_LEAST], dtype=np.int64)

_NO_RANGES = _Timeline(_BEGIN, np.zeros(1, dtype=np.int64), _BEGIN, _BEGIN)


def _merge_sequence(line: _Timeline, forward: ForwardPlaces, numbers: PartNumbers) -> _Timeline:
    """The timeline with the places of the forward where no range says any."""
    nowhere = NO_LAYER, PartKind.OTHER
    of_place = [
        0 if place == nowhere else numbers[Part(*place, PartPhase.FORWARD)]
        for place in forward.places
    ]
    edges = sort_distinct(np.concatenate((line.edges_ns, forward.start_ns)))
    at = line.find_at(edges)
    last = np.searchsorted(forward.start_ns, edges, side="right") - 1
    by_sequence = np.where(last >= 0, np.array(of_place)[forward.number[last]], 0)
    # An op that says its kind by its name has no layer; its place in the sequence has.
    is_alone = np.array(
        [one.layer == NO_LAYER and one.phase == PartPhase.FORWARD for one in numbers]
    )[line.part[at]]
    part = np.where(
        (line.part[at] == 0) | (is_alone & (by_sequence > 0)), by_sequence, line.part[at]
    )
    return _Timeline(edges, part, line.begin_ns[at], line.module_ns[at])


def _merge_nodes(line: _Timeline, nodes: _Nodes, numbers: PartNumbers) -> _Timeline:
    """The timeline with the parts of autograd's nodes; a module that is called inside a node
    computes again, another range there (FSDP's) may say more than the node."""
    edges = sort_distinct(np.concatenate((line.edges_ns, nodes.start_ns, nodes.end_ns)))
    at = line.find_at(edges)
    part, begin, module = line.part[at], line.begin_ns[at], line.module_ns[at]
    node = np.searchsorted(nodes.start_ns, edges, side="right") - 1
    own = np.maximum(node, 0)
    inside = (node >= 0) & (edges < nodes.end_ns[own])
    again = inside & (module > nodes.start_ns[own]) & (part > 0)
    ranged = inside & ~again & (begin > nodes.start_ns[own]) & (part > 0)
    parts = list(numbers)
    for rows, phase in ((again, PartPhase.RECOMPUTE), (ranged, PartPhase.BACKWARD)):
        moved = {
            one: _move_to_phase(numbers, parts[one], phase)
            for one in list_distinct(part[rows]).tolist()
        }
        part[rows] = [moved[one] for one in part[rows].tolist()]
    part = np.where(inside & ~again & ~ranged, nodes.part[own], part)
    return _Timeline(edges, part, np.where(inside, nodes.start_ns[own], begin), module)


def _move_to_phase(numbers: PartNumbers, part: Part, phase: PartPhase) -> int:
    """The number of the part in this phase; that of gradients and optimizers stays."""
    kind = part.kind
    return numbers[part if kind in OUTSIDE_PASSES else Part(part.layer, kind, phase)]


def _fill_gaps(
    line: _Timeline,
    op_starts_ns: Int64,
    node_starts_ns: Int64,
    calls_ns: Int64,
    numbers: PartNumbers,
    has_forward: bool,
) -> _Timeline:
    """The timeline, with time outside of all ranges placed by what is around it.

    Between two nodes autograd prepares the second one, if no op starts; from the call of a backward
    to the first node it begins; without a recorded call it may begin at the end of the forward, as
    before the annotation of a backward if no op starts; between two parts of the optimizer
    (clipping, steps of several groups) Python prepares the second one, unless a forward may be
    there that has no ranges.
    """
    change = np.concatenate(([True], line.part[1:] != line.part[:-1]))
    edges, part = line.edges_ns[change], line.part[change]
    gap = np.flatnonzero(part[1:-1] == 0) + 1 if len(part) > 2 else np.empty(0, dtype=np.int64)
    phase = np.array([one.phase for one in numbers])
    kind = np.array([one.kind for one in numbers])
    before, after = part[gap - 1], part[gap + 1] if len(gap) else gap
    ops = np.searchsorted(op_starts_ns, edges)
    is_quiet = ops[gap + 1] == ops[gap] if len(gap) else np.zeros(0, dtype=np.bool_)
    is_backward = phase == PartPhase.BACKWARD
    filled = is_backward[after] & (is_backward[before] & is_quiet)
    begins_node = np.isin(edges[gap + 1], node_starts_ns) if len(gap) else is_quiet
    is_forward = phase[before] == PartPhase.FORWARD
    filled |= is_backward[after] & is_forward & (begins_node | is_quiet)
    if has_forward:
        filled |= (kind[before] == PartKind.OPTIMIZER) & (kind[after] == PartKind.OPTIMIZER)
    part[gap[filled]] = after[filled]
    begin, module = line.begin_ns[change], line.module_ns[change]
    passed = np.searchsorted(calls_ns, edges)
    called = gap[filled & is_forward & begins_node]
    called = called[passed[called] < passed[called + 1]]
    # What runs before the call (logging of the loss) is of no part.
    part[called] = 0
    call_ns = calls_ns[passed[called + 1] - 1]
    return _Timeline(
        np.insert(edges, called + 1, call_ns), np.insert(part, called + 1, part[called + 1]),
        np.insert(begin, called + 1, call_ns), np.insert(module, called + 1, module[called]),
    )  # fmt: skip


_BACKWARD_CALL = re.compile(r"torch/autograd/__init__\.py\(\d+\): backward$")


def _find_backward_calls(events: Events) -> Int64:
    """The events that begin a backward, by start: its function in Python; without stacks the op
    that makes the gradient of the loss."""
    rows = np.flatnonzero(events.match_names(_BACKWARD_CALL) & events.is_category(Category.PYTHON))
    if not len(rows):
        is_ones = events.name_mask(tuple(name == "aten::ones_like" for name in events.names))
        rows = np.flatnonzero(is_ones & events.is_category(Category.OP))
    return rows[np.argsort(events.start_ns[rows], kind="stable")]


# The recorder names modules in one step; the ops of the others follow in the same order.


class _HostSteps(Struct, frozen=True):
    """The steps on the host, in order, and the one whose modules have names; -1 if that is none or
    not the only one."""

    start_ns: Int64
    end_ns: Int64
    named: int


def _find_steps(events: Events, scopes: _Scopes) -> _HostSteps:
    marks = np.flatnonzero(events.match_prefix(STEP) & events.is_category(Category.ANNOTATION))
    start, end = events.start_ns[marks], events.ends_of(marks)
    is_module = [scope is not None and scope.is_module for scope in scopes.of_name]
    modules = events.start_ns[scopes.is_scope & events.name_mask(tuple(is_module))]
    has_names = np.searchsorted(modules, start) < np.searchsorted(modules, end)
    named = np.flatnonzero(has_names)
    return _HostSteps(start, end, int(named[0]) if len(named) == 1 < len(marks) else -1)


def _repeat_named_step(line: _Timeline, events: Events, ops: Int64, steps: _HostSteps) -> _Timeline:
    """The timeline, with the parts of the named step in each step that runs the same ops on this
    thread."""
    if steps.named < 0:
        return line
    ops = ops[np.lexsort((-events.dur_ns[ops], events.start_ns[ops]))]
    step = np.searchsorted(steps.start_ns, events.start_ns[ops], side="right") - 1
    of_step = [ops[step == one] for one in range(len(steps.start_ns))]
    named = of_step[steps.named]
    first, last = int(steps.start_ns[steps.named]), int(steps.end_ns[steps.named])
    inside = (line.edges_ns > first) & (line.edges_ns < last)
    # The begin of the step, and its edges.
    edges = np.append(first, line.edges_ns[inside])
    part = np.append(line.part[line.find_at(edges[:1])], line.part[inside])
    for one, own in enumerate(of_step):
        is_same = np.array_equal(events.name_id[own], events.name_id[named])
        if one == steps.named or not is_same or not len(own):
            continue
        begin, end = int(steps.start_ns[one]), int(steps.end_ns[one])
        # An edge lies between the begins and ends of ops as it does in the named step.
        known = np.concatenate(([first], events.start_ns[named], events.ends_of(named), [last]))
        there = np.concatenate(([begin], events.start_ns[own], events.ends_of(own), [end]))
        order = np.argsort(known, kind="stable")
        there = np.minimum(np.maximum.accumulate(there[order]), end)
        moved = np.interp(edges, known[order], there).astype(np.int64)
        low, high = np.searchsorted(line.edges_ns, (begin, end))
        # What follows the step keeps its part.
        after = line.part[line.find_at(np.array([end]))]
        at = np.concatenate((line.edges_ns[:low], moved, [end], line.edges_ns[high:]))
        line = _Timeline(
            at, np.concatenate((line.part[:low], part, after, line.part[high:])), at, at
        )
    return line


# The ranges that say where in the model the host is.


class _Scopes(Struct, frozen=True):
    """of_name has what each name says, None for most; is_scope which events count."""

    of_name: Sequence[ScopeName | None]
    is_scope: Bool
    has_modules: bool
    has_names: bool


def _collect_scopes(events: Events) -> _Scopes:
    """The ranges of modules, annotations, and ops whose name says a kind."""
    categories = (Category.PYTHON, Category.ANNOTATION, Category.OP)
    masks = [events.is_category(category) for category in categories]
    used = np.zeros((3, len(events.names)), dtype=np.bool_)
    for place, mask in enumerate(masks):
        used[place, events.name_id[mask]] = True
    of_name: list[ScopeName | None] = [None] * len(events.names)
    is_range, is_op = (used[0] | used[1]).tolist(), used[2].tolist()
    for number, name in enumerate(events.names):
        scope = parse_range_name(name) if is_range[number] else None
        if scope is None and is_op[number] and not name.startswith(ENGINE):
            kind = parse_op_kind(name)
            # Without autograd's ranges an op may still say that it computes a gradient.
            phase = PartPhase.BACKWARD if is_backward(name) else None
            scope = None if kind is None else ScopeName(kind, is_op=True, phase=phase)
        of_name[number] = scope
    chosen = np.array([scope is not None for scope in of_name], dtype=np.bool_)[events.name_id]
    is_scope = np.zeros(len(events), dtype=np.bool_)
    backward = find_spans(events, ENGINE)
    for category, mask in zip(categories, masks, strict=True):
        is_chosen = mask & chosen
        if category == Category.OP:
            # What a node of autograd runs belongs to the op whose gradient it is.
            is_chosen[is_chosen] = ~is_inside(backward, events.start_ns[is_chosen])
        is_scope |= is_chosen
    # Those of the host: kernels may say the names of modules, too.
    here = list_distinct(events.name_id[is_scope]).tolist()
    known = any(scope.is_module for name in here if (scope := of_name[name]) is not None)
    named = any(events.names[name].startswith(MODULE_MARK) for name in here)
    return _Scopes(of_name, is_scope, known, named)


def _number_layers(
    events: Events, scopes: _Scopes, thread_of_lane: Int64
) -> tuple[_Scopes, dict[tuple[str, int], int]]:
    """The number of each layer by class and number, from 0 in the order of their first calls.

    A class that contains other such modules (Megatron's TransformerBlock) is a container; a layer
    that its path numbers keeps its number. What layers are in is a model, whatever its name: the
    kind that it says (GPT2LMHeadModel) is dropped from the scopes.
    """
    names = [
        number for number, scope in enumerate(scopes.of_name)
        if scope is not None and scope.is_module
    ]  # fmt: skip
    chosen = np.zeros(len(events.names), dtype=np.bool_)
    chosen[names] = True
    rows = np.flatnonzero(scopes.is_scope & chosen[events.name_id])
    layer_class = [scope.layer_class if scope else "" for scope in scopes.of_name]
    containers, around = set[str](), set[int]()
    first: dict[tuple[str, int], int] = {}
    for thread in list_distinct(thread_of_lane[events.lane[rows]]).tolist():
        own = rows[thread_of_lane[events.lane[rows]] == thread]
        mask = np.zeros(len(events), dtype=np.bool_)
        mask[own] = True
        nested = build_nested(events, mask)
        open_until: list[tuple[int, int]] = []
        for start, end, name in zip(
            nested.start_ns.tolist(), nested.end_ns.tolist(),
            events.name_id[nested.row].tolist(), strict=True,
        ):  # fmt: skip
            while open_until and open_until[-1][0] <= start:
                open_until.pop()
            scope = scopes.of_name[name]
            if scope is not None and scope.layer != NO_LAYER:
                key = scope.layer_class, scope.layer
                first[key] = min(first.get(key, start), start)
                around.update(outer for _, outer in open_until)
                for _, outer in open_until:
                    outer_class = layer_class[outer]
                    if outer_class != scope.layer_class:
                        containers.add(outer_class)
            open_until.append((end, name))
    classes = [key for key in first if key[0] and key[0] not in containers]
    classes.sort(key=lambda key: (first[key], key))
    numbered = {key: place for place, key in enumerate(classes)}
    of_name = [
        replace(scope, kind=None)
        if number in around and scope is not None and scope.layer == NO_LAYER
        else scope
        for number, scope in enumerate(scopes.of_name)
    ]
    numbered |= {key: key[1] for key in first if not key[0]}
    return replace(scopes, of_name=of_name), numbered


class _State(Struct, frozen=True):
    """What the open ranges say: layer, kind, whether they are of modules, and the pass."""

    layer: int = NO_LAYER
    kind: PartKind | None = None
    in_module: bool = False
    phase: PartPhase = PartPhase.FORWARD


def _build_timeline(
    events: Events,
    mask: Bool,
    scopes: _Scopes,
    layers: dict[tuple[str, int], int],
    numbers: PartNumbers,
) -> _Timeline:
    """The parts of one thread over time, from its nested ranges."""
    nested = build_nested(events, mask)
    name_ids = events.name_id[nested.row].tolist()
    outside = _State()
    edges = [(_LEAST, 0, _LEAST, _LEAST)]
    # Of each open range: its end, its state, the state that modules inside it start from, and its
    # part, its start, and the start of the innermost module.
    stack = [(_MOST, outside, outside, (0, _LEAST, _LEAST))]
    memo: dict[tuple[_State, _State, int], tuple[_State, _State, int, bool]] = {}
    for start, end, name_id in zip(
        nested.start_ns.tolist(), nested.end_ns.tolist(), name_ids, strict=True
    ):
        while stack[-1][0] <= start:
            left_ns = stack.pop()[0]
            edges.append((left_ns, *stack[-1][3]))
        until, state, of_modules, (_, _, module_ns) = stack[-1]
        key = state, of_modules, name_id
        if key not in memo:
            scope = scopes.of_name[name_id]
            assert scope is not None
            entered, entered_modules = _enter(state, of_modules, scope, layers)
            kind = PartKind.OTHER if entered.kind is None else entered.kind
            is_placed = entered.in_module or kind != PartKind.OTHER or entered.layer != NO_LAYER
            phase = entered.phase if is_placed else PartPhase.OTHER
            if kind in OUTSIDE_PASSES:
                phase = PartPhase.OTHER
            number = numbers[Part(entered.layer, kind, phase)]
            memo[key] = entered, entered_modules, number, scope.is_module
        inner, inner_modules, part, is_module = memo[key]
        own = part, start, start if is_module else module_ns
        edges.append((start, *own))
        stack.append((min(end, until), inner, inner_modules, own))
    while len(stack) > 1:
        left_ns = stack.pop()[0]
        edges.append((left_ns, *stack[-1][3]))
    return _Timeline(*np.array(edges, dtype=np.int64).T)


def _enter(
    state: _State, of_modules: _State, scope: ScopeName, layers: dict[tuple[str, int], int]
) -> tuple[_State, _State]:
    """The states inside a range. A module inside an annotation or function (that computes
    a Trainer's loss, or an optimizer's closure) is placed by modules alone."""
    outer = of_modules if scope.is_module else state
    if scope.is_alone:
        outer = _State(in_module=True)
    layer = outer.layer
    if scope.layer != NO_LAYER:
        layer = layers.get((scope.layer_class, scope.layer), layer)
        if not scope.is_module:
            layer = scope.layer
    kind = scope.kind
    if kind == PartKind.OPTIMIZER and scope.is_op and outer.in_module:
        # Modules normalize by a norm of vectors as the clipping of gradients does.
        kind = None
    if kind is None and scope.is_linear and layer == NO_LAYER and layers:
        # A matrix outside of the layers is the head, whose class says nothing.
        kind = PartKind.HEAD
    is_new_layer = scope.is_module and layer != outer.layer
    inner = _State(
        layer=layer,
        kind=kind if is_new_layer else nest_kind(outer.kind, kind),
        in_module=outer.in_module or scope.is_module,
        phase=outer.phase if scope.phase is None else scope.phase,
    )
    return inner, inner if scope.is_module else of_modules


OUTSIDE_PASSES = (PartKind.OPTIMIZER, PartKind.GRADIENT_REDUCTION)


# The backward: autograd's ranges have the sequence numbers of the ops whose gradient they compute.


def _place_nodes(scopes: HostScopes) -> dict[int, _Nodes]:
    """The outermost ranges of autograd by thread, each with the part of its forward."""
    events, numbers = scopes.events, scopes.numbers
    is_op = events.is_category(Category.OP)
    is_node = is_op & events.match_prefix(ENGINE)
    rows = np.flatnonzero(is_node)
    if not len(rows):
        return {}
    # What a node runs has its number too.
    repeats = events.name_mask(tuple("Backward" in name for name in events.names))
    forward = np.flatnonzero(is_op & ~is_node & ~repeats & (events.correlation >= 0))
    thread_of = scopes.thread_of_lane[events.lane]
    nodes_by_thread = {
        thread: rows[thread_of[rows] == thread]
        for thread in list_distinct(thread_of[rows]).tolist()
    }
    sequence = events.correlation[forward]
    order = np.lexsort((events.start_ns[forward], sequence))
    forward, sequence = forward[order], sequence[order]
    kinds = [parse_node_kind(name) if name.startswith(ENGINE) else None for name in events.names]
    found = {}
    for thread, own in nodes_by_thread.items():
        wanted = events.correlation[own]
        # The last op with the number that began before the node.
        key = _find_last_before(sequence, events.start_ns[forward], wanted, events.start_ns[own])
        op = np.where((key >= 0) & (wanted >= 0), np.append(forward, -1)[key], -1)
        moved = [
            _move_to_phase(numbers, one, PartPhase.BACKWARD) if place else 0
            for place, one in enumerate(list(numbers))
        ]
        part = np.array(moved)[scopes.find_parts_of(op)]
        # A node whose op is in no range may say its kind by name.
        by_name = np.array(
            [numbers[Part(kind=PartKind.OTHER if kind is None else kind, phase=PartPhase.BACKWARD)]
             for kind in kinds]
        )  # fmt: skip
        plain = numbers[Part(phase=PartPhase.BACKWARD)]
        known = wanted >= 0
        part = np.where((part == 0) | (part == plain), by_name[events.name_id[own]], part)
        # Nodes without a number (sums of gradients) go with the one before.
        before = np.maximum.accumulate(np.where(known, np.arange(len(own)), -1))
        part = np.where(before < 0, plain, part[before])
        found[thread] = _Nodes(events.start_ns[own], events.ends_of(own), part)
    return {thread: _flatten(nodes) for thread, nodes in found.items()}


def _find_last_before(sequence: Int64, start_ns: Int64, wanted: Int64, before_ns: Int64) -> Int64:
    """The last row of each wanted number that starts before an instant; -1 for none. Rows are
    sorted by number, then start."""
    if not len(sequence):
        return np.full(len(wanted), -1, dtype=np.int64)
    # One ascending key of number and start: the number by its first row, the start by its rank.
    starts = np.sort(start_ns)
    ranks = len(starts) + 1
    key = np.searchsorted(sequence, sequence) * ranks + np.searchsorted(starts, start_ns)
    low = np.searchsorted(sequence, wanted)
    row = np.searchsorted(key, low * ranks + np.searchsorted(starts, before_ns)) - 1
    is_found = (row >= low) & (sequence[np.maximum(row, 0)] == wanted)
    return np.where(is_found, row, -1)


def _flatten(nodes: _Nodes) -> _Nodes:
    """Disjoint ranges, of which an inner one outranks the one around it; reentrant checkpointing
    runs a backward inside a node."""
    if not (nodes.start_ns[1:] < nodes.end_ns[:-1]).any():
        return nodes
    start, end, part = [], [], []
    stack: list[tuple[int, int]] = []
    at = _LEAST

    def add(until: int) -> None:
        if stack and until > at:
            start.append(at)
            end.append(until)
            part.append(stack[-1][1])

    for begin, finish, number in zip(
        nodes.start_ns.tolist(), nodes.end_ns.tolist(), nodes.part.tolist(), strict=True
    ):
        while stack and stack[-1][0] <= begin:
            add(stack[-1][0])
            at = max(at, stack.pop()[0])
        add(begin)
        at = max(at, begin)
        stack.append((min(finish, stack[-1][0]) if stack else finish, number))
    while stack:
        add(stack[-1][0])
        at = max(at, stack.pop()[0])
    columns = (np.array(column, dtype=np.int64) for column in (start, end, part))
    return _Nodes(*columns)

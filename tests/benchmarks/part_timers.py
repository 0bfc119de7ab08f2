"""The parts of models of others beside timers placed in them by hand, in the same steps:

    python tests/benchmarks/part_timers.py --nanogpt nanoGPT/model.py --picotron picotron

Llama, GPT-2 and Mixtral of transformers, and nanoGPT and picotron (2 ranks, gloo) from their
sources, each on a CPU, with Python stacks and with the modules named in one step. Forwards
and hooks of autograd's nodes read the clock at the begin and end of each part. Prints each part
whose median of five steps is off, and ends with 1 if one is by more than 3 % and 0.5 % of the step.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.table import in_markdown
from stepsplit.analyzer.parts.part_times import compute_part_times
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split_recording import split_recording
from stepsplit.collectors.record.module_names import name_modules

STEPS = 5
WITHIN, WITHIN_OF_STEP = 0.03, 0.005
WAYS = ("stacks", "names")
MODELS = ("Llama", "GPT-2", "Mixtral", "nanoGPT", "picotron")
VOCABULARY, HIDDEN, TOKENS, BATCH = 2048, 256, 128, 4

Place = tuple[str, str]
"""A kind of part and a phase, by the labels of the report."""


class Timers:
    """Intervals of parts on the clock of the process; an inner one is not part of the outer."""

    def __init__(self) -> None:
        self._intervals: list[list[Any]] = []
        self._nodes: list[Any] = []
        self._backward_ns = 0

    def place(self, module: nn.Module, kind: str, of_output: bool = True) -> None:
        """Times the calls of a module and, unless its output needs none, their backward."""
        forward = module.forward

        def timed(*args: Any, **options: Any) -> Any:
            start, first = time.perf_counter_ns(), torch.autograd._get_sequence_nr()  # type: ignore
            # What this costs is in the range of the module too: hooks of its own run after those
            # for all modules, which end that range.
            try:
                output = forward(*args, **options)
                if of_output:
                    self._follow(kind, output[0] if isinstance(output, tuple) else output, first)
            finally:  # checkpointing leaves its last module by an exception
                self.add(kind, "forward", start)
            return output

        module.forward = timed
        for weight in module.parameters():
            # The node that adds up the gradient; hooks that were added before run before.
            node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore
            node.register_hook(self._extend)
            self._nodes.append(node)

    def place_function(
        self, function: Callable[..., Any], kind: str, has_backward: bool = True
    ) -> Callable[..., Any]:
        """The function, with its calls and their backward timed."""

        def timed(*args: Any, **options: Any) -> Any:
            first, start = torch.autograd._get_sequence_nr(), time.perf_counter_ns()  # type: ignore
            output = function(*args, **options)
            self.add(kind, "forward" if has_backward else "other", start)
            if has_backward:
                self._follow(kind, output, first)
            return output

        return timed

    def begin_backward(self) -> None:
        """The next node is the first of a backward, which begins now."""
        self._backward_ns = time.perf_counter_ns()

    def add(self, kind: str, phase: str, start: int) -> None:
        """An interval from start to now."""
        self._intervals.append([start, time.perf_counter_ns(), (kind, phase)])

    def take_step(self) -> Counter[Place]:
        """The time of each place since the last call, in ns."""
        took: Counter[Place] = Counter()
        stack: list[tuple[int, Place]] = []
        for start, end, place in sorted(self._intervals, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1][0] <= start:
                stack.pop()
            took[place] += end - start
            if stack:
                took[stack[-1][1]] -= min(end, stack[-1][0]) - start
            stack.append((end, place))
        self._intervals.clear()
        return took

    def _follow(self, kind: str, output: torch.Tensor, first: int) -> None:
        """Times the backward from the node of the output to the last one that the call made."""
        last, wanted, seen = output.grad_fn, [output.grad_fn], set[Any]()
        while wanted:
            node = wanted.pop()
            if node is None or node in seen or node._sequence_nr() < first:  # type: ignore
                continue
            seen.add(node)
            is_leaf = type(node).__name__ == "AccumulateGrad"
            if not is_leaf and node._sequence_nr() < last._sequence_nr():  # type: ignore
                last = node
            wanted += [] if is_leaf else [following for following, _ in node.next_functions]
        interval: list[Any] = [0, 0, (kind, "backward")]

        def begin(_: Any) -> None:
            interval[0] = interval[1] = self._backward_ns or time.perf_counter_ns()
            self._backward_ns = 0
            self._intervals.append(interval)

        def end(*_: Any) -> None:
            interval[1] = time.perf_counter_ns()

        if output.grad_fn is not None and last is not None:
            output.grad_fn.register_prehook(begin)
            last.register_hook(end)

    def _extend(self, *_: Any) -> None:
        """The gradient of a weight is added after the last node that it comes from."""
        begun = [one for one in self._intervals if one[2][1] == "backward"]
        begun[-1][1] = max(begun[-1][1], time.perf_counter_ns())


@dataclass
class Model:
    """A model with timers: run makes its loss, or a step without its optimizer."""

    module: nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    after: Callable[[], None] = lambda: None


def build_of_transformers(name: str, timers: Timers) -> Model:
    """Llama, GPT-2 or a Mixtral of four experts."""
    import transformers as hf

    common = {"vocab_size": VOCABULARY, "use_cache": False}
    llama = {
        "hidden_size": HIDDEN, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 2 * TOKENS,
    }  # fmt: skip
    model: Any
    if name == "GPT-2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=HIDDEN, n_layer=4, n_head=8, n_positions=2 * TOKENS, **common)
        )
        base, layers = model.transformer, model.transformer.h
        embeddings = [base.wte, base.wpe]
    else:
        if name == "Llama":
            model = hf.LlamaForCausalLM(
                hf.LlamaConfig(intermediate_size=688, num_hidden_layers=4, **llama, **common)
            )
        else:
            model = hf.MixtralForCausalLM(
                hf.MixtralConfig(intermediate_size=512, num_hidden_layers=3, num_local_experts=4,
                                 **llama, **common)
            )  # fmt: skip
        base, layers = model.model, model.model.layers
        embeddings = [base.embed_tokens]
        timers.place(base.rotary_emb, "embedding", of_output=False)
    for module in embeddings:
        timers.place(module, "embedding")
    for layer in layers:
        is_gpt = name == "GPT-2"
        for norm in (layer.ln_1, layer.ln_2) if is_gpt else (
            layer.input_layernorm, layer.post_attention_layernorm
        ):  # fmt: skip
            timers.place(norm, "norm")
        timers.place(layer.attn if is_gpt else layer.self_attn, "attention")
        timers.place(layer.mlp, "experts" if name == "Mixtral" else "mlp")
        if name == "Mixtral":
            timers.place(layer.mlp.gate, "router")
    timers.place(base.ln_f if name == "GPT-2" else base.norm, "norm")
    timers.place(model.lm_head, "head")
    model.loss_function = timers.place_function(model.loss_function, "loss")
    return Model(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss)


def build_nanogpt(source: Path, timers: Timers) -> Model:
    """nanoGPT from its model.py."""
    code = types.ModuleType("nanogpt_model")
    sys.modules[code.__name__] = code
    exec(compile(source.read_text(), source, "exec"), code.__dict__)
    config = code.GPTConfig(block_size=TOKENS, vocab_size=VOCABULARY, n_layer=4, n_head=8,
                            n_embd=HIDDEN, dropout=0.0)  # fmt: skip
    model = code.GPT(config)
    own = model.transformer
    for module, kind in ((own.wte, "embedding"), (own.wpe, "embedding"), (own.ln_f, "norm"),
                         (model.lm_head, "head")):  # fmt: skip
        timers.place(module, kind)
    for block in own.h:
        for module, kind in ((block.ln_1, "norm"), (block.attn, "attention"),
                             (block.ln_2, "norm"), (block.mlp, "mlp")):  # fmt: skip
            timers.place(module, kind)
    functional = types.SimpleNamespace(**vars(code.F))
    functional.cross_entropy = timers.place_function(code.F.cross_entropy, "loss")
    code.F = functional
    return Model(model, lambda tokens: model(tokens, tokens)[1])


def build_picotron(source: Path, timers: Timers) -> Model:
    """picotron's Llama in its data parallelism, without the kernels of flash_attn."""
    os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32"}
    sys.path.insert(0, str(source))
    for name, members in (
        ("flash_attn", ()), ("flash_attn.ops", ()), ("flash_attn.ops.triton", ()),
        ("flash_attn.layers", ()), ("flash_attn.flash_attn_interface", ("flash_attn_func",)),
        ("flash_attn.layers.rotary", ("apply_rotary_emb",)),
        ("flash_attn.ops.triton.layer_norm", ("layer_norm_fn",)),
    ):  # fmt: skip
        stand_in = types.ModuleType(name)
        stand_in.__dict__.update(dict.fromkeys(members))
        sys.modules[name] = stand_in
    import picotron.process_group_manager as groups  # type: ignore
    from picotron.data_parallel import bucket  # type: ignore
    from picotron.data_parallel.data_parallel import DataParallelBucket  # type: ignore
    from picotron.model import Llama  # type: ignore
    from torch.nn import functional

    groups.setup_process_group_manager(tp_size=1, cp_size=1, pp_size=1, dp_size=2)
    config = types.SimpleNamespace(
        hidden_size=HIDDEN, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=TOKENS,
        rope_theta=10_000.0, rms_norm_eps=1e-6,
    )  # fmt: skip
    model = Llama(config)
    parallel = DataParallelBucket(model)
    # All gradients are in one bucket: from its all_reduce on nothing else is run.
    collectives = types.SimpleNamespace(**vars(bucket.dist))
    for place in (collectives, bucket.BucketManager):
        name = "wait" if place is bucket.BucketManager else "all_reduce"
        timed = timers.place_function(getattr(place, name), "gradient_reduction", False)
        setattr(place, name, timed)
    bucket.dist = collectives
    for module, kind in ((model.embedding, "embedding"), (model.final_norm, "norm"),
                         (model.final_proj, "head")):  # fmt: skip
        timers.place(module, kind)
    for layer in model.decoder_layers:
        for module, kind in (
            (layer.input_layernorm, "norm"), (layer.attention, "attention"),
            (layer.post_attention_layernorm, "norm"), (layer.mlp, "mlp"),
        ):  # fmt: skip
            timers.place(module, kind)
    cross_entropy = timers.place_function(functional.cross_entropy, "loss")

    def run(tokens: torch.Tensor) -> torch.Tensor:
        parallel.require_backward_grad_sync = True
        logits = parallel(input_ids=tokens).view(tokens.numel(), -1)
        return cross_entropy(logits, tokens.reshape(-1), reduction="mean")  # type: ignore

    return Model(parallel, run, parallel.reset)


def record(model: Model, timers: Timers, way: str, file: Path) -> list[Counter[Place]]:
    """Five recorded steps; the timed places of each."""
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-4)
    truth = []
    # A collection that a hook sets off after it has read the clock would be of the module alone.
    gc.collect()
    gc.disable()
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=STEPS),
        with_stack=way == "stacks",
    ) as profiler:  # fmt: skip
        for number in range(2 + STEPS):
            with name_modules() if way == "names" and number == 2 else nullcontext():
                begin = time.perf_counter_ns()
                loss = model.run(torch.randint(0, VOCABULARY, (BATCH, TOKENS)))
                timers.begin_backward()
                loss.backward()
                start = time.perf_counter_ns()
                nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                timers.add("optimizer", "other", start)
                model.after()
            places = timers.take_step()
            places["step", ""] = time.perf_counter_ns() - begin
            truth.append(places)
            profiler.step()
    gc.enable()
    profiler.export_chrome_trace(str(file))
    return truth[2:]


@dataclass(frozen=True)
class Row:
    """A place of a model: medians of its steps, in ns; the difference is that of the same step."""

    model: str
    way: str
    place: Place
    timed_ns: float
    found_ns: float
    difference_ns: float
    step_ns: float

    @property
    def ratio(self) -> float:
        return self.difference_ns / self.timed_ns if self.timed_ns else float("inf")

    @property
    def of_step(self) -> float:
        return self.difference_ns / self.step_ns

    @property
    def is_met(self) -> bool:
        return abs(self.ratio) <= WITHIN or abs(self.of_step) <= WITHIN_OF_STEP


def compare(
    model: str, way: str, file: Path, rank: int, truth: Sequence[Counter[Place]]
) -> Iterator[Row]:
    """The parts of a rank's recorded steps beside the timers."""
    split = split_recording(read_recording([file]))
    own = next(one for one in compute_part_times(split) if one.rank == rank)
    by_step = own.ns.sum(axis=2)
    assert len(by_step) == len(truth), (len(by_step), len(truth))
    step_ns = median(step["step", ""] for step in truth)
    for place in sorted({place for step in truth for place in step} - {("step", "")}):
        columns = [
            at for at, part in enumerate(own.parts)
            if (part.kind.label, part.phase.label) == place
        ]  # fmt: skip
        found = by_step[:, columns].sum(axis=1).tolist()
        timed = [step[place] for step in truth]
        apart = median(ns - by_timer for ns, by_timer in zip(found, timed, strict=True))
        yield Row(model, way, place, median(timed), median(found), apart, step_ns)


def run_alone(name: str, way: str, nanogpt: Path | None, folder: Path) -> list[Row]:
    """A model in this process."""
    timers, file = Timers(), folder / "trace.json"
    model = build_nanogpt(nanogpt, timers) if nanogpt else build_of_transformers(name, timers)
    return list(compare(name, way, file, 0, record(model, timers, way, file)))


def run_rank(rank: int, way: str, source: Path, folder: Path) -> None:
    """A rank of picotron, which prints its rows into a file."""
    from torch import distributed

    os.environ["LOCAL_RANK"] = str(rank)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    timers, traces = Timers(), folder / "traces"
    traces.mkdir(exist_ok=True)
    model = build_picotron(source, timers)
    truth = record(model, timers, way, traces / f"rank{rank}_trace.json")
    distributed.barrier()
    rows = list(compare("picotron", way, traces, rank, truth))
    (folder / f"rows{rank}").write_bytes(pickle.dumps(rows))
    distributed.destroy_process_group()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's model.py")
    parser.add_argument("--picotron", type=Path, help="the folder of picotron's source")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for way in WAYS:
        for name in options.models:
            with tempfile.TemporaryDirectory() as folder:
                if name != "picotron":
                    source = options.nanogpt if name == "nanoGPT" else None
                    rows += run_alone(name, way, source, Path(folder))
                    continue
                arguments = way, options.picotron.resolve(), Path(folder)
                torch.multiprocessing.spawn(run_rank, arguments, nprocs=2)
                for rank in range(2):
                    rows += pickle.loads((Path(folder) / f"rows{rank}").read_bytes())
    table = [["model", "by", "within", "farthest, of the step"]]
    for model, way in dict.fromkeys((row.model, row.way) for row in rows):
        own = [row for row in rows if (row.model, row.way) == (model, way)]
        worst = max(own, key=lambda row: abs(row.of_step))
        table.append(
            [model, way, f"{sum(row.is_met for row in own)} of {len(own)}",
             f"{' '.join(worst.place)}: {worst.timed_ns / 1e6:.2f} ms,"
             f" {worst.ratio:+.1%}, {worst.of_step:+.2%} of the step"]
        )  # fmt: skip
    sys.stdout.write(in_markdown(table) + "\n")
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        sys.stdout.write(
            f"{row.model} {row.way} {' '.join(row.place)}: timers {row.timed_ns / 1e6:.3f} ms,"
            f" parts {row.found_ns / 1e6:.3f} ms, {row.of_step:+.2%} of the step\n"
        )
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

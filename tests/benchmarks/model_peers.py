"""Published steps predicted by stepsplit and by other analytical models, on the same rows.

python tests/benchmarks/model_peers.py CALCULON     (a clone of calculon-ai/calculon)

stepsplit predicts each publisher's runs by constants of the others. Calculon runs as it is, with
its own A100 system. SimuMax's predictions are those that it publishes for the runs it was
calibrated on. A row that a tool cannot express is left out for both.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.validation.predictions import UnseenRun, predict_unseen
from stepsplit.analyzer.validation.published_runs import list_cases
from stepsplit.analyzer.validation.tables import Published

CALIBRATED = {"korthikanti": "Calculon", "simumax": "SimuMax"}
"""The publishers whose runs a peer's constants were chosen for."""

_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}
_SIMUMAX = "simumax_b200_measured"


@dataclass(frozen=True)
class Pair:
    """One published run: the errors of both predictions, as shares of the published step."""

    source: str
    peer: str
    own: float
    other: float


class Calculon:
    """Calculon of a clone, with its A100 of 80 GB and the rate of the job's network."""

    def __init__(self, clone: Path) -> None:
        sys.path.insert(0, str(clone))
        from calculon.llm.llm import Llm  # type: ignore[import-not-found]
        from calculon.system import System  # type: ignore[import-not-found]

        self._llm: Any = Llm
        self._system: Any = System
        self._a100 = json.loads((clone / "systems/a100_80g.json").read_text())

    def predict_s(self, job: JobConfig) -> float:
        """The step. Raises ValueError if Calculon cannot express the job."""
        if not _is_gpt(job):
            raise ValueError("not a GPT of whole layers per stage")
        application = self._llm.Application(_describe_model(job))
        execution = self._llm.Execution.from_json(_describe_execution(job))
        model = self._llm(application, logging.getLogger("calculon"))
        try:
            system = self._system(self._describe_system(job))
            model.compile(system, execution)
            model.run(system)
        except self._llm.Error as error:
            raise ValueError(str(error)) from None
        return float(model.get_total_time())

    def _describe_system(self, job: JobConfig) -> dict[str, Any]:
        node, network = self._a100["networks"]
        rate = job.hardware.inter.bytes_per_s / 1e9
        return {**self._a100, "networks": [node, {**network, "bandwidth": rate}]}


def _is_gpt(job: JobConfig) -> bool:
    model, layout = job.model, job.parallel
    plain = model.experts is None and not model.gated and model.kv_heads == model.heads
    return (
        plain
        and layout.cp == 1
        and layout.layers_per_stage is None
        and layout.schedule in ("1f1b", "interleaved")
        and job.training.recompute in _RECOMPUTE
        and model.layers % (layout.pp * layout.chunks) == 0
    )


def _describe_model(job: JobConfig) -> dict[str, int]:
    model = job.model
    return {
        "hidden": model.hidden, "feedforward": model.ffn, "seq_size": job.training.seq_len,
        "attn_heads": model.heads, "attn_size": model.head_size, "num_blocks": model.layers,
    }  # fmt: skip


def _describe_execution(job: JobConfig) -> dict[str, object]:
    """The layout as Calculon's own validation writes those of Megatron-LM."""
    layout, training = job.parallel, job.training
    dp = layout.dp_replicate * layout.dp_shard
    gathers_again = layout.sequence_parallel and training.recompute != "full"
    scattered = "p2p_rs_ag" if layout.scatter_gather and layout.pp > 1 else "ar"
    return {
        "num_procs": layout.world_size,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": dp,
        "tensor_par_net": 0,
        "pipeline_par_net": 1 if layout.tp * layout.pp > job.hardware.gpus_per_node else 0,
        "data_par_net": 1 if layout.world_size > job.hardware.gpus_per_node else 0,
        "batch_size": training.global_batch,
        "microbatch_size": training.micro_batch,
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTE[training.recompute],
        "pipeline_interleaving": layout.chunks,
        "optimizer_sharding": layout.zero > 0 and dp > 1,
        "tensor_par_comm_type": "rs_ag" if layout.sequence_parallel else scattered,
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": gathers_again,
        "data_par_overlap": "dp" in layout.overlap and dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def compare_with_calculon(runs: Iterable[UnseenRun], clone: Path) -> Iterator[Pair]:
    """The runs on A100 that both can express."""
    calculon = Calculon(clone)
    for run in runs:
        case = run.case
        if case.family not in ("A100 Megatron", "A100 reports"):
            continue
        try:
            other_s = calculon.predict_s(case.job)
        except (ValueError, AssertionError) as error:
            sys.stderr.write(f"{case.id}: not by Calculon: {error}\n")
            continue
        own = run.predicted_ns / case.step_ns - 1
        yield Pair(case.source, "Calculon", own, other_s * 1e9 / case.step_ns - 1)


def compare_with_simumax(runs: Iterable[UnseenRun], published: Published) -> Iterator[Pair]:
    """The runs that SimuMax publishes with its predictions."""
    predicted = {row.id: row for row in published.read_records(_SIMUMAX)}
    for run in runs:
        if run.case.table == _SIMUMAX:
            row = predicted[run.case.id]
            other = row.read_number("simumax_pred_ms") / row.read_number("real_iter_ms") - 1
            yield Pair(run.case.source, "SimuMax", run.predicted_ns / run.case.step_ns - 1, other)


def format_errors(errors: Iterable[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{100 * fmean(sizes):.1f} / {100 * max(sizes):.1f} %"


def format_rows(pairs: Iterable[Pair]) -> list[tuple[str, ...]]:
    """A row for each publisher and peer, and one for those a peer was not calibrated on."""
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.source, pair.peer].append(pair)
        if CALIBRATED.get(pair.source) != pair.peer:
            groups["all not calibrated on", pair.peer].append(pair)
    rows = []
    for (source, peer), members in groups.items():
        mark = ", calibrated on them" if CALIBRATED.get(source) == peer else ""
        rows.append(
            (source, str(len(members)), format_errors(one.own for one in members),
             f"{peer} {format_errors(one.other for one in members)}{mark}")
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calculon", type=Path)
    clone, published = parser.parse_args().calculon, Published()
    unseen = predict_unseen(list_cases(published).cases)
    pairs = [*compare_with_calculon(unseen, clone), *compare_with_simumax(unseen, published)]
    head = ("publisher", "rows", "stepsplit, mean / max", "peer, mean / max")
    sys.stdout.write(f"{in_markdown([head, *format_rows(pairs)])}\n")


if __name__ == "__main__":
    main()

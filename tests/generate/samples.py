"""Builds the simulated recordings of sample_traces/: python -m generate.samples

Each lies beside truth.json, what truly happened, and report.json, what the analyzer says of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.program import Scenario
from simulator.run_json import write_run_json
from simulator.scenarios import SCENARIOS
from simulator.truth import truth_of

from stepsplit.analyzer import analyze
from stepsplit.analyzer.report.io import REPORT_NAME, to_json

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
BUILT = {
    "built_tp_pp_dp_slow_rank": ("tp_pp_dp_slow_rank", 7),
    "built_ddp_host_stall": ("ddp_host_stall", 3),
    "built_fsdp_four_hosts": ("fsdp_four_hosts", 5),
    "built_zero_bubble": ("pp_zb_h1", 2),
}
"""The name of each sample: its scenario and seed."""


def build(folder: Path, scenario: Scenario) -> None:
    """Writes the recording, its truth and where it is from into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run = simulate(scenario.job, Noise.of(scenario.seed))
    write_recording(scenario, run, folder)
    write_run_json(scenario.job, folder)
    (folder / "truth.json").write_text(_truth(scenario, [asdict(s) for s in truth_of(run).splits]))
    (folder / "SOURCE.txt").write_text(_source(scenario))
    (folder / REPORT_NAME).write_bytes(to_json(analyze(folder)))


def _truth(scenario: Scenario, splits: list[dict[str, object]]) -> str:
    cause = asdict(scenario.cause) if scenario.cause else None
    clocks = {"offset_ns": scenario.offset_ns, "drift_ppm": scenario.drift_ppm}
    rows = ",\n".join(json.dumps(split) for split in splits)
    head = f'"cause": {json.dumps(cause)},\n"clocks": {json.dumps(clocks)}'
    return f'{{{head},\n"steps": [\n{rows}\n]}}\n'


def _source(scenario: Scenario) -> str:
    job, cause = scenario.job, scenario.cause
    planted = f"rank {cause.rank}, cause {cause.cause}" if cause else "nothing"
    what = f"a simulated job of {len(job.programs)} ranks, as torch.profiler would write its traces"
    return f"""what: {what}
made by: generate/samples.py of the tests (scenario {job.name}, seed {scenario.seed}); no GPU ran
licence: Apache-2.0, as the project
known answers:
- truth.json: the seven buckets of every rank and step in true time, the clocks of the hosts
- planted: {planted}
"""


def main() -> None:
    """Builds all of them anew."""
    for name, (scenario, seed) in BUILT.items():
        build(SAMPLES / name, SCENARIOS[scenario](seed))
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()

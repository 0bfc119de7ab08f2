"""Three roles in one gloo job of four ranks (rollout, rollout, reference, trainer), with one slow
part: `role_job.py OUT tail|transfer|reward`. Each rank writes what its waits took by its clock."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from stepsplit.collectors import profile_run

SLOW_S, STEPS, FIRST, RECORDED = 0.3, 8, 3, 4


def compute(seconds: float) -> None:
    end, matrix = time.perf_counter() + seconds, torch.randn(160, 160)
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)


def main(out: str, slow: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    role = ("rollout", "rollout", "reference", "trainer")[rank]
    weights, samples = dist.new_group([0, 1, 3]), torch.zeros(1000)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    extra = {part: SLOW_S * (slow == part) for part in ("tail", "transfer", "reward")}
    waits_s: list[float] = []
    steps_s: list[float] = []
    with profile_run(out, role=role, wait=FIRST - 1, warmup=1, active=RECORDED) as run:
        for _ in range(STEPS):
            begin, waited = time.perf_counter(), 0.0
            if role == "rollout":
                with record_function("generate"):
                    compute(0.15 + extra["tail"] * (rank == 1))
                at = time.perf_counter()
                dist.send(samples, 2)
                with record_function("weight_sync"):
                    dist.broadcast(samples, 3, group=weights)
                waited = time.perf_counter() - at
            elif role == "reference":
                at = time.perf_counter()
                for source in (0, 1):
                    dist.recv(samples, source)
                waited = time.perf_counter() - at
                with record_function("reward"):
                    time.sleep(0.02 + extra["reward"])
                compute(0.05)
                dist.send(samples, 3)
            else:
                at = time.perf_counter()
                dist.recv(samples, 2)
                waited = time.perf_counter() - at
                with record_function("train"):
                    compute(0.1)
                    model(torch.ones(4, 64)).sum().backward()
                    optimizer.step()
                with record_function("weight_sync"):
                    time.sleep(0.02 + extra["transfer"])
                    dist.broadcast(samples, 3, group=weights)
            steps_s.append(time.perf_counter() - begin)
            waits_s.append(waited)
            run.step()
    recorded = slice(FIRST, FIRST + RECORDED - 1)
    share = sum(waits_s[recorded]) / sum(steps_s[recorded])
    Path(out, f"{role}-{rank}.json").write_text(json.dumps(share))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

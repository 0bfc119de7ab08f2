"""Ray Train on two CPU workers: the recorder is used in the loop, as in any script."""

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = Path(__file__).parent


def train_loop_per_worker(config: dict[str, str]) -> None:
    sys.path.insert(0, config["here"])
    sys.argv = ["train", config["out"]]
    import torch
    from loop import Loop
    from tiny import OPTIONS, OUT, STEPS, recorded_by

    from stepsplit.collectors import profile_run

    torch.set_num_threads(1)
    loop = Loop()
    loss = torch.zeros(())
    with recorded_by(profile_run(OUT, mesh={"dp": 2}, **OPTIONS)) as run:
        for _ in range(STEPS):
            loss = loop.train_step()
            if run is not None:
                run.step()
    ray.train.report({"loss": loss.item()})
    rank = ray.train.get_context().get_world_rank()
    Path(config["losses"], f"{rank}.txt").write_text(loss.item().hex())


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, _temp_dir=sys.argv[3])
config = {"here": str(HERE), "out": sys.argv[1], "losses": sys.argv[2]}
trainer = TorchTrainer(
    train_loop_per_worker,
    train_loop_config=config,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(storage_path=f"{sys.argv[2]}/results"),
)
trainer.fit()
for rank in (0, 1):
    sys.stdout.write(f"rank {rank} loss {Path(sys.argv[2], f'{rank}.txt').read_text()}\n")

"""A Lightning fit with DDP and accumulated batches, with the given package name."""

import importlib
import sys

import torch
from tiny import ACCUMULATE, MICRO_BATCH, OPTIONS, OUT, STEPS, data, model, tell
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

pl = importlib.import_module(sys.argv[2])


class Perceptron(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.loss = torch.zeros(())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


callbacks = []
if OUT != "-":
    from stepsplit.collectors.integrations.lightning import StepsplitCallback

    callbacks.append(StepsplitCallback(OUT, **OPTIONS))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=STEPS,
    accumulate_grad_batches=ACCUMULATE,
    callbacks=callbacks,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Perceptron()
trainer.fit(module, DataLoader(data(), batch_size=MICRO_BATCH))
tell(module.loss.item())
torch.distributed.destroy_process_group()

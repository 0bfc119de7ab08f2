"""The trainer and the model of minGPT's clone; it trains on one device, so the model is wrapped."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from sizes import BATCH, HEADS, LAYERS, STEPS, TOKENS, VOCABULARY, WIDTH
from texts import Pairs
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(os.environ["STEPSPLIT_CLONES"]) / "minGPT"))
from mingpt.model import GPT
from mingpt.trainer import Trainer


class Replicated(DistributedDataParallel):
    """The trainer asks its model for the optimizer."""

    def configure_optimizers(self, config: Any) -> torch.optim.Optimizer:
        return self.module.configure_optimizers(config)


distributed.init_process_group("gloo")
torch.manual_seed(0)
config = GPT.get_default_config()
config.model_type = None
config.n_layer, config.n_head, config.n_embd = LAYERS, HEADS, WIDTH
config.vocab_size, config.block_size = VOCABULARY, TOKENS
model = GPT(config)
options = Trainer.get_default_config()
options.device, options.num_workers = "cpu", 0
options.batch_size, options.max_iters = BATCH, STEPS
torch.manual_seed(distributed.get_rank())
trainer = Trainer(options, model, Pairs())
trainer.model = Replicated(model)
trainer.run()
distributed.destroy_process_group()

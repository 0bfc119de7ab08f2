"""Lightning's fit of its own demo transformer, over DDP."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos import LightningTransformer, Transformer
from sizes import BATCH, HEADS, LAYERS, STEPS, VOCABULARY, WIDTH
from texts import Pairs
from torch.utils.data import DataLoader


class DemoTransformer(LightningTransformer):
    """The demo without its download, and with our sizes."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.model = Transformer(VOCABULARY, WIDTH, HEADS, 2 * WIDTH, LAYERS // 2)

    def prepare_data(self) -> None:
        pass


torch.manual_seed(0)
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(DemoTransformer(), DataLoader(Pairs(), batch_size=BATCH, shuffle=True))
torch.distributed.destroy_process_group()

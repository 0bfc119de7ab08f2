"""The loop of accelerate's documentation, on GPT-2 of transformers."""

import torch
from accelerate import Accelerator
from sizes import BATCH
from texts import Texts, gpt2
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = gpt2()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Texts(), batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
accelerator.end_training()

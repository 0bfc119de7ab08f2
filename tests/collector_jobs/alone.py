"""A training of one process, which a script has started while it trains itself."""

import torch

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(12):
    weight.pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

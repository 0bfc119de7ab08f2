"""megatron.core's GPT on two tensor parallel ranks; its schedules and its DDP need a GPU."""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from sizes import BATCH, HEADS, LAYERS, TOKENS, VOCABULARY, WIDTH
from texts import Pairs
from torch import distributed
from torch.utils.data import DataLoader

# Its buffers lie on the current CUDA device, and its dropout has CUDA states; there is none here.
torch.cuda.current_device = lambda: torch.device("cpu")
initialize_rng_tracker(inference_rng_tracker=True)
distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=LAYERS,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    use_cpu_initialization=True,
    pipeline_dtype=torch.float32,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    gradient_accumulation_fusion=False,
)
model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, TOKENS)
optimizer = torch.optim.AdamW(model.parameters())
positions = torch.arange(TOKENS).expand(2 * BATCH, TOKENS)
mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
for tokens, targets in DataLoader(Pairs(), batch_size=2 * BATCH):
    model(tokens, positions, mask, labels=targets).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()

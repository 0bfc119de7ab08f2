"""transformers' Trainer on its Llama."""

import tempfile

import torch
from sizes import BATCH, HEADS, LAYERS, STEPS, VOCABULARY, WIDTH
from texts import Texts
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
trainer = Trainer(
    model=LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
        )
    ),
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=Texts(),
)
trainer.train()
torch.distributed.destroy_process_group()

"""A tiny Llama under transformers' Trainer, with gradient accumulation and an evaluation."""

import tempfile

import torch
from tiny import ACCUMULATE, MICRO_BATCH, OPTIONS, OUT, STEPS, tell
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
draw = torch.Generator().manual_seed(1)
tokens = torch.randint(128, (256, 16), generator=draw)
texts = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    ),
    train_dataset=texts,
)
if OUT != "-":
    from stepsplit.collectors.integrations.transformers import StepsplitCallback

    trainer.add_callback(StepsplitCallback(OUT, **OPTIONS))
trainer.train()
tell(sum(float(each.detach().double().sum()) for each in trainer.model.parameters()))
torch.distributed.destroy_process_group()

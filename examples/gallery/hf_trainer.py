"""The Trainer of Transformers, as it runs under torchrun: nothing here starts a process.

A classifier of short texts that are made up: is word 7 among the six words of it?
"""

import sys

import torch
import transformers
from torch.utils.data import Dataset

import muster


class Words(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        stream = torch.Generator().manual_seed(index)
        words = torch.randperm(12, generator=stream)[:6]
        return {"input_ids": words, "labels": (words == 7).any().long()}


class Record(transformers.TrainerCallback):
    """Hands the Trainer's numbers to Muster; without Muster it does nothing."""

    def on_log(self, args, state, control, logs, **rest):
        if "loss" in logs:
            muster.log(state.global_step, loss=float(logs["loss"]))


torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=12, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
)
arguments = transformers.TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=3,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    logging_steps=2,
    average_tokens_across_devices=False,  # counts the loss twice for a model that takes a mean
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
model = transformers.BertForSequenceClassification(config)
trainer = transformers.Trainer(model, arguments, train_dataset=Words(), callbacks=[Record()])
trainer.train()
print(f"transformers: rank {arguments.process_index} of {arguments.world_size}")

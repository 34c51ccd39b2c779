"""The Trainer of Transformers on a small model of its own."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        stream = torch.Generator().manual_seed(index)
        inputs = torch.randn(4, generator=stream)
        return {"inputs": inputs, "labels": inputs.sum(0, keepdim=True)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs, labels):
        outputs = self.layer(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


arguments = TrainingArguments(
    output_dir=sys.argv[1], num_train_epochs=2, per_device_train_batch_size=8, use_cpu=True,
    report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=Model(), args=arguments, train_dataset=Data())
trainer.train()
print(f"transformers: rank {arguments.process_index} of {arguments.world_size}")

"""A loop with Accelerate, as in its quick tour; `muster.log` is all that is added."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
angle = 12 * torch.rand(2048, 1)
wave = TensorDataset(angle, angle.sin() + 0.1 * torch.randn(2048, 1))
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(wave, batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = 0
for _ in range(10):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % 4 == 0:
            muster.log(step, loss=loss)

weights = accelerator.gather(accelerator.unwrap_model(model)[0].weight.detach())
assert torch.equal(weights[:64], weights[-64:]), "the ranks have different weights"
print(f"accelerate: rank {accelerator.process_index} of {accelerator.num_processes}")

"""DistributedDataParallel by hand, as in PyTorch's tutorial."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
weights = [torch.zeros(1, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(weights[0], weights[1])
print(f"plain: rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
dist.destroy_process_group()

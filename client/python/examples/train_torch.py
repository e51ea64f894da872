"""A training step whose attention is served, compiled and checkpointed: python train_torch.py 127.0.0.1:7700"""
import sys

import torch
from torch.utils.checkpoint import checkpoint

import ringattn


class Block(torch.nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, seq_len, 3, heads, head_dim]
        return x + self.out(ringattn.flash_attn_qkvpacked_func(qkv, causal=True).flatten(-2))


ringattn.set_default_client(ringattn.connect(sys.argv[1]), deadline=60.0)
torch.manual_seed(0)
blocks = torch.nn.ModuleList(Block() for _ in range(2))
optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
x, target = torch.randn(2, 128, 64), torch.randn(2, 128, 64)
for step in range(3):
    hidden = x
    for block in blocks:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    loss = torch.nn.functional.mse_loss(hidden, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

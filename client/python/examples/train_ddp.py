"""Data parallel training (DDP) of a Hugging Face model: two processes, each a client: python train_ddp.py 127.0.0.1:7700

The processes start by `spawn`, because connections do not survive a fork.
"""
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringattn

RANKS = 2


def make_model() -> torch.nn.Module:
    """The same model in each process."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # not in the process that only starts the ranks

    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=64, initializer_range=0.2)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="ringattn")


def batch() -> torch.Tensor:
    return torch.randint(0, 64, (2 * RANKS, 48), generator=torch.Generator().manual_seed(1))


def train(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Two steps. Returns the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        print(f"loss of {len(tokens)} rows: {loss.item():.4f}", flush=True)
    return [weight.detach() for weight in model.parameters()]


def run_rank(rank: int, address: str, store: str) -> None:
    import ringattn.huggingface

    torch.set_num_threads(1)
    ringattn.set_default_client(ringattn.connect(address))
    ringattn.huggingface.register()
    dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=rank, world_size=RANKS)
    weights = train(DistributedDataParallel(make_model()), batch()[rank::RANKS])  # this rank's rows
    dist.destroy_process_group()
    if rank == 0:
        expected = train(make_model(), batch())  # one process with all rows
        error = max((ours - theirs).abs().max().item() for ours, theirs in zip(weights, expected))
        assert error < 1e-3, error
        print(f"weights of {RANKS} ranks and of one process differ by at most {error:.1e}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(run_rank, (sys.argv[1], store), nprocs=RANKS, start_method="spawn")

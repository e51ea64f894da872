"""The functions of ring_flash_attn with the shapes of its published tests, and options whose effect crosses ranks."""
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

from sharded_cases import Case, check  # noqa: E402

# Tokens and head_dim of the published test of each function.
PUBLISHED = {
    "ring_flash_attn": ((488,), 32), "zigzag_ring_flash_attn": ((496,), 32), "stripe_flash_attn": ((496,), 32),
    "ring_flash_attn_varlen": ((24, 128, 376), 32), "zigzag_ring_flash_attn_varlen": ((16, 144, 368), 32),
    "llama3_flash_attn_varlen": ((24, 128, 376), 8),
}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["", "kvpacked", "qkvpacked"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_forward_and_backward(ranks, name, form, world_size):
    lengths, head_dim = PUBLISHED[name]
    check(Case(name, form, lengths=lengths, heads=5, kv_heads=5, head_dim=head_dim, dtype=torch.bfloat16,
               options={"causal": True, "window_size": (-1, -1), "alibi_slopes": None, "deterministic": False}),
          ranks(world_size))


CAUSAL = {"causal": True}
SLOPES, SLOPES_OF_DOCUMENTS = torch.tensor([0.5, 0.1]), torch.tensor([[0.5, 0.1], [0.2, 0.0], [1.0, 0.3]])
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 11}
DENSE = [{}, CAUSAL | {"window_size": (40, 0)}, {"window_size": (9, 100)}, {"alibi_slopes": SLOPES},
         CAUSAL | {"alibi_slopes": SLOPES}, DROPOUT, CAUSAL | DROPOUT]
VARLEN = [{}, CAUSAL | {"window_size": (13, 0)}, {"window_size": (7, 9)}, {"alibi_slopes": SLOPES_OF_DOCUMENTS},
          CAUSAL | DROPOUT]
LENGTHS = {"ring_flash_attn_varlen": (16, 40, 24), "zigzag_ring_flash_attn_varlen": (16, 40, 24),
           "llama3_flash_attn_varlen": (7, 50, 3)}


@pytest.mark.parametrize("name, options", [
    *((name, options) for name in PUBLISHED if name not in LENGTHS for options in DENSE),
    *((name, options) for name in LENGTHS for options in VARLEN)])
def test_options_across_ranks(ranks, name, options):
    """Windows are wider than a rank's shard, ALiBi counts distances between ranks, dropout has one pattern."""
    check(Case(name, lengths=LENGTHS.get(name, (96,)), options=options, with_dlse=True), ranks(4))


@pytest.mark.parametrize("name", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_empty_documents(ranks, name):
    check(Case(name, lengths=(0, 16, 0, 0, 8, 0), options=CAUSAL), ranks(2))

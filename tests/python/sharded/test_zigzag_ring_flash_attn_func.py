"""ring_flash_attn's test_zigzag_ring_flash_attn_func: out, lse and gradients of zigzag shards."""
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

from sharded_cases import Case, check  # noqa: E402


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["", "kvpacked", "qkvpacked"])
def test_forward_and_backward(ranks, form, world_size):
    check(Case("zigzag_ring_flash_attn", form, lengths=(496,), heads=5, kv_heads=5, head_dim=32, dtype=torch.bfloat16,
               options={"causal": True, "window_size": (-1, -1), "alibi_slopes": None, "deterministic": False}),
          ranks(world_size))


@pytest.mark.parametrize("options", [{"causal": False}, {"window_size": (40, 0), "causal": True},
                                     {"alibi_slopes": torch.tensor([0.5, 0.1]), "causal": True},
                                     {"dropout_p": 0.3, "dropout_seed": 11, "causal": True}])
def test_options_across_ranks(ranks, options):
    check(Case("zigzag_ring_flash_attn", lengths=(96,), options=options, with_dlse=True), ranks(4))

"""ring_flash_attn's test_llama3_flash_attn_varlen_func: packed documents of which each rank has a contiguous piece."""
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

from sharded_cases import Case, arguments_of, call_on_rank, check, function_of  # noqa: E402


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["", "kvpacked", "qkvpacked"])
def test_forward_and_backward(ranks, form, world_size):
    check(Case("llama3_flash_attn_varlen", form, lengths=(24, 128, 376), heads=5, kv_heads=5, head_dim=8,
               dtype=torch.bfloat16,
               options={"causal": True, "window_size": (-1, -1), "alibi_slopes": None, "deterministic": False}),
          ranks(world_size))


@pytest.mark.parametrize("options", [{"causal": False}, {"window_size": (13, 0), "causal": True}, {"window_size": (7, 9)},
                                     {"alibi_slopes": torch.tensor([[0.5, 0.1], [0.2, 0.0], [1.0, 0.3]])},
                                     {"dropout_p": 0.3, "dropout_seed": 11, "causal": True}])
def test_options_across_ranks(ranks, options):
    check(Case("llama3_flash_attn_varlen", lengths=(7, 50, 3), options=options, with_dlse=True), ranks(4))


def with_copied_offsets(rank, world_size, case):
    arguments = arguments_of(case, rank, world_size)
    return call_on_rank(rank, world_size, case, cu_seqlens_q=arguments["cu_seqlens_q"].clone())


@pytest.mark.parametrize("lengths", [(7, 50, 3), (60,), (1,) * 60, (15, 15, 15, 15), (30, 30), (14, 2, 44), (45, 15)])
@pytest.mark.parametrize("causal", [True, False])
def test_copied_offsets(ranks, lengths, causal):
    """A copy of cu_seqlens_q does not have the whole sequence's offsets, so the ranks gather them."""
    case = Case("llama3_flash_attn_varlen", lengths=lengths, options={"causal": causal})
    plain, copied = ranks(4).run(call_on_rank, case), ranks(4).run(with_copied_offsets, case)
    for ours, theirs in zip(plain, copied):
        for first, second in zip(ours, theirs):
            assert abs(first - second).max() < 1e-5


def with_offsets_of_another_rank(rank, world_size, case):
    q = torch.randn(10, 2, 8)
    return function_of(case)(q, q, q, **arguments_of(case, 1 - rank, world_size))


def test_offsets_of_another_rank(ranks):
    case = Case("llama3_flash_attn_varlen", lengths=(7, 13))
    for rank, (_, kind, text) in enumerate(ranks(2).outcomes(with_offsets_of_another_rank, case)):
        assert kind == "InvalidArgumentError"
        assert f"cu_seqlens_q: is of rank {1 - rank} of 2; this is rank {rank} of 2" in text

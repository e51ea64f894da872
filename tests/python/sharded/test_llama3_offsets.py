"""The offsets that ranks pass to the llama3 functions: prepared ones, copies, and wrong ones."""
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

from sharded_cases import Case, arguments_of, call_on_rank, function_of  # noqa: E402


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


def with_other_arguments(rank, world_size, case, changed):
    arguments = arguments_of(case, rank, world_size)
    if changed == "cu_seqlens_q":
        arguments["cu_seqlens_q"][1] = 3
    elif changed == "cu_seqlens_k":
        arguments["cu_seqlens_k"] = arguments["cu_seqlens_k"] + 1
    elif changed == "local_k_slice":
        arguments["local_k_slice"] = slice(5, 6)
    q = torch.randn(10, 2, 8)
    return function_of(case)(q, q, q, causal=changed == "causal", **arguments)


@pytest.mark.parametrize("changed, match", [
    ("causal", "causal: is True; the arguments were prepared with causal=False"),
    ("cu_seqlens_q", "cu_seqlens_q: is [0, 3"), ("cu_seqlens_k", "cu_seqlens_k: is [1, "),
    ("local_k_slice", "local_k_slice: is slice(5, 6, None); llama3_flash_attn_prepare_cu_seqlens returned slice(")])
def test_arguments_that_were_not_prepared(ranks, changed, match):
    case = Case("llama3_flash_attn_varlen", lengths=(7, 5, 8))
    for _, kind, text in ranks(2).outcomes(with_other_arguments, case, changed):
        assert kind == "InvalidArgumentError" and match in text, (kind, text)

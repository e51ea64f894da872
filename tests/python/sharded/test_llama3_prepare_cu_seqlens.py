"""ring_flash_attn's test_llama3_prepare_cu_seqlens: what each rank passes to the llama3 functions."""
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import ringattn  # noqa: E402
from ringattn.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens as prepare  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("offsets", [[0, 7, 14, 16], [0, 16], list(range(17)), [0, 4, 8, 16], [0, 0, 1, 1, 16]])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_pieces(offsets, causal, world_size, dtype):
    """Each rank's queries see the keys of their own documents in `local_k_slice`, with the ends aligned."""
    tokens = offsets[-1] // world_size
    document_of = torch.cat([torch.full((end - begin,), number)
                             for number, (begin, end) in enumerate(zip(offsets, offsets[1:]))])
    for rank in range(world_size):
        cu_q, cu_k, longest_q, longest_k, keys = prepare(torch.tensor(offsets, dtype=dtype), causal, rank, world_size)
        assert cu_q.dtype == cu_k.dtype == dtype and cu_q.shape == cu_k.shape and cu_q[0] == cu_k[0] == 0
        assert longest_q == (cu_q[1:] - cu_q[:-1]).max() and longest_k == (cu_k[1:] - cu_k[:-1]).max()
        assert cu_q[-1] == tokens and cu_k[-1] == keys.stop - keys.start
        of_q = document_of[rank * tokens:(rank + 1) * tokens]
        of_k = document_of[keys]
        for begin, end, first, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
            queries, seen = of_q[begin:end], of_k[first:last]
            if len(queries) == 0:
                continue
            assert len(queries.unique()) == 1 and (seen == queries[0]).all()
            whole = torch.nonzero(document_of == queries[0])[:, 0]
            expected = whole[whole < (rank + 1) * tokens] if causal else whole
            assert len(seen) == len(expected)


def test_compile():
    compiled = torch.compile(prepare, backend="eager")
    offsets = torch.tensor([0, 7, 14, 16])
    for ours, theirs in zip(compiled(offsets, True, 1, 2), prepare(offsets, True, 1, 2)):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("offsets, world_size, rank, match", [
    ([0, 7, 15], 2, 0, "cu_seqlens: ends with 15; must be a positive multiple of the 2 ranks"),
    ([1, 8], 2, 0, "cu_seqlens: must begin with 0"), ([0, 8, 4], 2, 0, "cu_seqlens: .* not decrease"),
    ([0], 2, 0, "cu_seqlens: ends with 0"), ([0, 8], 2, 2, "rank: is 2; must be from 0 to 1"),
])
def test_wrong_arguments(offsets, world_size, rank, match):
    with pytest.raises(ringattn.InvalidArgumentError, match=match):
        prepare(torch.tensor(offsets), True, rank, world_size)

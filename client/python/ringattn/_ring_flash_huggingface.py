"""ring_flash_attn's functions for Hugging Face models: packed documents, a contiguous piece of them on each rank."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ringattn._arguments import whole_number
from ringattn._arrays import integers
from ringattn._errors import invalid
from ringattn._groups import Group, group_of
from ringattn._layouts import contiguous
from ringattn._llama3 import document_offsets
from ringattn._mask import Mask, make_mask
from ringattn._sharded import Shard, sharded_attention
from ringattn.huggingface import _check_keywords

# transformers accepts the first name only where the package flash_attn is installed.
_FLASH, _OURS = "flash_attention_2", "ringattn_shards"


@dataclass(frozen=True)
class _Documents:
    """What `update_ring_flash_attn_params` was called with."""

    offsets: list[int]
    group: Group


_lock = threading.Lock()
_documents: _Documents | None = None


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Sets the documents of the next calls of the model, on every rank.

    Args:
        cu_seqlens: integers [documents + 1], the offsets of the packed documents in the whole sequence. The last must be
            a multiple of the number of ranks.
        process_group: the group that `substitute_hf_flash_attn` got.

    Raises:
        InvalidArgumentError: cu_seqlens decrease, or cannot be shared equally.
    """
    offsets = document_offsets(integers(cu_seqlens, "cu_seqlens"), "cu_seqlens")
    group = group_of(process_group, "process_group")
    if offsets[-1] % group.world_size:
        raise invalid("cu_seqlens", f"ends with {offsets[-1]}; must be a multiple of the {group.world_size} ranks")
    global _documents
    with _lock:
        _documents = _Documents(offsets, group)


def _documents_of(process_group: dist.ProcessGroup | None) -> _Documents:
    with _lock:
        documents = _documents
    if documents is None:
        raise RuntimeError("no documents: call update_ring_flash_attn_params before the model")
    if documents.group is not group_of(process_group, "process_group"):
        raise ValueError("process_group: update_ring_flash_attn_params and substitute_hf_flash_attn got different groups")
    return documents


def _shard_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
                mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None,
                local_size: int | None = None, allow_is_bidirectional_skip: bool = False, config: Any = None,
                dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *,
                process_group: dist.ProcessGroup | None, **_: Any) -> Mask:
    """The function that `AttentionMaskInterface` calls. The mask has the band of a query in its document.

    Raises:
        NotImplementedError: keys are hidden, or the mask function is no band within the documents.
    """
    _check_padding(attention_mask)
    documents = _documents_of(process_group)
    _check_tokens(q_length, kv_length, documents)
    first = documents.group.rank * q_length
    offsets = torch.tensor(documents.offsets, device=device)
    document = torch.searchsorted(offsets, first + torch.arange(q_length, device=device), right=True)
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)

    def seen(rows: Tensor, columns: Tensor) -> Tensor:
        """Whether the mask function lets queries see keys of the same document. They broadcast: [1, 1, rows, columns]."""
        visible = mask_function(zero, zero, rows + q_offset, columns + kv_offset)
        return visible & (document[rows] == document[columns])

    each = torch.arange(q_length, device=device)
    next_is_same = document[1:] == document[:-1]
    if bool(next_is_same.any()):
        is_causal = not bool(seen(each[None, None, None, :-1], each[None, None, None, 1:]).any())
    else:
        is_causal = not allow_is_bidirectional_skip
    # transformers' causal windows count the query itself, the others do not.
    left = -1 if local_size is None else local_size - 1 if is_causal else local_size
    mask = make_mask(batch_size, q_length, kv_length, left=left, right=0 if is_causal else left, dtype=dtype,
                     device=device)
    rows = torch.unique(torch.tensor([0, q_length // 2, q_length - 1], device=device))
    expected = mask.seen(rows)[:1] & (document[rows, None] == document[None])
    if not bool((seen(rows[None, None, :, None], each[None, None, None]) == expected).all()):
        raise NotImplementedError(f"attention_mask: the mask function of {getattr(config, 'model_type', 'the model')} is "
                                  "neither causal nor complete within the documents of update_ring_flash_attn_params, with "
                                  "or without a window")
    return mask


def _check_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and (attention_mask.dim() != 2 or not bool(attention_mask.bool().all())):
        raise NotImplementedError("attention_mask: hides keys; pack the sequences without padding, and pass their offsets "
                                  "to update_ring_flash_attn_params")


def _check_tokens(queries: int, keys: int, documents: _Documents) -> None:
    tokens = documents.offsets[-1] // documents.group.world_size
    if queries != tokens or keys != tokens:
        raise invalid("cu_seqlens", f"gives each rank {tokens} tokens; the model has {queries} queries and {keys} keys")


def _window(name: str, module: torch.nn.Module, attention_mask: Tensor | None, is_causal: bool | None,
            sliding_window: int | None) -> tuple[int, int]:
    """Returns the tokens before and after a query's own that it sees; -1: no limit. The mask decides if there is one.

    Args:
        name: the attention's. Without a mask, transformers' own "flash_attention_2" reads `module.is_causal`.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask.left, attention_mask.right
    _check_padding(attention_mask)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None or (is_causal and name != _FLASH):
            raise NotImplementedError(f"is_causal: {type(module).__name__} has no mask and "
                                      f"{'says that it is causal' if is_causal else 'does not say what a query sees'}")
    # transformers' windows count the query itself.
    left = -1 if sliding_window is None else sliding_window - 1
    return left, 0 if is_causal else left



def substitute_hf_flash_attn(process_group: dist.ProcessGroup | None, heads_k_stride: int) -> None:
    """Makes the service compute transformers' "flash_attention_2" over packed documents that are sharded over the ranks.

    Each rank passes its contiguous piece of `input_ids` and, in `position_ids`, the positions in the documents.
    `update_ring_flash_attn_params` sets the documents. `heads_k_stride` is ignored. Models whose `attn_implementation` is
    "ringattn_shards" do the same, and can be made without the package flash_attn.
    """
    whole_number(heads_k_stride, "heads_k_stride")

    def attention_forward(name: str, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                          attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                          sliding_window: int | None = None, softcap: float | None = None,
                          is_causal: bool | None = None, deterministic: bool | None = None,
                          **kwargs: Any) -> tuple[Tensor, None]:
        """Attention over [batch of 1, heads, tokens of the rank, head_dim]."""
        _check_keywords(module, kwargs)
        documents = _documents_of(process_group)
        if query.shape[0] != 1:
            raise NotImplementedError(f"batch: is {query.shape[0]}; pack the sequences into one row, and pass their offsets "
                                      "to update_ring_flash_attn_params")
        _check_tokens(query.shape[2], key.shape[2], documents)
        left, right = _window(name, module, attention_mask, is_causal, sliding_window)

        def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
            spans = contiguous(group.rank, group.world_size, q.shape[0], "query")
            return Shard(spans, spans, documents.offsets, documents.offsets)

        out, _ = sharded_attention(
            *(tensor.transpose(1, 2)[0] for tensor in (query, key, value)), shard_of=shard_of,
            group=lambda: documents.group, dropout_p=dropout if module.training else 0.0, softmax_scale=scaling,
            causal=right == 0, window_size=(left, right) if left >= 0 else (-1, -1), softcap=0.0 if softcap is None else softcap, alibi_slopes=None,
            deterministic=bool(deterministic), dropout_seed=None)
        return out[None], None

    for name in (_FLASH, _OURS):
        AttentionInterface.register(name, functools.partial(attention_forward, name))
        AttentionMaskInterface.register(name, functools.partial(_shard_mask, process_group=process_group))

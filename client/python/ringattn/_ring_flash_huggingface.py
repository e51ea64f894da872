"""ring_flash_attn's functions for Hugging Face models: packed documents, a contiguous piece of them on each rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from ringattn._arguments import whole_number
from ringattn._arrays import integers
from ringattn._errors import invalid
from ringattn._groups import Group, group_of
from ringattn._layouts import contiguous
from ringattn._llama3 import document_offsets
from ringattn._sharded import Shard, sharded_attention
from ringattn.huggingface import _check_keywords

# transformers accepts the first name only where the package flash_attn is installed.
_IMPLEMENTATIONS = ("flash_attention_2", "ringattn_shards")


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


def _check_query(query: Tensor, key: Tensor, attention_mask: Tensor | None, documents: _Documents) -> None:
    tokens = documents.offsets[-1] // documents.group.world_size
    if query.shape[0] != 1:
        raise NotImplementedError(f"batch: is {query.shape[0]}; pack the sequences into one row, and pass their offsets to "
                                  "update_ring_flash_attn_params")
    if query.shape[2] != tokens or key.shape[2] != tokens:
        raise invalid("cu_seqlens", f"gives each rank {tokens} tokens; the model has {query.shape[2]} queries and "
                                    f"{key.shape[2]} keys")
    if attention_mask is not None and (attention_mask.dim() != 2 or not bool(attention_mask.bool().all())):
        raise NotImplementedError("attention_mask: hides keys; pack the sequences without padding, and pass their offsets "
                                  "to update_ring_flash_attn_params")


def substitute_hf_flash_attn(process_group: dist.ProcessGroup | None, heads_k_stride: int) -> None:
    """Makes the service compute transformers' "flash_attention_2" over packed documents that are sharded over the ranks.

    Each rank passes its contiguous piece of `input_ids` and, in `position_ids`, the positions in the documents.
    `update_ring_flash_attn_params` sets the documents. `heads_k_stride` is ignored. Models whose `attn_implementation` is
    "ringattn_shards" do the same, and can be made without the package flash_attn.
    """
    whole_number(heads_k_stride, "heads_k_stride")

    def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                          attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                          sliding_window: int | None = None, softcap: float | None = None,
                          is_causal: bool | None = None, deterministic: bool | None = None,
                          **kwargs: Any) -> tuple[Tensor, None]:
        """Attention over [batch of 1, heads, tokens of the rank, head_dim]."""
        _check_keywords(module, kwargs)
        documents = _documents_of(process_group)
        _check_query(query, key, attention_mask, documents)
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # transformers' windows count the query itself.
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if is_causal else sliding_window - 1)

        def shard_of(group: Group, q: Tensor, k: Tensor) -> Shard:
            spans = contiguous(group.rank, group.world_size, q.shape[0], "query")
            return Shard(spans, spans, documents.offsets, documents.offsets)

        out, _ = sharded_attention(
            *(tensor.transpose(1, 2)[0] for tensor in (query, key, value)), shard_of=shard_of,
            group=lambda: documents.group, dropout_p=dropout if module.training else 0.0, softmax_scale=scaling,
            causal=is_causal, window_size=window, softcap=0.0 if softcap is None else softcap, alibi_slopes=None,
            deterministic=bool(deterministic), dropout_seed=None)
        return out[None], None

    for name in _IMPLEMENTATIONS:
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, flash_attention_mask)

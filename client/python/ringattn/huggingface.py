"""ringattn as an attention implementation of Hugging Face models.

    ringattn.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringattn")

Registered are the attention and the mask: a name without a mask of its own gets none at all from transformers, and
padding would be attended. What a model asks for is computed exactly (grouped heads, sliding windows, softcap, scaling,
sinks, position biases, dropout, padding on either side, packed sequences, static caches, masks of any form), or refused
with NotImplementedError by name. Calls go to the default client (`ringattn.set_default_client`).

Each call sends all keys and values that it attends to. For decoding, pass a `ringattn.KvCache` as `past_key_values`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ringattn._kv_huggingface import mark_of
from ringattn.torch_ops import attention

NAME = "ringattn"

# Of what models and callers pass on, what changes the result and is not computed here.
_REFUSED = {
    "output_attentions": "probabilities are not returned; use attn_implementation='eager' for them",
    "head_mask": "heads cannot be masked",
    "cache": "paged caches are not served",
}


_warned_of_decoding = False


def _warn_of_decoding(keys: int) -> None:
    """Warns once per process that decoding without a K/V cache sends all keys and values for every token."""
    global _warned_of_decoding
    if _warned_of_decoding or torch.compiler.is_compiling():
        return
    _warned_of_decoding = True
    warnings.warn(f"attention over {keys} keys sends all keys and values for every new token and layer; pass "
                  "past_key_values=ringattn.KvCache(client, model.config) to model.generate to keep them with the "
                  "workers", RuntimeWarning, stacklevel=3)


def _expand_pairs(mask: Tensor, queries: int, keys: int) -> Tensor:
    """[.., queries or 1, keys]: rows that all queries share, once for each; columns of no key left out."""
    return mask[..., :keys].expand(-1, -1, queries, -1)


def _window(module: torch.nn.Module, sliding_window: int | None, causal: bool, keys: int) -> tuple[int, int] | None:
    if sliding_window is not None:
        # A query sees itself and sliding_window - 1 tokens beside it.
        return (sliding_window - 1, 0 if causal else sliding_window - 1)
    config = getattr(module, "config", None)
    layers, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if layers and index is not None and layers[index] == "sliding_attention":
        window = getattr(config, "sliding_window", None)
        if window is not None and keys > window:
            raise NotImplementedError(f"sliding_window: {type(module).__name__} does not pass it on to attention")
    return None


def _packed(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Tensor:
    if query.shape[0] != 1:
        raise NotImplementedError(f"cu_seq_lens_q: with a batch of {query.shape[0]}; packed sequences are one row")
    out, _ = attention(query[0], key[0], value[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    return out[None]


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: Tensor | None = None,
                      position_bias: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls. query, key, value: [batch, heads, tokens, head_dim].

    attention_mask: None where causality and the window say all; [batch, keys] for padding beside them; or all that is
    visible, [batch, 1 or heads, queries, keys], booleans or an additive bias.

    Raises:
        NotImplementedError: naming what is not served. RingattnError: as `ringattn.attention`.
    """
    if (mark := mark_of(key)) is not None:
        return mark.cache.attend(mark, module, query, key, value, attention_mask, dropout, scaling, is_causal,
                                 sliding_window, softcap, s_aux, kwargs | {"position_bias": position_bias}), None
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{name}: {why}")
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and queries < keys and not query.requires_grad:
        _warn_of_decoding(keys)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "dropout_p": dropout,
                               "sinks": None if s_aux is None else s_aux.float()}
    if attention_mask is None or attention_mask.dim() == 2:
        options |= {"causal": causal, "window": _window(module, sliding_window, causal, keys)}
    if position_bias is not None:
        options["bias"] = _expand_pairs(position_bias, queries, keys)
    if attention_mask is None:
        cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        if cu_q is not None and cu_k is not None:
            return _packed(query, key, value, cu_q, cu_k, **options), None
    elif attention_mask.dim() == 2:
        # Padding: a negative segment is seen by nobody.
        ids = torch.where(attention_mask.bool(), 1, -1).to(torch.int32)
        options |= {"q_segment_ids": torch.ones_like(ids[:, :1]).expand(-1, queries), "kv_segment_ids": ids}
    elif attention_mask.dtype == torch.bool:
        options["mask"] = _expand_pairs(attention_mask, queries, keys)
    else:
        bias = _expand_pairs(attention_mask, queries, keys).to(query.dtype)
        options["bias"] = bias + options["bias"] if "bias" in options else bias
    out, _ = attention(query, key, value, **options)
    return out, None


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
                   mask_function: Any = None, attention_mask: Tensor | None = None, local_size: int | None = None,
                   allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
                   config: Any = None, **kwargs: Any) -> Tensor | None:
    """What `AttentionMaskInterface` calls: see `attention_forward` for the three forms that it returns."""
    # Chunks come as a local size like windows, but attention is not told of them.
    is_chunk = getattr(config, "attention_chunk_size", None) is not None
    is_band = local_size is None or not is_chunk or kv_length <= local_size
    last_query_sees_last_key = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    causal_band = allow_is_causal_skip and is_band and last_query_sees_last_key
    everything = allow_is_bidirectional_skip and local_size is None
    if causal_band or everything:
        if attention_mask is None:
            return None
        padding = attention_mask[:, kv_offset:kv_offset + kv_length].bool()
        if padding.shape[1] == kv_length:
            # A traced program cannot depend on what the mask holds.
            if not torch.compiler.is_compiling() and bool(padding.all()):
                return None
            return padding
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, attention_mask=attention_mask, allow_is_causal_skip=False,
                     allow_is_bidirectional_skip=False, **kwargs)


def register() -> None:
    """Makes "ringattn" known to transformers. Idempotent."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)

"""ringattn as an attention implementation of Hugging Face models.

    ringattn.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringattn")

`register` adds an attention function and a mask function to transformers. Results equal those of the model's eager
attention, or NotImplementedError names what is not supported. Calls go to the default client
(`ringattn.set_default_client`).

A mask has the meaning that it has in eager attention: without a mask, every query sees every key. Causal masks are masks
too (`Mask`), so `module.is_causal` is not read. Models that do not use transformers' attention interface get eager
attention's mask.

Each call sends all keys and values that it attends to. For decoding, pass a `ringattn.KvCache` as `past_key_values`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from ringattn._optional import needed_by

with needed_by(__name__):
    import torch
    from torch import Tensor
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from ringattn._kv_huggingface import mark_of
from ringattn._mask import Mask, make_mask
from ringattn.torch_ops import attention

NAME = "ringattn"

# Keywords that models and callers pass on to the attention function and that do not change its result.
_HARMLESS = frozenset({
    "position_ids", "cache_position", "position_embeddings", "max_length_q", "max_length_k", "seq_idx", "use_cache",
    "output_hidden_states", "output_router_logits", "num_items_in_batch", "return_dict", "past_key_values",
    # Arguments of models, which some hand down to every layer.
    "input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "pixel_values", "image_sizes", "image_grid_thw",
    "video_grid_thw", "labels", "shift_labels", "logits_to_keep", "interpolate_pos_encoding",
})
# Keywords that are refused, with the reason. A keyword that is in no list is refused as well.
_REFUSED = {
    "output_attentions": "probabilities are not returned; use attn_implementation='eager' for them",
    "head_mask": "heads cannot be masked",
    "cache": "paged caches are not supported",
    "block_indices": "attention to selected blocks of keys is not supported",
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


def _check_keywords(module: torch.nn.Module, keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        if value is None or name in _HARMLESS or (name == "output_attentions" and not value):
            continue
        why = _REFUSED.get(name, f"{type(module).__name__} passes this keyword, and its meaning is not known")
        raise NotImplementedError(f"{name}: {why}")


def _expand_pairs(tensor: Tensor, name: str, queries: int, keys: int) -> Tensor:
    """A mask or a bias as [batch or 1, heads or 1, queries, keys]."""
    if tensor.dim() > 4:
        raise NotImplementedError(f"{name}: has {tensor.dim()} axes; at most 4 are supported")
    tensor = tensor[(None,) * (4 - tensor.dim())]
    if tensor.shape[-2] not in (1, queries) or tensor.shape[-1] not in (1, keys):
        raise NotImplementedError(f"{name}: has the shape {list(tensor.shape)} for {queries} queries and {keys} keys")
    return tensor.expand(-1, -1, queries, keys)


def _of_documents(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Segment ids [1, tokens] of packed documents; -1 after the last."""
    ids = torch.searchsorted(cu_seqlens.to(torch.int64), torch.arange(tokens, device=cu_seqlens.device), right=True) - 1
    return torch.where(ids < cu_seqlens.shape[0] - 1, ids, -1).to(torch.int32)[None]


class _Terms:
    """What one call has of masks, biases and documents, as options of `ringattn.attention`."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.batch, _, self.queries, _ = query.shape
        self.keys = key.shape[2]
        self.left = self.right = -1
        self.q_ids: Tensor | None = None
        self.kv_ids: Tensor | None = None
        self.mask: Tensor | None = None
        self.bias: Tensor | None = None
        self.cu_seqlens: tuple[Tensor, Tensor] | None = None

    def add_mask(self, mask: Tensor) -> None:
        """A Mask, booleans (true: visible) or an additive mask."""
        if isinstance(mask, Mask) and tuple(mask.shape[2:]) != (self.queries, self.keys):
            mask = mask.seen()  # made for one query, and shared by all
        if isinstance(mask, Mask):
            self.left, self.right = mask.left, mask.right
            if mask.q_ids is not None:
                self.add_ids(mask.q_ids, mask.kv_ids)
            if mask.visible is not None:
                self.add_visible(mask.visible)
        elif mask.dtype == torch.bool:
            if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1 and self.queries > 1:
                # Padding that all queries share: segment ids are the shorter form.
                visible = _expand_pairs(mask, "attention_mask", 1, self.keys)[:, 0, 0]
                kv_ids = torch.where(visible, 0, -1).to(torch.int32)
                self.add_ids(torch.zeros_like(kv_ids[:, :1]).expand(-1, self.queries), kv_ids)
            else:
                self.add_visible(_expand_pairs(mask, "attention_mask", self.queries, self.keys))
        elif mask.is_floating_point():
            self.add_bias(mask, "attention_mask")
        else:
            raise NotImplementedError(f"attention_mask: is of type {mask.dtype}; must be boolean or floating point")

    def add_ids(self, q_ids: Tensor, kv_ids: Tensor) -> None:
        q_ids, kv_ids = q_ids.expand(self.batch, -1), kv_ids.expand(self.batch, -1)
        if self.q_ids is None:
            self.q_ids, self.kv_ids = q_ids, kv_ids
            return
        # Both must agree: one id for each pair of ids.
        count = torch.maximum(q_ids.max(), kv_ids.max()) + 1
        self.q_ids = torch.where((q_ids < 0) | (self.q_ids < 0), -1, self.q_ids * count + q_ids)
        self.kv_ids = torch.where((kv_ids < 0) | (self.kv_ids < 0), -1, self.kv_ids * count + kv_ids)

    def add_visible(self, mask: Tensor) -> None:
        self.mask = mask if self.mask is None else self.mask & mask

    def add_bias(self, bias: Tensor, name: str) -> None:
        bias = _expand_pairs(bias, name, self.queries, self.keys)
        self.bias = bias if self.bias is None else self.bias + bias

    def add_documents(self, cu_q: Tensor, cu_k: Tensor) -> None:
        """Packed documents: as cu_seqlens, or as segments if there is a mask, a bias or segments already."""
        if self.batch != 1:
            raise NotImplementedError(f"cu_seq_lens_q: with a batch of {self.batch}; packed sequences are one row")
        if self.q_ids is None and self.mask is None and self.bias is None:
            self.cu_seqlens = (cu_q, cu_k)
            return
        is_same = cu_q is cu_k or (not torch.compiler.is_compiling() and torch.equal(cu_q, cu_k))
        if not is_same or self.queries != self.keys:
            raise NotImplementedError("cu_seq_lens_q: with an attention mask or a position bias; then cu_seq_lens_k must "
                                      "be the same")
        ids = _of_documents(cu_q, self.queries)
        self.add_ids(ids, ids)

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": self.right == 0}
        if self.left >= 0 or self.right > 0:
            options["window"] = (self.left, self.right)
        if self.q_ids is not None:
            options |= {"q_segment_ids": self.q_ids, "kv_segment_ids": self.kv_ids}
        if self.mask is not None:
            options["mask"] = self.mask
        if self.bias is not None:
            options["bias"] = self.bias if self.bias.dtype in (dtype, torch.float32) else self.bias.float()
        return options


def _selected(indices: Tensor, queries: int, keys: int) -> Tensor:
    """The mask of a sparse attention's selected keys: `indices` [batch, queries, selected]."""
    if indices.dim() != 3 or indices.shape[1] != queries:
        raise NotImplementedError(f"indices: has the shape {list(indices.shape)}; must be [batch, {queries}, selected]")
    seen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    return seen.scatter(-1, indices.long(), True)[:, None]


def _sinks(sinks: Tensor | None, name: str, heads: int, queries: int) -> tuple[Tensor | None, Tensor | None]:
    """(one logit for each head, one for each head and query), one of them None."""
    if sinks is None:
        return None, None
    if sinks.numel() == heads:
        return sinks.reshape(heads), None
    if sinks.dim() == 4 and tuple(sinks.shape[1:]) == (heads, queries, 1):
        return None, sinks[..., 0]
    raise NotImplementedError(f"{name}: has the shape {list(sinks.shape)}; must be [{heads}] or "
                              f"[batch, {heads}, {queries}, 1]")


def _attend_in_cache(mark: Any, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                     attention_mask: Tensor | None, **options: Any) -> Tensor:
    """Attention over the K/V cache that has the key. It takes no mask, or padding [batch, keys], for a causal mask."""
    is_causal = attention_mask is not None
    if isinstance(attention_mask, Mask) and attention_mask.visible is None:
        is_causal = attention_mask.right == 0
        # The mask has the window that applies, whether or not the module passes it.
        options["sliding_window"] = None if attention_mask.left < 0 else attention_mask.left + 1
        if attention_mask.q_ids is None:
            attention_mask = None
        elif bool((attention_mask.q_ids == 0).all()):
            attention_mask = attention_mask.kv_ids >= 0
    kept = {name: options.pop(name) for name in ("dropout", "scaling", "sliding_window", "softcap", "s_aux")}
    return mark.cache.attend(mark, module, query, key, value, attention_mask, kept["dropout"], kept["scaling"], is_causal,
                             kept["sliding_window"], kept["softcap"], kept["s_aux"], options)


def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: Tensor | None = None, sinks: Tensor | None = None,
                      position_bias: Tensor | None = None, indices: Tensor | None = None,
                      cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
                      deterministic: bool | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """The function that `AttentionInterface` calls. query, key, value: [batch, heads, tokens, head_dim].

    Args:
        attention_mask: None: everything is visible, unless `is_causal` is True. A `Mask`; or booleans or an
            additive bias that broadcast to [batch, heads, queries, keys].
        sliding_window: is part of the mask. Without a mask, a window that hides a key is refused.
        s_aux, sinks: a logit for each head, or for each head and query [batch, heads, queries, 1], without a value.
        indices: [batch, queries, selected], the keys that a query sees in addition to the mask's condition.
        cu_seq_lens_q, cu_seq_lens_k: packed documents; a query sees keys of its own only.

    Raises:
        NotImplementedError: names what is not supported. RingattnError: as `ringattn.attention`.
    """
    _check_keywords(module, kwargs)
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        given, missing = ("q", "k") if cu_seq_lens_k is None else ("k", "q")
        raise NotImplementedError(f"cu_seq_lens_{missing}: is missing next to cu_seq_lens_{given}; pass both")
    if (mark := mark_of(key)) is not None:
        if indices is not None:
            raise NotImplementedError("indices: sparse attention is not supported with a K/V cache")
        of_heads, of_queries = _sinks(sinks if s_aux is None else s_aux, "sinks", query.shape[1], query.shape[2])
        if of_queries is not None:
            raise NotImplementedError("sinks: of each query are not supported with a K/V cache")
        return _attend_in_cache(mark, module, query, key, value, attention_mask,
                                dropout=dropout if module.training else 0.0, scaling=scaling,
                                sliding_window=sliding_window, softcap=softcap, s_aux=of_heads,
                                position_bias=position_bias, cu_seq_lens_q=cu_seq_lens_q), None
    if query.shape[0] != key.shape[0]:  # one set of learned queries for a batch
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (query, key, value))
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    if queries < keys and not query.requires_grad and isinstance(attention_mask, Mask) and attention_mask.right == 0:
        _warn_of_decoding(keys)
    terms = _Terms(query, key)
    if attention_mask is not None:
        terms.add_mask(attention_mask)
    elif is_causal and queries > 1:
        if queries != keys:
            raise NotImplementedError(f"is_causal: without a mask, with {queries} queries and {keys} keys")
        terms.right = 0
    if attention_mask is None and sliding_window is not None and keys > sliding_window:
        raise NotImplementedError(f"sliding_window: {type(module).__name__} passes it without a mask")
    if position_bias is not None:
        terms.add_bias(position_bias, "position_bias")
    if indices is not None:
        terms.add_visible(_selected(indices, queries, keys))
    if cu_seq_lens_q is not None:
        terms.add_documents(cu_seq_lens_q, cu_seq_lens_k)
    if s_aux is not None and sinks is not None:
        raise NotImplementedError("sinks: in addition to s_aux")
    of_heads, of_queries = _sinks(sinks if s_aux is None else s_aux, "sinks" if s_aux is None else "s_aux", heads,
                                  queries)
    options = {"softmax_scale": scaling, "softcap": softcap, "dropout_p": dropout if module.training else 0.0,
               "sinks": of_heads, "deterministic": bool(deterministic), **terms.options(query.dtype)}
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if terms.cu_seqlens is not None:
        cu_q, cu_k = terms.cu_seqlens
        out, lse = attention(query[0], key[0], value[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
        out, lse = out[None], lse[None]
    else:
        out, lse = attention(query, key, value, **options)
    if of_queries is not None:
        # A sink takes its share of the softmax: exp(lse) / (exp(lse) + exp(sink)) is left for the keys.
        left = torch.sigmoid(lse - of_queries.float()).transpose(1, 2)[..., None]
        out = (out.float() * left).to(out.dtype)
    return out, None


def _chunk_ids(attention_mask: Tensor | None, batch: int, offset: int, length: int, chunk: int,
               device: Any) -> Tensor:
    """The chunk of each position from `offset` on, counted from a row's first token; negative before it."""
    positions = torch.arange(offset, offset + length, device=device)[None]
    if attention_mask is None:
        start = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    else:
        start = (attention_mask.bool().cumsum(-1) == 0).sum(-1, keepdim=True)
    return torch.div(positions - start, chunk, rounding_mode="floor").to(torch.int32)


def _agrees(mask: Mask, mask_function: Any, q_offset: int, kv_offset: int, padding: Tensor | None) -> bool:
    """Whether transformers' mask function selects the same keys for the first, the middle and the last query."""
    batch, _, queries, keys = mask.shape
    device = mask.device
    rows = torch.tensor(sorted({0, queries // 2, queries - 1}), device=device)
    expected = mask_function(torch.arange(batch, device=device)[:, None, None, None],
                             torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device),
                             rows[None, None, :, None] + q_offset,
                             torch.arange(keys, device=device)[None, None, None, :] + kv_offset)
    if padding is not None:
        expected = expected & padding[:, None, None, :]
    return bool((mask.seen(rows) == expected).all())


def _band(batch: int, queries: int, keys: int, q_offset: int, kv_offset: int, mask_function: Any,
          attention_mask: Tensor | None, local_size: int | None, is_causal: bool, config: Any, dtype: torch.dtype,
          device: Any) -> Mask | None:
    """Returns the mask of a mask function as a band and segment ids, or None if these cannot express it."""
    padding = None
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, keys, kv_offset)[:, kv_offset:kv_offset + keys].bool()
        # A traced program cannot depend on what the mask holds.
        if not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk == local_size:
        kv_ids = _chunk_ids(attention_mask, batch, kv_offset, keys, chunk, device)
        q_ids = _chunk_ids(attention_mask, batch, q_offset, queries, chunk, device)
        window, local_size = -1, None
    else:
        window, q_ids, kv_ids = -1, None, None
    if local_size is not None:
        # transformers' causal windows count the query itself, the others do not.
        window = local_size - 1 if is_causal else local_size
    if padding is not None:
        if q_ids is None:
            kv_ids = torch.zeros_like(padding, dtype=torch.int32)
            q_ids = torch.zeros_like(kv_ids[:, :1]).expand(-1, queries)
        kv_ids = torch.where(padding, kv_ids, -1)
    mask = make_mask(batch, queries, keys, left=window, right=0 if is_causal else window, q_ids=q_ids, kv_ids=kv_ids,
                     dtype=dtype, device=device)
    # transformers' own function means what the band says; the check takes a dozen launches on a GPU.
    is_plain = mask_function is causal_mask_function and is_causal and window < 0 and chunk is None
    if torch.compiler.is_compiling() or is_plain or _agrees(mask, mask_function, q_offset, kv_offset, padding):
        return mask
    return None


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
                   mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None,
                   local_size: int | None = None, allow_is_causal_skip: bool = True,
                   allow_is_bidirectional_skip: bool = False, config: Any = None,
                   dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **kwargs: Any) -> Mask:
    """The function that `AttentionMaskInterface` calls.

    It never returns None. transformers passes `allow_is_causal_skip` for a causal mask, a causal window and causal
    chunks, and `allow_is_bidirectional_skip` for a mask of padding alone and for a window.
    """
    last_query_is_at_last_key = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if ((allow_is_causal_skip or allow_is_bidirectional_skip) and (last_query_is_at_last_key or (
            allow_is_bidirectional_skip and local_size is None))
            and (attention_mask is None or attention_mask.dim() == 2)):
        mask = _band(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                     allow_is_causal_skip, config, dtype, device)
        if mask is not None:
            return mask
    visible = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                        kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device, **kwargs)
    return make_mask(batch_size, q_length, kv_length, visible=visible, dtype=dtype, device=device)


def _refuse_tables_of(model: PreTrainedModel) -> None:
    """Makes the tables of attention classes that the model may use refuse this attention by name.

    Some families choose among classes by `X_ATTENTION_CLASSES[attn_implementation]` instead of calling the attention
    interface. Another name is a KeyError there.
    """
    modules = {kind.__module__ for kind in type(model).__mro__} & sys.modules.keys()
    for module in modules:
        for name, table in list(vars(sys.modules[module]).items()):
            if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and NAME not in table:
                table[NAME] = _refusal(name, sorted(table))


def _refusal(table: str, served: list[str]) -> Callable[..., NoReturn]:
    def refuse(config: Any, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"attn_implementation: {NAME!r} is not supported by {config.model_type}, whose attention "
                                  f"transformers selects from {table}; use one of {', '.join(served)}")

    return refuse


def register() -> None:
    """Makes "ringattn" known to transformers. Idempotent.

    Making a model of a family that does not accept other attention raises NotImplementedError.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    check = PreTrainedModel.get_correct_attn_implementation
    if getattr(check, "refuses_tables", False):
        return

    @functools.wraps(check)
    def checked(model: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            _refuse_tables_of(model)
        return check(model, requested_attention, *args, **kwargs)

    checked.refuses_tables = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked

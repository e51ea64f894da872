"""A transformers `Cache` whose keys and values stay with the workers.

    ringattn.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringattn")
    with ringattn.KvCache(client, model.config) as cache:
        model.generate(ids, past_key_values=cache, max_new_tokens=100)

`update` marks the key that it returns, and the attention function "ringattn" appends and attends in one call. The batch
rows are sequences of the cache. Padding is never sent, so masks are not needed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ringattn._kv_cache import DEFAULT_BLOCK_TOKENS, LayerGroup, WorkerCache
from ringattn._kv_passes import Passes, PassRow
from ringattn._torch_arguments import autocast, refuse_derivatives

if TYPE_CHECKING:
    from ringattn._client import Client

_MARK = "_ringattn_kv"
_NAME = "ringattn"

_REFUSED = {
    "output_attentions": "probabilities are not returned; use attn_implementation='eager' for them",
    "head_mask": "heads cannot be masked",
    "position_bias": "biases are not served with a K/V cache",
    "cu_seq_lens_q": "packed sequences are not served with a K/V cache",
    "cache": "paged caches of transformers are not served",
}


@dataclasses.dataclass
class _Mark:
    """Travels as an attribute of a key, from the cache to the attention function."""

    cache: "KvCache"
    layer: int
    is_appended: bool = False


@dataclasses.dataclass
class _BatchRow:
    """One row of the batch: a sequence, and how many of the model's leading tokens are padding."""

    sequence: int
    padding: int = 0

    def entries(self, tokens: int) -> int:
        return max(0, tokens - self.padding)


def mark_of(key: Tensor) -> _Mark | None:
    """The mark of a key that `KvCache.update` has returned; None for other keys."""
    return getattr(key, _MARK, None)


class _Layer(CacheLayerMixin):
    """One layer as transformers sees it. Holds nothing but its length in tokens, padding included."""

    is_croppable = True
    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: "KvCache", layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer
        self.tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._cache._check_update(self._layer, key_states, value_states)
        self.tokens += key_states.shape[2]
        key_states = key_states.view(key_states.shape)  # an attribute of a tensor of ours
        setattr(key_states, _MARK, _Mark(self._cache, self._layer))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    # The cache does these for all layers at once.
    def reset(self) -> None:
        self._cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("crop: call KvCache.crop, which crops all layers")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("reorder_cache: call KvCache.reorder_cache, which reorders all layers")


class KvCache(Cache):
    """Keys and values of a model's batch on workers. Not thread safe.

    Greedy decoding, sampling, beams, several returned sequences, prompt-lookup and assisted drafts work as with
    transformers' own caches. NotImplementedError names what does not: torch.compile, gradients, masks other than left
    padding, chunked attention.

    Args:
        client: made by `ringattn.connect`.
        config: the model's. Its attention implementation must be "ringattn".
        tokens: entries of all batch rows together. None: `max_position_embeddings` for each row of the first batch.
            `generate` raises StepRefusedError (KV_FULL) when they are used up.
        block_tokens: entries of a block.
        ttl, world_size, members, divide_blocks, label, transport: as of `Client.create_cache`.
    """

    def __init__(self, client: "Client", config: Any, *, tokens: int | None = None,
                 block_tokens: int = DEFAULT_BLOCK_TOKENS, ttl: float | None = None, world_size: int | None = None,
                 members: tuple[str, ...] = (), divide_blocks: bool | None = None, label: str = "",
                 transport: str = "auto") -> None:
        self._client = client
        self._config = config.get_text_config(decoder=True)
        self._check_implementation()
        super().__init__(layers=[_Layer(self, layer) for layer in range(self._config.num_hidden_layers)])
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._options: dict[str, Any] = {"ttl": ttl, "world_size": world_size, "members": members,
                                         "divide_blocks": divide_blocks, "label": label, "transport": transport}
        self._cache: WorkerCache | None = None
        self._passes: Passes | None = None
        self._is_closed = False
        self._batch: list[_BatchRow] = []
        self._next_sequence = 0
        self._forks: list[tuple[int, int, int]] = []
        self._drops: list[int] = []
        self._valid: Tensor | None = None  # [batch, tokens] of the current pass; None: no padding in it
        self._unattended: int | None = None  # layer whose update was not followed by attention

    def __enter__(self) -> "KvCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> "KvCache":
        raise NotImplementedError("copy.deepcopy: a K/V cache on workers cannot be copied; use batch_repeat_interleave")

    def close(self) -> None:
        """Frees the workers' memory. Idempotent."""
        self._is_closed = True
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.__exit__()  # deletes it, except in a child of fork()

    @property
    def worker_cache(self) -> WorkerCache | None:
        """The cache on the workers; None before the first forward pass."""
        return self._cache

    # ------------------------------------------------------------------ transformers' operations

    def reset(self) -> None:
        """Forgets all sequences; the workers' memory stays reserved."""
        self._drops += [row.sequence for row in self._batch]
        self._batch, self._valid, self._unattended = [], None, None
        if self._passes is not None:
            self._passes.forget()
        for layer in self.layers:
            layer.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every row."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; must be 0 or negative")
        for layer in self.layers:
            layer.tokens = max(0, layer.tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._batch)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self._batch), device="cpu")[indices.cpu()]  # indices, or a mask
        self._select(rows.tolist())

    def _select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] is. The commands travel with the next step."""
        tokens = self._settled_tokens()
        taken: set[int] = set()
        batch = []
        for row in rows:
            old = self._batch[row]
            if row not in taken:  # one row goes on with the sequence itself
                taken.add(row)
                batch.append(dataclasses.replace(old))
                continue
            new = _BatchRow(self._next_sequence, old.padding)
            self._next_sequence += 1
            if length := old.entries(tokens):
                self._forks.append((old.sequence, new.sequence, length))
            batch.append(new)
        for row, old in enumerate(self._batch):
            if row not in taken:
                self._drops.append(old.sequence)
        self._batch = batch

    # ------------------------------------------------------------------ updates

    def _check_implementation(self) -> None:
        implementation = self._config._attn_implementation
        if implementation != _NAME:
            raise ValueError(f"attn_implementation is {implementation!r}; call ringattn.huggingface.register() and load "
                             f"the model with attn_implementation={_NAME!r}, or model.set_attn_implementation({_NAME!r})")

    def _check_update(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self._is_closed:
            raise RuntimeError("the cache is closed")
        if torch.compiler.is_compiling():
            raise NotImplementedError("torch.compile: models with a ringattn.KvCache run in eager mode")
        self._check_implementation()
        if self._unattended is not None:
            raise RuntimeError(f"layer {self._unattended} was updated, but its attention did not go through ringattn")
        refuse_derivatives(key=key, value=value)
        if not self._batch:
            self._batch = [_BatchRow(self._next_sequence + row) for row in range(key.shape[0])]
            self._next_sequence += len(self._batch)
        if key.shape[0] != len(self._batch):
            raise ValueError(f"the batch has {key.shape[0]} rows; the cache has {len(self._batch)}. Use another KvCache, "
                             "or reset() this one")
        self._unattended = layer

    def _settled_tokens(self) -> int:
        """The length of all layers between two forward passes."""
        lengths = {layer.tokens for layer in self.layers}
        if len(lengths) > 1:
            raise RuntimeError(f"layers have different lengths, {sorted(lengths)}: a forward pass has left out layers")
        return lengths.pop()

    # ------------------------------------------------------------------ attention

    def attend(self, mark: _Mark, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
               attention_mask: Tensor | None, dropout: float, scaling: float | None, is_causal: bool | None,
               sliding_window: int | None, softcap: float | None, sinks: Tensor | None,
               kwargs: dict[str, Any]) -> Tensor:
        """Appends the marked key and value, and attends. query, key, value: [batch, heads, tokens, head_dim].

        Returns out [batch, tokens, heads, head_dim_v].
        """
        self._unattended = None
        numbers = {"scaling": scaling, "softcap": softcap}
        refuse_derivatives(query=query, sinks=sinks,
                           **{name: value for name, value in numbers.items() if isinstance(value, Tensor)})
        query, key, value = autocast(query, key, value)
        for name, why in _REFUSED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise NotImplementedError(f"{name}: {why}")
        if dropout:
            raise NotImplementedError("dropout: K/V caches are for inference; call model.eval()")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        tokens = query.shape[2]
        if tokens > 1 and not causal:
            raise NotImplementedError("is_causal: K/V caches of models without causal attention are not served")
        if key.shape[2] != tokens and not mark.is_appended:
            raise NotImplementedError(f"query: has {tokens} tokens and key has {key.shape[2]}; they must be equal")
        scale = 1 / math.sqrt(query.shape[3]) if scaling is None else float(scaling)
        if self._cache is None:
            self._open(query, key, value, scale, softcap)
        self._check_layer(mark.layer, query, key, value, scale, softcap, sliding_window)
        step = self._step(mark.layer, tokens, attention_mask)
        return self._call(step, mark, query, key, value, sinks)

    def _call(self, step: Any, mark: _Mark, query: Tensor, key: Tensor, value: Tensor,
              sinks: Tensor | None) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        batch, tokens, heads = q.shape[:3]
        if step is None:  # padding only
            return q.new_zeros(batch, tokens, heads, v.shape[3])
        valid = self._valid
        rows = (lambda x: x.flatten(0, 1)) if valid is None else (lambda x: x[valid])
        new = (None, None) if mark.is_appended else (rows(k), rows(v))
        try:
            if sinks is None:
                out = step.attend(mark.layer, rows(q), *new)
            else:
                out, lse = step.attend(mark.layer, rows(q), *new, partial=True)
                # The sink joins the softmax as a logit without a value.
                weight = torch.sigmoid(lse - sinks.float().to(lse.device)[:, None])
                out = (out * weight.T[..., None]).to(q.dtype)
        except BaseException:
            self._passes.forget()
            raise
        self._passes.called(mark.layer)
        mark.is_appended = True
        if valid is None:
            return out.view(batch, tokens, *out.shape[1:])
        whole = out.new_zeros(batch, tokens, *out.shape[1:])
        whole[valid] = out
        return whole

    def _step(self, layer: int, tokens: int, mask: Tensor | None) -> Any:
        """The step of this pass; None if all its tokens are padding."""
        past = self.layers[layer].tokens - tokens
        if self._begins_pass(layer):
            others = {other.tokens for other in self.layers} - {past + tokens}
            if others - {past}:
                raise RuntimeError(f"layers have different lengths, {sorted(others)}: a forward pass has left out layers")
            self._valid = self._padding_of(tokens, past, mask)
        rows = []
        for row in self._batch:
            before, after = row.entries(past), row.entries(past + tokens)
            if after > before:
                rows.append(PassRow(row.sequence, before, after - before, after - before))
        if not rows:
            return None
        return self._passes.step_of(layer, rows, self._take_commands)

    def _begins_pass(self, layer: int) -> bool:
        past_or_now = [other.tokens for index, other in enumerate(self.layers) if index != layer]
        return all(tokens != self.layers[layer].tokens for tokens in past_or_now) or len(self.layers) == 1

    def _take_commands(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        known = self._cache.sequences
        forks, drops = self._forks, self._drops
        self._forks, self._drops = [], []
        made = {target for _, target, _ in forks}
        return forks, [sequence for sequence in drops if sequence in known or sequence in made]

    def _padding_of(self, tokens: int, past: int, mask: Tensor | None) -> Tensor | None:
        """Takes the padding of new tokens into account. Returns which are none, [batch, tokens]; None if all are."""
        if mask is None:
            if any(row.padding for row in self._batch):
                raise ValueError("attention_mask: is missing, and earlier calls had padding")
            return None
        if mask.dim() != 2:
            raise NotImplementedError("attention_mask: with a K/V cache only causal attention with left padding is "
                                      f"served; the mask has the shape {list(mask.shape)}")
        if mask.shape != (len(self._batch), past + tokens):
            raise ValueError(f"attention_mask: has the shape {list(mask.shape)}; must be "
                             f"{[len(self._batch), past + tokens]}")
        mask = mask.bool().cpu()
        for row, own in zip(self._batch, mask):
            padding = int((~own).sum())
            if bool(own[:padding].any()):
                raise NotImplementedError("attention_mask: only padding on the left is served with a K/V cache")
            is_consistent = padding == row.padding if row.padding < past else padding >= past
            if not is_consistent:
                raise ValueError("attention_mask: masks tokens that are in the cache")
            row.padding = padding
        valid = mask[:, past:]
        return None if bool(valid.all()) else valid

    # ------------------------------------------------------------------ creation

    def _open(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> None:
        """Creates the cache with the shapes of the first attention call; other layers differ in their windows only."""
        by_window: dict[int | None, list[int]] = {}
        for layer in range(len(self.layers)):
            by_window.setdefault(self._window_of(layer), []).append(layer)
        groups = [LayerGroup(layers, heads=query.shape[1], kv_heads=key.shape[1], head_dim=query.shape[3],
                             head_dim_v=value.shape[3], softmax_scale=scale, softcap=softcap, window=window)
                  for window, layers in by_window.items()]
        if self._tokens is None:
            per_row = math.ceil(self._config.max_position_embeddings / self._block_tokens)
            each = per_row * len(self._batch)
        else:
            each = math.ceil(self._tokens / self._block_tokens)
        # A reordered beam needs a block for its next entries before the old one is free.
        blocks = len(groups) * (each + 2 * len(self._batch))
        self._cache = self._client.create_cache(groups=groups, dtype=str(query.dtype).removeprefix("torch."),
                                                blocks=blocks, block_tokens=self._block_tokens, **self._options)
        self._passes = Passes(self._cache)

    def _window_of(self, layer: int) -> int | None:
        types = getattr(self._config, "layer_types", None)
        window = getattr(self._config, "sliding_window", None)
        kind = types[layer] if types else "full_attention" if window is None else "sliding_attention"
        if kind == "full_attention":
            return None
        if kind != "sliding_attention" or window is None:
            raise NotImplementedError(f"layer_types: {kind!r} of layer {layer} is not served with a K/V cache")
        return window - 1

    def _check_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float,
                     softcap: float | None, sliding_window: int | None) -> None:
        group = self._cache.group_of(layer)
        shape = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        served = (group["num_heads"], group["num_kv_heads"], group["head_dim"], group["head_dim_v"])
        if shape != served:
            raise NotImplementedError(f"layer {layer} has heads, kv_heads and head dims {shape}; the first layer has "
                                      f"{served}. Layers of different shapes are not served")
        if not math.isclose(scale, group["softmax_scale"], rel_tol=1e-6):
            raise NotImplementedError(f"scaling: layer {layer} has {scale}; the first layer has "
                                      f"{group['softmax_scale']}")
        if not math.isclose(softcap or 0.0, group.get("softcap", 0.0), rel_tol=1e-6):
            raise NotImplementedError(f"softcap: layer {layer} has {softcap}; the first layer has "
                                      f"{group.get('softcap', 0.0)}")
        window = None if sliding_window is None else sliding_window - 1
        if window != group.get("window_left"):
            raise NotImplementedError(f"sliding_window: layer {layer} has {sliding_window}, which contradicts the config")

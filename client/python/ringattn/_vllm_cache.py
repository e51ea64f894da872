"""The K/V cache of one vLLM model: made from its attention layers, and written by its forward passes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationMode, VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec

from ringattn._default import default_client
from ringattn._errors import RingattnError
from ringattn._kv_cache import LayerGroup, Row, Step, WorkerCache
from ringattn._vllm_tables import KnownTables

OPTIONS_NAME = "ringattn"  #: of vLLM's additional_config
_OPTIONS = ("transport", "world_size", "members", "ttl", "label")
_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclasses.dataclass
class GroupBatch:
    """The view of a forward pass by one KV-cache group. The metadata builder creates it."""

    cache: "EngineCache"
    group: int
    query_start: np.ndarray  #: [requests + 1]
    lengths: np.ndarray  #: [requests], entries after this pass
    tables: np.ndarray  #: [requests, blocks]
    slots: np.ndarray  #: [tokens], where vLLM places the new entries


def cache_options(config: VllmConfig) -> dict[str, Any]:
    """The options of `Client.create_cache` in vLLM's additional_config={"ringattn": {...}}."""
    given = config.additional_config
    options = dict(given.get(OPTIONS_NAME, {})) if isinstance(given, dict) else {}
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ValueError(f"additional_config[{OPTIONS_NAME!r}] has {', '.join(unknown)}; known are "
                         f"{', '.join(_OPTIONS)}")
    model = os.path.basename(os.path.normpath(config.model_config.model))
    options.setdefault("label", "vllm " + "".join(c if " " <= c <= "~" else "?" for c in model)[:100])
    return options


def check_config(config: VllmConfig) -> None:
    """Raises NotImplementedError or ValueError naming an option of vLLM that is not served."""
    parallel, speculative = config.parallel_config, config.speculative_config
    refused = [
        ("enforce_eager", config.compilation_config.mode != CompilationMode.NONE,
         "compiled models are not served; pass enforce_eager=True"),
        ("VLLM_USE_V2_MODEL_RUNNER", config.use_v2_model_runner,
         "the second model runner is not served; set VLLM_USE_V2_MODEL_RUNNER=0"),
        ("tensor_parallel_size", parallel.tensor_parallel_size > 1, "use one rank; the cache's workers divide the heads"),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1, "use one rank"),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size > 1, "use one rank"),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size > 1, "use one rank"),
        ("enable_dbo", parallel.use_ubatching, "overlapping micro-batches are not served"),
        ("kv_transfer_config", config.kv_transfer_config is not None, "connectors cannot read the workers' K/V"),
        ("speculative_config", speculative is not None and speculative.method != "ngram",
         "the only method that is served is ngram"),
    ]
    for name, is_set, why in refused:
        if is_set:
            raise NotImplementedError(f"{name}: {why}")
    if config.cache_config.num_gpu_blocks_override is None:
        raise ValueError("num_gpu_blocks_override is missing; it is the number of blocks that the workers reserve, of "
                         f"{config.cache_config.block_size} tokens each (block_size). Groups of layers share them")
    cache_options(config)


def _check_layer(name: str, layer: AttentionLayerBase) -> None:
    if type(layer) is not Attention:
        raise NotImplementedError(f"{type(layer).__name__}: the layer {name} is not served")
    if layer.use_mm_prefix:
        raise NotImplementedError(f"mm_prefix: the layer {name} attends in both directions")


class EngineCache:
    """The cache of the model of one VllmConfig, and its only writer.

    The metadata builders add their groups of layers; with the last one the cache is created. vLLM's block manager owns
    the block numbers. A request's sequence number is its row in the batch. Another request may take the row later; its
    block table then replaces the earlier one.
    """

    def __init__(self, config: VllmConfig) -> None:
        check_config(config)
        self._config = config
        self._layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        for name, layer in self._layers.items():
            _check_layer(name, layer)
        self._numbers = {name: number for number, name in enumerate(self._layers)}
        self._groups: list[tuple[Sequence[str], LayerGroup]] = []
        self._block_size = 0
        self._cache: WorkerCache | None = None
        self._tables = KnownTables()
        self._pass: Mapping[str, GroupBatch] | None = None  # vLLM's metadata of the current forward pass
        self._step: Step | None = None

    @staticmethod
    def of(config: VllmConfig) -> "EngineCache":
        """The one that the model's builders share, until it is complete."""
        impl = next(iter(get_layers_from_vllm_config(config, Attention).values())).impl
        cache = getattr(impl, "ringattn_cache", None)
        if cache is None or cache.worker_cache is not None:
            impl.ringattn_cache = cache = EngineCache(config)
        return cache

    @property
    def worker_cache(self) -> WorkerCache | None:
        """None until all layers have been added."""
        return self._cache

    # ------------------------------------------------------------------ creation

    def add_group(self, spec: AttentionSpec, names: Sequence[str]) -> int:
        """Adds layers that share a block table. Returns the group's number."""
        if spec.block_size not in _BLOCK_SIZES:
            raise ValueError(f"block_size is {spec.block_size}; use {', '.join(map(str, _BLOCK_SIZES))}")
        if spec.block_size != (self._block_size or spec.block_size):
            raise NotImplementedError(f"block_size: groups of layers have {self._block_size} and {spec.block_size}")
        if spec.dtype != self._config.model_config.dtype:
            raise NotImplementedError(f"kv_cache_dtype: is {spec.dtype}; must be the model's, "
                                      f"{self._config.model_config.dtype}")
        self._block_size = spec.block_size
        groups = {self._layer_group(name) for name in names}
        if len(groups) > 1:
            raise NotImplementedError("sliding_window: layers of one group of K/V caches differ in heads, window, softcap "
                                      f"or scale: {', '.join(names)}. Do not disable the hybrid KV cache manager")
        self._groups.append((tuple(names), dataclasses.replace(
            groups.pop(), layers=tuple(self._numbers[name] for name in names))))
        if {name for added, _ in self._groups for name in added} == self._layers.keys():
            self._create()
        return len(self._groups) - 1

    def _layer_group(self, name: str) -> LayerGroup:
        layer = self._layers[name]
        window = layer.impl.sliding_window
        return LayerGroup((), layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v,
                          layer.impl.scale, layer.impl.logits_soft_cap,
                          None if window is None else window - 1)  # vLLM counts the query's own entry

    def _create(self) -> None:
        options = cache_options(self._config)
        self._cache = default_client().create_cache(
            groups=[group for _, group in self._groups], dtype=str(self._config.model_config.dtype).split(".")[-1],
            blocks=self._config.cache_config.num_gpu_blocks, block_tokens=self._block_size, numbering="blocks",
            divide_blocks=True, **options)  # a block of the cache is one of vLLM's, with any number of position parts
        # Frees the memory with the model, or at exit. Without it, the cache ends with its lease.
        weakref.finalize(self, _delete, self._cache)

    # ------------------------------------------------------------------ forward passes

    def attend(self, layer: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               output: torch.Tensor) -> None:
        """Appends a layer's key and value, attends, and writes output. All are [tokens, heads, dim]."""
        step = self._current_step()
        tokens = step.q_tokens  # vLLM may pad the batch
        try:
            output[:tokens] = step.attend(self._numbers[layer], query[:tokens], key[:tokens], value[:tokens])
        except BaseException:
            self._pass = self._step = None
            self._tables.forget()
            raise
        output[tokens:] = 0

    def _current_step(self) -> Step:
        """The step of the forward pass that is running; its first layer begins it."""
        batches = get_forward_context().attn_metadata
        if not isinstance(batches, dict):
            raise NotImplementedError("enable_dbo: overlapping micro-batches are not served")
        if batches is not self._pass:
            self._step = self._cache.step(self._rows([batches[names[0]] for names, _ in self._groups]))
            self._pass = batches
        return self._step

    def _rows(self, batches: Sequence[GroupBatch]) -> list[Row]:
        if len({batch.tables.ctypes.data for batch in batches}) < len(batches):
            raise NotImplementedError("num_heads: layers with one block table differ in heads")
        queries = np.diff(batches[0].query_start)
        rows = []
        for request in np.flatnonzero(queries):
            append, length = int(queries[request]), int(batches[0].lengths[request])
            tables = [self._table(batch, int(request), length - append, length) for batch in batches]
            rows.append(Row(int(request), append, keep=length - append,
                            tables=[table for table in tables if table is not None]))
        return rows

    def _table(self, batch: GroupBatch, request: int, keep: int, length: int) -> tuple[int, int, list[int]] | None:
        table, size = batch.tables[request], self._block_size
        positions = np.arange(keep, length)
        start = batch.query_start[request]
        if not np.array_equal(table[positions // size] * size + positions % size,
                              batch.slots[start:start + len(positions)]):
            raise RuntimeError(f"vLLM's slots of request {request} are not the entries {keep} to {length - 1} of its block "
                               "table")
        window = self._groups[batch.group][1].window
        begin = 0 if window is None else max(0, keep - window)  # the first entry that a query sees
        return self._tables.update(request, batch.group, table, begin // size, -(-length // size))


def _delete(cache: WorkerCache) -> None:
    with contextlib.suppress(RingattnError, RuntimeError):  # the service or the client may be gone
        cache.delete()

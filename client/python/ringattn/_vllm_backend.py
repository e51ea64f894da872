"""The attention backend that vLLM loads: registered by ringattn.vllm, carried out by EngineCache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NoReturn

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionLayer, AttentionMetadataBuilder,
                                       AttentionType, CommonAttentionMetadata, MultipleOf)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from ringattn._vllm_cache import EngineCache, GroupBatch

_KV_CACHE_DTYPES = ["auto", "float16", "bfloat16"]


class Backend(AttentionBackend):
    """Attention on ringattn's workers. vLLM keeps a placeholder of one element for each token and layer."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = _KV_CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # a member of vLLM's AttentionBackendEnum

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return dataclasses.replace(spec, num_head_slots=1, state_content_bytes=get_dtype_size(spec.dtype))


class LatentBackend(Backend):
    """Takes the place of vLLM's MLA backends, to refuse such models by name."""

    @staticmethod
    def get_impl_cls() -> NoReturn:
        raise NotImplementedError("MLA: models with latent attention are not served; unset RINGATTN_VLLM")

    @classmethod
    def is_mla(cls) -> bool:
        return True


class Builder(AttentionMetadataBuilder[GroupBatch]):
    """Describes a forward pass for one group of layers."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig,
                 device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._cache = EngineCache.of(vllm_config)
        self._group = self._cache.add_group(kv_cache_spec, layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> GroupBatch:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("causal: attention in both directions is not served")
        if any((common.mm_req_doc_ranges or {}).values()):
            raise NotImplementedError("mm_req_doc_ranges: attention in both directions is not served")
        return GroupBatch(self._cache, self._group, common.query_start_loc_cpu.numpy(), common.seq_lens.numpy(),
                          common.block_table_tensor.numpy(), common.slot_mapping.numpy())


class Impl(AttentionImpl[GroupBatch]):
    """One layer. Raises NotImplementedError naming the argument that is not served."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 **more: Any) -> None:
        if kv_cache_dtype not in _KV_CACHE_DTYPES:
            raise NotImplementedError(f"kv_cache_dtype: is {kv_cache_dtype}; served are {', '.join(_KV_CACHE_DTYPES)}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: is {AttentionType(attn_type).value}; only decoder layers are served")
        if alibi_slopes is not None:
            raise NotImplementedError("alibi_slopes: is not served with a K/V cache")
        if kv_sharing_target_layer_name is not None:
            raise NotImplementedError("kv_sharing_target_layer_name: layers that read another layer's K/V are not served")
        for name, value in more.items():
            if value is not None:
                raise NotImplementedError(f"{name}: is not served")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = None

    def forward(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: GroupBatch | None, output: torch.Tensor,
                output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: quantised outputs are not served")
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        attn_metadata.cache.attend(layer.layer_name, query, key, value, output)
        return output

"""Exact attention as a service: a client of a ringattn coordinator.

    import numpy as np, ringattn

    with ringattn.connect("127.0.0.1:7700") as client:
        out, lse, report = client.forward(q, k, v, causal=True)     # [batch, seq_len, heads, head_dim]
        gradients = client.backward(dout, q, k, v, out=out, lse=lse, causal=True)

Functions for PyTorch are differentiable and use the default client (`set_default_client`, or RINGATTN_ADDRESS):
`attention`; `flash_attn_func`, `flash_attn_varlen_func` and their packed forms with flash-attn's arguments; and
`dilated_attention` (LongNet) with torchscale's. `ringattn.ring_flash_attn` and `ringattn.nnscaler` have functions that
every rank of torch.distributed calls with its shard. `ringattn.huggingface.register()` makes "ringattn" an attention
implementation of Hugging Face models.

For inference, K/V caches stay with the workers: `Client.create_cache`, `flash_attn_with_kvcache`, and `KvCache` for
`model.generate(past_key_values=...)`.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# protoc generates modules of ringattn.v1 from the protos, in another folder on sys.path.
__path__ = extend_path(__path__, __name__)

from ringattn._arrays import TensorSpec
from ringattn._client import BackwardResult, Client, ForwardResult, connect
from ringattn._core import VERSION as __version__
from ringattn._cuda import CudaArray
from ringattn._default import default_client, empty, set_default_client
from ringattn._errors import (AbortedError, CacheExpiredError, CacheFencedError, CacheLostError, CancelledError,
                              DataLossError, DeadlineExceededError, FailedPreconditionError, FieldViolation,
                              InvalidArgumentError, NotFoundError, PermissionDeniedError, ResourceExhaustedError,
                              RingattnError, StepRefusedError, UnavailableError, UnimplementedError)
from ringattn._kv_cache import LayerCache, LayerGroup, LayerReport, Row, Step, WorkerCache
from ringattn._options import (AttentionOptions, BackwardOptions, CallOptions, DilationLevel, Document, ForwardOptions,
                               Progress)
from ringattn._optional import needed_by
from ringattn._prepared import PreparedCall
from ringattn._regions import Region
from ringattn._report import KernelUse, Plan, Report
from ringattn._residuals import Residual
from ringattn._writer import Writer

if TYPE_CHECKING:
    from ringattn._dilated import dilated_attention
    from ringattn._kv_flash_attn import flash_attn_with_kvcache
    from ringattn._kv_huggingface import KvCache
    from ringattn.flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                                     flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,
                                     flash_attn_varlen_qkvpacked_func)
    from ringattn.torch_ops import attention

# Imported on first use, because only these need PyTorch.
_OF_TORCH = {
    "attention": "ringattn.torch_ops",
    "dilated_attention": "ringattn._dilated",
    "flash_attn_func": "ringattn.flash_attn",
    "flash_attn_kvpacked_func": "ringattn.flash_attn",
    "flash_attn_qkvpacked_func": "ringattn.flash_attn",
    "flash_attn_varlen_func": "ringattn.flash_attn",
    "flash_attn_varlen_kvpacked_func": "ringattn.flash_attn",
    "flash_attn_varlen_qkvpacked_func": "ringattn.flash_attn",
    "flash_attn_with_kvcache": "ringattn._kv_flash_attn",
    "KvCache": "ringattn._kv_huggingface",
}

__all__ = [
    "AbortedError", "AttentionOptions", "BackwardOptions", "BackwardResult", "CacheExpiredError", "CacheFencedError",
    "CacheLostError", "CallOptions", "CancelledError", "Client", "CudaArray", "DataLossError", "DeadlineExceededError",
    "DilationLevel", "Document", "FailedPreconditionError", "FieldViolation", "ForwardOptions", "ForwardResult",
    "InvalidArgumentError", "KernelUse", "LayerCache", "LayerGroup", "LayerReport", "NotFoundError",
    "PermissionDeniedError", "Plan", "PreparedCall", "Progress", "Region", "Report", "Residual",
    "ResourceExhaustedError", "RingattnError", "Row", "Step", "StepRefusedError", "TensorSpec", "UnavailableError",
    "UnimplementedError", "WorkerCache", "Writer", "__version__", "connect", "default_client", "empty",
    "set_default_client", *_OF_TORCH,
]


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCH:
        raise AttributeError(f"module 'ringattn' has no attribute {name!r}")
    import importlib

    with needed_by(f"ringattn.{name}"):
        value = getattr(importlib.import_module(_OF_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

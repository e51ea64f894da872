"""Names of ring_flash_attn that this package does not support.

They can be imported, so that a program that imports them next to others runs. Calling one raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_SHARDS = ("functions that are called on every rank with that rank's shard are not supported; call flash_attn_func "
           "from one process with the whole tensors")

_FORMS = ("func", "kvpacked_func", "qkvpacked_func", "varlen_func", "varlen_kvpacked_func", "varlen_qkvpacked_func")

REASONS = {
    **{f"{prefix}_flash_attn_{form}": _SHARDS for prefix in ("ring", "zigzag_ring", "stripe", "llama3")
       for form in _FORMS},
    "llama3_flash_attn_prepare_cu_seqlens": _SHARDS,
    "substitute_hf_flash_attn": _SHARDS,
    "update_ring_flash_attn_params": _SHARDS,
}


def refusal(name: str) -> Callable[..., NoReturn]:
    """The function that stands for one of REASONS."""
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {REASONS[name]}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Not supported: {REASONS[name]}."
    return refuse

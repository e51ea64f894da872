"""vLLM with keys and values on ringattn's workers.

vLLM loads this module through the entry point "ringattn" of the group vllm.general_plugins. The environment variable
RINGATTN_VLLM=1 makes ringattn the attention backend of vLLM on CPUs. RINGATTN_ADDRESS and the other variables of
`ringattn.default_client` name the service. docs/inference.md is the guide.
"""

from __future__ import annotations

import os
import warnings

from ringattn._optional import needed_by

TESTED_VERSION = "0.32"
_SWITCH = "RINGATTN_VLLM"


def register() -> None:
    """Makes ringattn the attention backend of this process if RINGATTN_VLLM is 1. vLLM calls it once per process.

    Raises:
        ValueError: RINGATTN_VLLM is neither 0 nor 1.
        NotImplementedError: vLLM runs on another platform than CPUs.
    """
    switch = os.environ.get(_SWITCH, "")
    if switch in ("", "0"):
        return
    if switch != "1":
        raise ValueError(f"{_SWITCH} is {switch!r}; set 1, or 0 for vLLM's own attention. RINGATTN_ADDRESS names the "
                         "service")
    with needed_by(__name__):
        import vllm
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu():
        raise NotImplementedError(f"platform: vLLM runs on {current_platform.device_name}; ringattn.vllm serves vLLM on "
                                  f"CPUs. Unset {_SWITCH}")
    if not vllm.__version__.startswith(f"{TESTED_VERSION}."):
        warnings.warn(f"ringattn.vllm is tested with vLLM {TESTED_VERSION}; this is {vllm.__version__}",
                      RuntimeWarning, stacklevel=2)
    # On CPUs, vLLM ignores --attention-backend and always takes these members.
    register_backend(AttentionBackendEnum.CPU_ATTN, "ringattn._vllm_backend.Backend")
    for latent in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        register_backend(latent, "ringattn._vllm_backend.LatentBackend")

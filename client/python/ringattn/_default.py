"""The client that functions without one take."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, Unpack

from ringattn._client import Client, connect
from ringattn._options import CALL_NAMES, CallOptions, check_names

ResidualMode = Literal["auto", "remote", "off"]

_lock = threading.Lock()
_client: Client | None = None
_options: dict[str, Any] = {}
#: Read without the lock, as torch.compile traces it.
residual_mode: ResidualMode = "auto"


def set_default_client(client: Client | None, *, residual: ResidualMode = "auto",
                       **options: Unpack[CallOptions]) -> None:
    """The client that `attention`, flash_attn_func and its kin, and Hugging Face models take.

    `options` are those of each of their calls: a deadline, a transport, a layout. `residual`: whether what a
    differentiated forward computed stays with the workers for its backward: see `attention`. None: by the environment again, which
    may name a coordinator in RINGATTN_ADDRESS, authorities in RINGATTN_TLS_CA, a certificate and its key in
    RINGATTN_TLS_CERT and RINGATTN_TLS_KEY, and a token's file in RINGATTN_TOKEN_FILE.
    """
    check_names(options, CALL_NAMES - {"request_id"}, "set_default_client")
    check_residual_mode(residual)
    global _client, _options, residual_mode
    with _lock:
        _client, _options, residual_mode = client, dict(options), residual


def check_residual_mode(mode: str) -> None:
    """Raises ValueError for one that does not exist."""
    if mode not in ("auto", "remote", "off"):
        raise ValueError(f"residual: {mode!r} is none of auto, remote, off")


def default_client() -> Client:
    """The one that was set, or one by the environment.

    Raises:
        RuntimeError: there is neither.
    """
    global _client
    with _lock:
        if _client is None:
            address = os.environ.get("RINGATTN_ADDRESS")
            if not address:
                raise RuntimeError("no client: call ringattn.set_default_client, or set RINGATTN_ADDRESS")
            named: dict[str, Any] = {}
            for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
                if value := os.environ.get(f"RINGATTN_{name.upper()}"):
                    named[name] = value
            _client = connect(address, **named)
        return _client


def empty(shape: int | Sequence[int], dtype: Any = "float32", *, client: Client | None = None) -> Any:
    """`Client.empty` of `client`, or of the default client: memory that workers of this machine can read."""
    return (client or default_client()).empty(shape, dtype)


def default_options() -> dict[str, Any]:
    """The call options that go with the default client."""
    with _lock:
        return dict(_options)

"""The default client: used by functions that have no client argument."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, Unpack

from ringattn._arguments import type_name
from ringattn._client import Client, connect
from ringattn._errors import invalid
from ringattn._options import CALL_NAMES, CallOptions, check_names

ResidualMode = Literal["auto", "remote", "off"]

_lock = threading.Lock()
_client: Client | None = None
_options: dict[str, Any] = {}
#: Read without the lock, because torch.compile traces the read.
residual_mode: ResidualMode = "auto"


def set_default_client(client: Client | None, *, residual: ResidualMode = "auto",
                       **options: Unpack[CallOptions]) -> None:
    """Sets the client of `attention`, of flash-attn's functions and of Hugging Face models.

    Args:
        client: None: connect by the environment, with RINGATTN_ADDRESS, RINGATTN_TLS_CA, RINGATTN_TLS_CERT,
            RINGATTN_TLS_KEY and RINGATTN_TOKEN_FILE.
        residual: whether the workers keep a differentiated forward for its backward; see `attention`.
        options: call options of every call, such as a deadline, a transport or a layout.
    """
    check_names(options, CALL_NAMES - {"request_id"}, "set_default_client")
    check_residual_mode(residual)
    if client is not None and not isinstance(client, Client):
        raise TypeError(f"client: is {type_name(client)}; must be a ringattn.Client or None")
    global _client, _options, residual_mode
    with _lock:
        _client, _options, residual_mode = client, dict(options), residual


def check_residual_mode(mode: str) -> None:
    """Raises InvalidArgumentError for an unknown mode."""
    if mode not in ("auto", "remote", "off"):
        raise invalid("residual", f"is {mode!r}; must be auto, remote or off")


def default_client() -> Client:
    """Returns the client that was set, or connects by the environment.

    Raises:
        RuntimeError: no client was set, and RINGATTN_ADDRESS is empty.
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
    """Calls `Client.empty` of `client` or of the default client."""
    return (client or default_client()).empty(shape, dtype)


def default_options() -> dict[str, Any]:
    """Returns the call options of the default client."""
    with _lock:
        return dict(_options)

"""The client that functions without one take."""

from __future__ import annotations

import os
import threading
from typing import Any, Unpack

from ringattn._client import Client, connect
from ringattn._options import CALL_NAMES, CallOptions, check_names

_lock = threading.Lock()
_client: Client | None = None
_options: dict[str, Any] = {}


def set_default_client(client: Client | None, **options: Unpack[CallOptions]) -> None:
    """The client that `attention`, flash_attn_func and its kin, and Hugging Face models take.

    `options` are those of each of their calls: a deadline, streams, a layout. None: by the environment again, which
    may name a coordinator in RINGATTN_ADDRESS, authorities in RINGATTN_TLS_CA, a certificate and its key in
    RINGATTN_TLS_CERT and RINGATTN_TLS_KEY, and a token's file in RINGATTN_TOKEN_FILE.
    """
    check_names(options, CALL_NAMES - {"request_id"}, "set_default_client")
    global _client, _options
    with _lock:
        _client, _options = client, dict(options)


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


def default_options() -> dict[str, Any]:
    """The call options that go with the default client."""
    with _lock:
        return dict(_options)

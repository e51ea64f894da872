"""Prepared calls: what workers keep before the first call, while a loop needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringattn import _core
from ringattn._arguments import positive_seconds
from ringattn._errors import error_of, invalid
from ringattn._options import BACKWARD_NAMES, FORWARD_NAMES, check_names
from ringattn._request import Request, backward_request, forward_request


class PreparedCall:
    """What `Client.prepare` has made the workers keep. A context manager: the end of the block is `close`.

    Until then the client renews it, unless the client is closed first.
    """

    def __init__(self, core: _core.Prepared) -> None:
        self._core = core
        report = core.report
        plan, prepared = report["accepted"].get("plan", {}), report["summary"]["prepared"]
        #: Names of the workers, by ring rank.
        self.members: tuple[str, ...] = tuple(plan.get("members", ()))
        #: Device memory of all workers together. It is free to every other request that needs it.
        self.nbytes: int = prepared["bytes"]
        #: Workers that had kept it already.
        self.found: int = prepared["found"]
        #: Seconds for which the workers keep it after the last renewal.
        self.ttl: float = prepared["ttl"]
        #: The protos Accepted and Summary as dicts.
        self.details: Mapping[str, Any] = report

    def __repr__(self) -> str:
        return f"<ringattn.PreparedCall on {', '.join(self.members)}{', closed' if self._core.closed else ''}>"

    def __enter__(self) -> PreparedCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def trouble(self) -> Exception | None:
        """The error of the last renewal, or None. The library tries again."""
        error = self._core.trouble()
        return None if error is None else error_of(error)

    def close(self) -> None:
        """Ends the renewals. The workers keep the part for at most `ttl` more seconds. Idempotent."""
        self._core.close()


#: Options of residuals, whose parts the workers do not keep.
_OF_RESIDUALS = ("retain", "residual", "keep_residual")


def _request(q: Any, k: Any, v: Any, qkv: Any, kv: Any, dout: Any, out: Any, lse: Any,
             options: Mapping[str, Any]) -> Request:
    for name in _OF_RESIDUALS:
        if options.get(name) not in (None, False):
            raise invalid(name, "is set, but workers keep no prepared call that leaves or reads a residual")
    if dout is not None:
        return backward_request(dout, q, k, v, qkv, kv, out, lse, options)
    for name, value in (("out", out), ("lse", lse)):
        if value is not None:
            raise invalid(name, "is given without dout, which a backward has")
    return forward_request(q, k, v, qkv, kv, options)


def prepare(core: _core.Client, q: Any, k: Any, v: Any, qkv: Any, kv: Any, dout: Any, out: Any, lse: Any,
            ttl: float | None, options: Mapping[str, Any]) -> PreparedCall:
    """See Client.prepare."""
    check_names(options, FORWARD_NAMES if dout is None else BACKWARD_NAMES, "prepare")
    request = _request(q, k, v, qkv, kv, dout, out, lse, options)
    seconds = 0.0 if ttl is None else positive_seconds(ttl, "ttl")
    deadline = request.call["deadline"]
    made, error = core.prepare(request.is_forward, request.header, list(request.inputs), seconds,
                               60.0 if deadline is None else deadline)
    if error is not None:
        raise error_of(error)
    assert made is not None
    return PreparedCall(made)

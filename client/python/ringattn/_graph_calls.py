"""Calls of autograd graphs: a forward keeps a residual, and the graph's backwards use it.

`ringattn.torch_ops` makes these calls for one process, `ringattn._sharded` for the ranks of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn._client import BackwardResult, Client, ForwardResult
from ringattn._default import default_client, default_options
from ringattn._errors import FailedPreconditionError
from ringattn._options import PLAN_NAMES
from ringattn._report import Report
from ringattn._residuals import Keeper

#: Residuals that graphs refer to.
keeper = Keeper()

NO_SECOND_ORDER = "double backward: gradients of ringattn's gradients are not supported"
#: Length of a handle as a tensor: its text, padded with zeros. All zeros: no handle.
HANDLE_BYTES = 64


def _keep(client: Client, report: Report, residual: str) -> Tensor:
    """Returns the handle as a tensor. Its memory owns the residual: when it is freed, no graph can need it."""
    text = np.zeros(HANDLE_BYTES, np.uint8)
    if report.residual is not None:
        handle = report.residual.handle.encode()
        text[:len(handle)] = np.frombuffer(handle, np.uint8)
        keeper.keep(text, client, report.residual)
    elif residual == "remote":
        raise FailedPreconditionError(
            "FAILED_PRECONDITION", f"residual='remote': the workers could not keep this forward: "
                                   f"{report.residual_reason}", reason="RESIDUAL_NOT_KEPT")
    return torch.from_numpy(text)


def forward(tensors: Mapping[str, Any], options: Mapping[str, Any], residual: str,
            bias_gradient: bool) -> tuple[ForwardResult, Tensor]:
    """Calls the default client with its default options. Returns the result, and the handle for the graph to save.

    Args:
        options: of this call.
        residual: the mode; "off" for a forward without a gradient.
        bias_gradient: whether the graph's backwards compute the gradient of the bias.
    """
    client = default_client()
    retention = {} if residual == "off" else {"retain": True, "bias_gradient": bias_gradient}
    result = client.forward(**tensors, **{**default_options(), **options, **retention})
    return result, _keep(client, result.report, residual)


def graph_is_kept() -> bool:
    """Whether the running backward leaves its graph for another one (retain_graph). True outside of a backward."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _gone(handle: str) -> FailedPreconditionError:
    """Returns the error for a residual that is gone, with residual="remote"."""
    if keeper.was_dropped(handle):
        return FailedPreconditionError(
            "FAILED_PRECONDITION",
            "residual='remote': the residual of this forward was deleted, because the tensor that owned it was replaced "
            "by a copy. Saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu, activation "
            "offloading) do that. Use residual='auto' or 'off' inside such hooks", reason="RESIDUAL_DROPPED")
    return FailedPreconditionError(
        "FAILED_PRECONDITION", "residual='remote': an earlier backward consumed the residual of this forward; pass it "
                               "retain_graph=True", reason="RESIDUAL_CONSUMED")


def backward(dout: Tensor, dlse: Tensor | None, handle: Tensor, tensors: Mapping[str, Any] | None,
             options: Mapping[str, Any], writer: Mapping[str, Any] | None = None) -> BackwardResult:
    """Calls the default client for the gradients of one forward.

    Args:
        handle: as `forward` returned it.
        tensors: the forward's tensors with out and lse, by name; None: only the residual has them ("remote").
        options: what the forward computed. Not used with the residual alone.
        writer: the options that make the call one of several writers.
    """
    client, residual = default_client(), handle.numpy().tobytes().rstrip(b"\0").decode()
    kept, keep = keeper.find(residual), graph_is_kept()
    call = {**default_options(), **(writer or {})}
    call.pop("key_splits", None)  # applies to the forward only
    if tensors is None:
        if kept is None:
            raise _gone(residual)
        # The plan is the forward's, even if the default options have changed.
        call = {name: value for name, value in call.items() if name not in PLAN_NAMES}
        result = client.backward(dout, residual=kept, keep_residual=keep, dlse=dlse, **call)
    else:
        if kept is not None:
            call |= {"residual": residual, "keep_residual": keep}
        result = client.backward(dout, dlse=dlse, **tensors, **{**call, **options})
    if not keep or result.report.residual_failure:
        keeper.forget(residual)
    return result


def gradients_of_results(dout: Tensor | None, dlse: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns dout and dlse as a call takes them. `like` has the shape of out. Not both may be None."""
    if dout is None:
        dout = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return dout.contiguous(), None if dlse is None else dlse.contiguous()

"""The report of a call, returned with its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringattn._residuals import Residual


@dataclass(frozen=True)
class Plan:
    """Where and how the call was computed."""

    schedule: str  #: "single", "ring", "all_gather", "pass_q", "replicated_q" or "double_ring"
    layout: str
    world_size: int
    members: tuple[str, ...]  #: names of workers, by ring rank
    reason: str  #: why this plan, in a sentence
    predicted_compute_seconds: float
    exchanged_bytes: int


@dataclass(frozen=True)
class KernelUse:
    """The calls of one kind that one kernel computed."""

    call: str  #: "forward", "backward", "bias_gradient" or "probabilities"
    family: str  #: GPU: "sm90", "sm80" or "simt"; CPU: "cpu_bf16" or "cpu_fp32"
    kernel_class: str  #: "plain"; "terms": score terms or deterministic; "fp8"
    instructions: str  #: CPU: instruction set, such as "AVX3"; GPU: empty
    calls: int


@dataclass(frozen=True)
class Report:
    """The report of a successful call. Times are in seconds."""

    request_id: str
    plan: Plan
    transport: str  #: "relay", "direct", "host_memory" or "cuda_memory"
    transport_reason: str  #: why this transport was used
    staged_bytes: int  #: copied by the client into and out of shared memory
    stages: Mapping[str, float]  #: "queue", "upload", "compute", "download", measured by the coordinator
    times: Mapping[str, float]  #: "accepted", "uploaded", "first_output", "finished", since the successful attempt began
    compute_seconds: float
    flops: float
    bytes_up: int
    bytes_down: int
    kernels: Mapping[str, tuple[KernelUse, ...]]  #: kernels by worker
    attempts: int  #: 1 plus the number of replays
    residual: Residual | None  #: forward with `retain`: for `Client.backward`; None if nothing was kept
    residual_reason: str  #: why nothing was kept
    residual_failure: str  #: backward: why the residual was not used and tensors were sent; empty if it was used
    details: Mapping[str, Any] = field(repr=False)  #: the protos Accepted and Summary as dicts


def report_of(values: dict[str, Any], residual: Callable[[str], Residual] | None = None) -> Report:
    """Returns the report from the extension module's dict. `residual` creates a Residual from a handle."""
    accepted, summary = values["accepted"], values["summary"]
    plan, handle = accepted.get("plan", {}), summary["residual_handle"]
    return Report(
        request_id=values["request_id"],
        plan=Plan(schedule=plan.get("schedule", ""), layout=plan.get("layout", ""),
                  world_size=plan.get("world_size", 0), members=tuple(plan.get("members", ())),
                  reason=plan.get("reason", ""),
                  predicted_compute_seconds=plan.get("predicted_compute_time", 0.0),
                  exchanged_bytes=plan.get("exchanged_bytes", 0)),
        transport=accepted["transport"],
        transport_reason=values["transport_reason"],
        staged_bytes=values["staged_bytes"],
        stages={stage["stage"]: stage.get("time", 0.0) for stage in summary["stages"]},
        times=values["times"],
        compute_seconds=summary.get("compute_time", 0.0),
        flops=summary["flops"],
        bytes_up=summary["bytes_up"],
        bytes_down=summary["bytes_down"],
        kernels={rank["worker"]: tuple(
            KernelUse(call=use["call"], family=use["family"], kernel_class=use["kernel_class"],
                      instructions=use.get("instructions", ""), calls=use["calls"])
            for use in rank.get("kernels", ())) for rank in summary.get("ranks", ())},
        attempts=summary["attempts"],
        residual=residual(handle) if residual is not None and handle else None,
        residual_reason=summary["residual_reason"],
        residual_failure=values["residual_failure"],
        details={"accepted": accepted, "summary": summary},
    )

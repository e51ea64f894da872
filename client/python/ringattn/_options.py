"""The options of a call: typed, documented keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from ringattn._residuals import Residual

#: Anything that holds a tensor in host memory: a numpy array, a PyTorch tensor, what speaks DLPack.
ArrayLike = Any
Window = tuple[int, int]


@dataclass(frozen=True)
class Document:
    """Options of one packed document, instead of the call's `causal` and `window`."""

    causal: bool = False
    window: Window | None = None


@dataclass(frozen=True)
class DilationLevel:
    """One level of dilated attention (LongNet): out, lse and gradients are those of one softmax over all levels."""

    segment_length: int  #: tokens
    dilation_rate: int
    offset: int | None = None  #: below dilation_rate; None: each head has its own, its number modulo dilation_rate
    head_begin: int | None = None  #: the heads that have this level; None: all
    head_end: int | None = None  #: one past the last


@dataclass(frozen=True)
class Progress:
    """How far a call is."""

    state: str  #: "queued", "uploading", "computing", "downloading"
    fraction_done: float  #: of that state's work


class CallOptions(TypedDict, total=False):
    """How a call is made. Nothing here changes what is computed, beyond rounding."""

    #: Seconds for the call with all its replays; None: as long as it takes.
    deadline: float | None
    #: Names the operation for `get_operation` and `cancel_operation`; made up if it is not given.
    request_id: str
    layout: Literal["contiguous", "zigzag", "zigzag_per_document", "striped"] | None
    schedule: Literal["single", "ring", "all_gather", "pass_q", "replicated_q"] | None
    #: Members of the ring; None: the service chooses.
    world_size: int | None
    #: Tokens per stripe, of the striped layout.
    stripe: int | None
    #: For the schedule ``all_gather``: K/V of so many kv heads at a time.
    heads_per_step: int | None
    #: The workers to compute on, by name, in the order of the ring.
    members: Sequence[str]
    #: Rows and keys of a kernel's tile, and parts of one row's keys: values that the workers' devices offer.
    tile_q: int | None
    tile_kv: int | None
    key_splits: int | None
    #: Put every rank's timeline into the report.
    timeline: bool
    #: A W3C trace context that the call belongs to.
    traceparent: str
    #: Check every chunk that is sent by a CRC-32C, both ways. True unless given.
    crc32c: bool
    #: Called now and again while the call runs, by the thread, or in the event loop, that waits for it. What it raises
    #: cancels the call and comes out of it.
    on_progress: Callable[[Progress], None] | None
    #: Seconds between two of them, about. 0.2 unless given.
    progress_interval: float
    #: How tensors travel. "host_memory": workers of this machine copy them out of and into memory that they are shown, or
    #: the call fails; "relay": through the coordinator; "auto", the default: host memory where it can be had.
    #: `Report.transport_reason` says why it came as it did.
    transport: Literal["auto", "relay", "direct", "host_memory", "cuda_memory"]


class AttentionOptions(CallOptions, total=False):
    """Options of the result; docs/semantics.md of the service defines them exactly."""

    causal: bool
    #: (left, right) tokens that a query sees in addition to its own position; -1: no limit.
    window: Window | None
    #: None: 1 / sqrt(head_dim).
    softmax_scale: float | None
    #: None or 0: none.
    softcap: float | None
    #: Packed documents: where each begins and, last, where the last ends. Whole numbers, both or neither. Tensors then have
    #: no batch axis. Tokens after the last document are not sent; their results are 0, and their lse is -inf.
    cu_seqlens_q: ArrayLike | None
    cu_seqlens_k: ArrayLike | None
    #: One for each packed document.
    documents: Sequence[Document] | None
    #: [heads] or [batch or documents, heads].
    alibi_slopes: ArrayLike | None
    #: [batch or 1, heads or 1, seq_len_q, seq_len_k], of q's type or fp32; -inf masks.
    bias: ArrayLike | None
    bias_before_softcap: bool
    #: [batch or 1, heads or 1, seq_len_q, seq_len_k], booleans or bytes; true means visible.
    mask: ArrayLike | None
    #: `mask` has eight keys in a byte, lowest bit first: its last axis is ceil(seq_len_k / 8).
    mask_bits: bool
    #: Integers [batch, seq_len]: rows see keys of an equal id, and a negative id sees nothing. Both or neither.
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    #: fp32, bf16 or fp16 [heads]: a logit that takes part in the softmax and has no value. Its gradient is fp32.
    sinks: ArrayLike | None
    dropout_p: float
    #: Which pairs are dropped; backward must be given forward's. 0 unless given.
    dropout_seed: int
    #: (batch row or document, head, query, key) where the call begins in a larger one that it is a part of.
    dropout_origin: tuple[int, int, int, int]
    #: Forward: the type of its products. fp8 needs bf16 or fp16 tensors with head dims that are multiples of 8 up to 128.
    #: None: q's type.
    compute_dtype: Literal["fp8_e4m3", "float8_e4m3"] | None
    #: fp32: out and gradients as they were summed up; None: q's type.
    output_dtype: Literal["fp32", "float32"] | None
    #: For packed documents, of lse and dlse: "per_document" [documents, heads, longest document's queries], -inf
    #: after each document's end (those elements are not read); "flat" or None: [heads, tokens].
    lse_format: Literal["flat", "per_document"] | None
    #: Dilated attention; documents have as many queries as keys.
    dilation_levels: Sequence[DilationLevel]
    #: Equal calls give equal bits on the same ring.
    deterministic: bool
    #: Backward: return the gradient of `bias`. Forward with `retain`: the backward that reads it will.
    bias_gradient: bool


class ForwardOptions(AttentionOptions, total=False):
    """Options of forward alone."""

    #: Keep inputs and results with the workers for so many seconds (True: as long as the service thinks right), for a
    #: backward that then sends dout alone: `Report.residual`. A forward never fails because nothing can be kept:
    #: `Report.residual_reason` says why.
    retain: float | bool | None
    #: (batch row or document, query's position in it): the softmax's weights of these rows come back as
    #: `ForwardResult.probabilities`. At most 4,096 rows.
    probability_rows: Sequence[tuple[int, int]]


class BackwardOptions(AttentionOptions, total=False):
    """Options of backward alone."""

    #: The gradient of lse, fp32 in its shape.
    dlse: ArrayLike | None
    #: What a forward left, `Report.residual`: only dout and dlse are sent. Where it is gone, q, k, v (out, lse) are,
    #: if they are given, and `Report.residual_failure` says why. Without them the options are the forward's; with them
    #: a handle alone will do.
    residual: Residual | str | None
    #: The residual stays, for another backward.
    keep_residual: bool


#: Where a call is computed: of a residual its forward's, and what is said beside one must be the same.
PLAN_NAMES = frozenset({"layout", "schedule", "world_size", "stripe", "heads_per_step", "members", "tile_q", "tile_kv",
                        "key_splits"})
CALL_NAMES = frozenset(CallOptions.__annotations__)
ATTENTION_NAMES = frozenset(AttentionOptions.__annotations__) - CALL_NAMES
FORWARD_NAMES = frozenset(ForwardOptions.__annotations__)
BACKWARD_NAMES = frozenset(BackwardOptions.__annotations__)


def check_names(options: Mapping[str, Any], known: frozenset[str], function: str) -> None:
    """Raises TypeError, as Python does, for an option that does not exist."""
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")

"""Every field that a request may have can be set from Python: the protocol's field list is the measure. A new field
fails here until this file states how Python sets it, or why it does not."""
import asyncio
import inspect

import numpy as np
import pytest
from conftest import state_of, wait_until

import ringattn
from ringattn import _core, _options, _request

Q, K, V = (np.zeros((2, tokens, heads, 8), np.float32) for tokens, heads in ((6, 4), (10, 2), (10, 2)))
DOCUMENTS = {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k": [0, 4, 10]}
PACKED = (Q[0], K[0], V[0])
BIAS = np.zeros((2, 4, 6, 10), np.float32)

# message.field -> options, and tensors where they are others, with which a request has it.
SET = {
    "AttentionShape.batch": {}, "AttentionShape.seq_len_q": {}, "AttentionShape.seq_len_kv": {},
    "AttentionShape.num_heads": {}, "AttentionShape.num_kv_heads": {}, "AttentionShape.head_dim": {},
    "AttentionShape.head_dim_v": {},
    "AttentionShape.packed": {**DOCUMENTS, "tensors": PACKED},
    "AttentionShape.packing": {"tensors": (Q, None, None, None, np.stack([K, V], 2))},
    "PackedDocuments.cu_seqlens_q": {**DOCUMENTS, "tensors": PACKED},
    "PackedDocuments.cu_seqlens_k": {**DOCUMENTS, "tensors": PACKED},
    "PackedDocuments.options": {**DOCUMENTS, "documents": [ringattn.Document()] * 2, "tensors": PACKED},
    "DocumentOptions.causal": {**DOCUMENTS, "documents": [ringattn.Document(causal=True)] * 2, "tensors": PACKED},
    "DocumentOptions.window": {**DOCUMENTS, "documents": [ringattn.Document(window=(1, 2))] * 2, "tensors": PACKED},
    "AttentionOptions.softmax_scale": {"softmax_scale": 0.5},
    "AttentionOptions.softcap": {"softcap": 3.0},
    "AttentionOptions.causal": {"causal": True},
    "AttentionOptions.window": {"window": (3, 1)},
    "AttentionOptions.dropout": {"dropout_p": 0.5},
    "AttentionOptions.alibi": {"alibi_slopes": [1.0, 2.0, 3.0, 4.0]},
    "AttentionOptions.bias": {"bias": BIAS},
    "AttentionOptions.mask": {"mask": BIAS.astype(bool)},
    "AttentionOptions.segment_ids": {"q_segment_ids": np.zeros((2, 6), np.int32),
                                     "kv_segment_ids": np.zeros((2, 10), np.int32)},
    "AttentionOptions.sinks": {"sinks": np.zeros(4, np.float32)},
    "AttentionOptions.dilation_levels": {"dilation_levels": [ringattn.DilationLevel(4, 2)]},
    "AttentionOptions.deterministic": {"deterministic": True},
    "AttentionOptions.compute_dtype": {"compute_dtype": "float8_e4m3",
                                       "tensors": [x.astype(np.float16) for x in (Q, K, V)]},
    "Window.left": {"window": (3, 1)}, "Window.right": {"window": (3, 1)},
    "Dropout.rate": {"dropout_p": 0.5}, "Dropout.seed": {"dropout_p": 0.5, "dropout_seed": 7},
    "Dropout.first_batch": {"dropout_p": 0.5, "dropout_origin": (1, 2, 3, 4)},
    "Dropout.first_head": {"dropout_p": 0.5, "dropout_origin": (1, 2, 3, 4)},
    "Dropout.first_query": {"dropout_p": 0.5, "dropout_origin": (1, 2, 3, 4)},
    "Dropout.first_key": {"dropout_p": 0.5, "dropout_origin": (1, 2, 3, 4)},
    "AlibiOptions.slopes": {"alibi_slopes": [1.0, 2.0, 3.0, 4.0]},
    "Bias.per_batch": {"bias": BIAS}, "Bias.per_head": {"bias": BIAS},
    "Bias.dtype": {"bias": BIAS, "tensors": [x.astype(np.float16) for x in (Q, K, V)]},
    "Bias.before_softcap": {"bias": BIAS, "bias_before_softcap": True},
    "Bias.gradient": {"bias": BIAS, "bias_gradient": True},
    "Mask.per_batch": {"mask": BIAS.astype(bool)}, "Mask.per_head": {"mask": BIAS.astype(bool)},
    "Mask.encoding": {"mask": np.zeros((1, 1, 6, 2), np.uint8), "mask_bits": True},
    "DilationLevel.segment_length": {"dilation_levels": [ringattn.DilationLevel(4, 2)]},
    "DilationLevel.dilation_rate": {"dilation_levels": [ringattn.DilationLevel(4, 2)]},
    "DilationLevel.offset": {"dilation_levels": [ringattn.DilationLevel(4, 2, offset=1)]},
    "DilationLevel.head_begin": {"dilation_levels": [ringattn.DilationLevel(4, 2, head_begin=1)]},
    "DilationLevel.head_end": {"dilation_levels": [ringattn.DilationLevel(4, 2, head_end=1)]},
    "PlanOptions.layout": {"layout": "zigzag"}, "PlanOptions.schedule": {"schedule": "pass_q"},
    "PlanOptions.world_size": {"world_size": 2}, "PlanOptions.stripe": {"stripe": 4},
    "PlanOptions.heads_per_step": {"heads_per_step": 1}, "PlanOptions.members": {"members": ["a", "b"]},
    "PlanOptions.group_size": {"schedule": "double_ring", "group_size": 2},
    "PlanOptions.tuning": {"tile_q": 16}, "Tuning.tile_q": {"tile_q": 16}, "Tuning.tile_kv": {"tile_kv": 16},
    "Tuning.key_splits": {"key_splits": 2},
    "ForwardHeader.request_id": {"request_id": "mine"}, "ForwardHeader.shape": {}, "ForwardHeader.dtype": {},
    "ForwardHeader.options": {}, "ForwardHeader.plan": {}, "ForwardHeader.retain": {"retain": True},
    "RetainOptions.ttl": {"retain": 5.0},
    "ReplyOptions.with_crc32c": {"crc32c": True},
    "ReplyOptions.progress_interval": {"on_progress": print, "progress_interval": 3.0},
    "ReplyOptions.with_timeline": {"timeline": True},
    "ReplyOptions.lse_format": {**DOCUMENTS, "lse_format": "per_document", "tensors": PACKED},
    "ReplyOptions.output_dtype": {"output_dtype": "float32"},
    "ReplyOptions.probability_rows": {"probability_rows": [(1, 2)]},
    "ProbabilityRow.batch": {"probability_rows": [(1, 2)]}, "ProbabilityRow.position": {"probability_rows": [(1, 2)]},
    "BackwardHeader.request_id": {"request_id": "mine"}, "BackwardHeader.shape": {}, "BackwardHeader.dtype": {},
    "BackwardHeader.options": {}, "BackwardHeader.plan": {},
    "BackwardHeader.residual_handle": {"residual": "some"},
    "BackwardHeader.keep_residual": {"residual": "some", "keep_residual": True},
    "BackwardHeader.has_dlse": {"dlse": np.zeros((2, 4, 6), np.float32)},
    "BackwardHeader.has_forward_result": {"out": Q, "lse": np.zeros((2, 4, 6), np.float32)},
}
# The client library's own business, with what a user sets instead.
OF_THE_LIBRARY = {
    "ForwardHeader.reply": "field by field", "BackwardHeader.reply": "field by field",
    "ForwardHeader.inline_tensors": "small ones are, automatically",
    "BackwardHeader.inline_tensors": "small ones are, automatically",
    "ForwardHeader.prepare": "Client.prepare", "BackwardHeader.prepare": "Client.prepare",
    "ForwardHeader.transport": "transport=", "BackwardHeader.transport": "transport=",
    "ReplyOptions.max_chunk_bytes": "as the library's own channels take them",
    "ReplyOptions.single_message": "if all inputs are inline",
}
MESSAGES = sorted({name.split(".")[0] for name in SET} | {"SegmentIds", "Sinks"})
# Where a message's fields stand in what Python hands to the library, and fields that have another name there.
PLACES = {
    "AttentionShape": "shape", "PackedDocuments": "shape.packed", "DocumentOptions": "shape.packed.options.0",
    "AttentionOptions": "options", "Window": "options.window", "Dropout": "options.dropout",
    "AlibiOptions": "options.alibi", "Bias": "options.bias", "Mask": "options.mask",
    "DilationLevel": "options.dilation_levels.0", "PlanOptions": "plan", "Tuning": "plan.tuning",
    "ProbabilityRow": "probability_rows.0", "ForwardHeader": "", "BackwardHeader": "", "ReplyOptions": "",
    "RetainOptions": "",
}
OF_THE_CALL = {"ForwardHeader.request_id": "request_id", "BackwardHeader.request_id": "request_id",
               "ForwardHeader.retain": "retain", "RetainOptions.ttl": "retain", "ReplyOptions.with_crc32c": "crc32c",
               "ReplyOptions.progress_interval": "progress_interval", "ReplyOptions.with_timeline": "timeline"}
AS_TENSORS = {"BackwardHeader.has_dlse": "dlse", "BackwardHeader.has_forward_result": "lse"}


def request_of(field, options):
    options = dict(options)
    tensors = [*options.pop("tensors", (Q, K, V)), None, None][:5]
    if field.startswith("BackwardHeader"):
        out, lse = options.pop("out", None), options.pop("lse", None)
        return _request.backward_request(np.zeros_like(Q), *tensors, out, lse, options)
    return _request.forward_request(*tensors, options)


def test_every_field_is_known():
    fields = {f"{message}.{field}" for message in MESSAGES for field in _core.message_fields(message)}
    assert fields == set(SET) | set(OF_THE_LIBRARY)
    assert not set(SET) & set(OF_THE_LIBRARY)


@pytest.mark.parametrize("field", SET)
def test_field_is_set(field):
    request = request_of(field, SET[field])
    if field in OF_THE_CALL:
        (wanted,) = [value for name, value in SET[field].items() if name != "on_progress"]
        assert request.call[OF_THE_CALL[field]] == (0.0 if wanted is True and "retain" in SET[field] else wanted)
        return
    if field in AS_TENSORS:
        assert AS_TENSORS[field] in request.inputs
        return
    message, name = field.split(".")
    place = request.header
    for step in [step for step in PLACES[message].split(".") if step]:
        place = place[int(step) if step.isdigit() else step]
    assert place[name] not in (None, [], ""), place
    if SET[field] and isinstance(place[name], bool):
        assert place[name]


def test_every_option_is_documented_and_used():
    """The options' types list exactly the functions' options, and each is in the table above or changes no field."""
    used = {name for options in SET.values() for name in options} - {"tensors", "out", "lse"}
    of_the_call = {"deadline", "traceparent", "transport", "dropout_origin", "writer"}
    assert _options.FORWARD_NAMES | _options.BACKWARD_NAMES == used | of_the_call
    for function in (ringattn.Client.forward, ringattn.Client.forward_async):
        assert {"qkv", "kv"} <= set(inspect.signature(function).parameters)


def test_the_service_serves_no_option_that_is_missing_here(client):
    info = client.server_info()
    assert {f"AttentionOptions.{name}" for name in info["options"]} <= set(SET)
    for name in info["schedules"]:
        assert client.forward(Q, K, V, schedule=name).report.plan.schedule == name
    for name in info["layouts"]:
        assert client.forward(Q, K, V, layout=name, world_size=2).report.plan.layout in (name, "contiguous")


def test_checksums_can_be_left_out(client, rng):
    q, k, v = (rng.standard_normal(x.shape, np.float32) for x in (Q, K, V))
    assert (client.forward(q, k, v, crc32c=False).out == client.forward(q, k, v).out).all()


def test_progress_is_told(client):
    q, k, v = (np.ones((1, 12288, 8, 16), np.float32) for _ in range(3))
    told = []
    client.forward(q, k, v, on_progress=told.append, progress_interval=0.02)
    assert told and all(isinstance(one, ringattn.Progress) and 0 <= one.fraction_done <= 1 for one in told)
    assert {one.state for one in told} <= {"queued", "uploading", "computing", "downloading"}
    assert "computing" in {one.state for one in told}
    told.clear()
    asyncio.run(client.forward_async(q, k, v, on_progress=told.append, progress_interval=0.02))
    assert told
    with pytest.raises(ringattn.InvalidArgumentError, match="progress_interval"):
        client.forward(q, k, v, on_progress=told.append, progress_interval=0)


def test_an_error_of_on_progress_ends_the_call(client, long_call):
    def fail(progress):
        raise LookupError(progress.state)

    with pytest.raises(LookupError):
        client.forward(*long_call, on_progress=fail, progress_interval=0.02, request_id="told-1")
    # The coordinator receives the cancellation a moment later.
    wait_until(lambda: state_of(client, "told-1") == "failed", 10, "the operation's end")
    with pytest.raises(LookupError):
        asyncio.run(client.forward_async(*long_call, on_progress=fail, progress_interval=0.02))

"""The bytes of a K/V cache's step on the wire follow the formulas of docs/inference.md."""

import json

import numpy as np
import pytest

from cluster import wait_until
from direct_ring import make_direct_ring, metrics  # noqa: F401
from kv import DIRECT, HOST, RELAY, Group, Model, Row, Spec, Writer, create
from kv_ring import WAYS, opened, ring  # noqa: F401
from stubs import kv_cache_pb2 as kv


def varint_bytes(value):
    return max(1, -(-value.bit_length() // 7))


def field_bytes(value):
    """A field with a number below 16: an integer, or tensor bytes by their size."""
    return 1 + varint_bytes(value)


def tensors_of_rank(spec, placement, begin, layer, rank):
    """(up, down) of a layer call with lse on a rank's stream, by the formula of docs/inference.md."""
    group, element = spec.group_of(layer), np.dtype(spec.dtype).itemsize
    parts = placement.position_parts
    heads, kv_heads = group.heads // placement.head_parts, group.kv_heads // placement.head_parts
    queries = sum(row.q_tokens for row in begin.rows)
    entries = [p for row in begin.rows for p in range(row.keep_length, row.keep_length + row.append_tokens)
               if p // spec.block_tokens % parts == rank % parts]
    up = element * (queries * heads * group.dim + len(entries) * kv_heads * 2 * group.dim)
    down = (4 if parts > 1 else element) * queries * heads * group.dim  # partial results are fp32
    return up, down + 4 * queries * heads


def tensor_bytes(ring, index, transport):
    values = metrics(ring.worker_ports(index)["metrics"])
    return tuple(int(values[f'ringattn_bytes_total{{direction="{direction}",transport="{transport}"}}'])
                 for direction in ("up", "down"))


@WAYS
@pytest.mark.parametrize("world_size,heads,kv_heads", [(1, 8, 4), (4, 8, 4), (4, 4, 2)])
def test_tensor_bytes_follow_the_formula(ring, opened, transport, world_size, heads, kv_heads):
    spec = Spec([Group([0, 3], heads=heads, kv_heads=kv_heads), Group([1], heads=heads, kv_heads=kv_heads, dim=32)])
    writer, model = opened(spec, transport, world_size=world_size)
    name = {RELAY: "relay", DIRECT: "direct", HOST: "host_memory"}[transport]
    indexes = [int(member.rsplit("-", 1)[1]) for member in writer.placement.members]
    before = [tensor_bytes(ring, i, name) for i in indexes]
    want = [[0, 0] for _ in indexes]
    for rows in ([Row(1, 50)], [Row(1, 1), Row(2, 7, queries=3)], [Row(1, 1), Row(2, 1)]):
        begin = model.begin(writer.next_step, rows)
        model.step(writer, rows)
        for rank in range(len(indexes)):
            for layer in spec.layers:
                for i, size in enumerate(tensors_of_rank(spec, writer.placement, begin, layer, rank)):
                    want[rank][i] += size
    after = [tensor_bytes(ring, i, name) for i in indexes]
    assert [[a - b for a, b in zip(*pair)] for pair in zip(after, before)] == want


def test_message_bytes_on_the_relay_follow_the_formula(make_direct_ring, tmp_path):
    audit = tmp_path / "audit.jsonl"
    ring = make_direct_ring(workers=1, server_flags=[f"--audit_log={audit}"])
    spec = Spec([Group([0, 3])])
    cache = create(ring, spec, world_size=1)
    writer, model = Writer(ring, cache.cache_id, spec, RELAY), Model(spec)
    hello = kv.StepHello(cache_id=cache.cache_id, epoch=writer.answer.epoch, token=writer.answer.token)
    up, down = kv.StepRequest(hello=hello).ByteSize(), kv.StepResponse(opened=writer.streams[0].opened).ByteSize()

    def wrapped(fields):  # of a message in StepRequest and StepResponse
        return field_bytes(fields) + fields

    for rows in ([Row(1, 300)], [Row(2, 1), Row(3, 5)]):  # new sequences
        begin = model.begin(writer.next_step, rows)
        answer = writer.streams[0].ask(kv.StepRequest(begin=begin))
        assert answer.HasField("accepted"), answer
        up, down = up + kv.StepRequest(begin=begin).ByteSize(), down + answer.ByteSize()
        writer.next_step += 1
        queries = sum(row.q_tokens for row in begin.rows)
        for layer in spec.layers:
            q, k, v = (model.draw(queries, heads, 16) for heads in (4, 2, 2))
            call = kv.LayerCall(step=begin.step, layer=layer, output=kv.KV_OUTPUT_OUT_AND_LSE, q=q.tobytes(),
                                k=k.tobytes(), v=v.tobytes())
            result = writer.streams[0].ask(kv.StepRequest(call=call)).result
            head = field_bytes(begin.step) + (field_bytes(layer) if layer else 0)
            up += wrapped(head + 2 + sum(wrapped(x.nbytes) for x in (q, k, v)))
            time_taken = field_bytes(result.device_time.nanos)
            down += wrapped(head + wrapped(q.nbytes) + wrapped(4 * queries * 4) + wrapped(time_taken))
    writer.streams[0].requests.put(None)  # half-closes: the call ends with OK
    line = wait_until(lambda: [entry for entry in map(json.loads, audit.read_text().splitlines())
                               if entry["method"] == "Steps"], 20, "the line of the stream")[0]
    assert (line["bytes_up"], line["bytes_down"]) == (up, down)
    writer.close()

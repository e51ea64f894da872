"""A prompt and a decoded token in a K/V cache with plain generated stubs, by relay: kv_cache_stubs.py HOST:PORT.

Compares both results with attention in fp64. Generate the stubs of proto/ringattn/v1 with protoc or grpcio-tools
(docs/stubs.md) and put their folder on PYTHONPATH.
"""
import sys

import grpc
import numpy as np
from ringattn.v1 import kv_cache_pb2 as kv
from ringattn.v1 import kv_cache_pb2_grpc, tensor_pb2

HEADS, KV_HEADS, DIM = 4, 2, 16
PROMPT = 20

options = [("grpc.max_receive_message_length", 17 << 20)]  # a message holds at most 16 MiB
stub = kv_cache_pb2_grpc.KvCacheServiceStub(grpc.insecure_channel(sys.argv[1], options))
group = kv.KvLayerGroup(layers=[0], num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
cache = stub.CreateCache(kv.CreateCacheRequest(spec=kv.KvCacheSpec(
    groups=[group], dtype=tensor_pb2.DATA_TYPE_FLOAT32, blocks=16)))
opened = stub.OpenCache(kv.OpenCacheRequest(cache_id=cache.cache_id))

# The whole sequence: the prompt's tokens, then the decoded one.
q, k, v = (np.random.standard_normal((PROMPT + 1, heads, DIM)).astype(np.float32)
           for heads in (HEADS, KV_HEADS, KV_HEADS))


def requests():
    yield kv.StepRequest(hello=kv.StepHello(cache_id=cache.cache_id, epoch=opened.epoch, token=opened.token))
    number = opened.next_step
    for begin, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
        row = kv.StepRow(sequence=1, expected_length=begin, keep_length=begin, append_tokens=end - begin,
                         q_tokens=end - begin)
        yield kv.StepRequest(begin=kv.StepBegin(step=number, rows=[row]))
        q_bytes, k_bytes, v_bytes = (x[begin:end].tobytes() for x in (q, k, v))
        yield kv.StepRequest(call=kv.LayerCall(step=number, layer=0, q=q_bytes, k=k_bytes, v=v_bytes))
        number += 1


def attention():
    """Causal attention of the whole sequence in fp64."""
    k64, v64 = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k64) / np.sqrt(DIM)
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v64)


outs = []
for response in stub.Steps(requests()):
    if response.HasField("refused"):
        sys.exit(f"refused: {response.refused}")
    if response.HasField("result"):
        outs.append(np.frombuffer(response.result.out, np.float32).reshape(-1, HEADS, DIM))
stub.DeleteCache(kv.DeleteCacheRequest(cache_id=cache.cache_id))
np.testing.assert_allclose(np.concatenate(outs), attention(), rtol=1e-4, atol=1e-4)
print(f"{PROMPT} prompt tokens and 1 decoded token are exact")

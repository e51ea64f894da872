"""Decodes one token over a K/V cache with plain generated stubs, by relay: kv_cache_stubs.py HOST:PORT.

Generate the stubs of proto/ringattn/v1 with protoc or grpcio-tools and put their folder on PYTHONPATH.
"""
import sys

import grpc
import numpy as np
from ringattn.v1 import kv_cache_pb2 as kv
from ringattn.v1 import kv_cache_pb2_grpc, tensor_pb2

options = [("grpc.max_receive_message_length", 17 << 20)]  # a message holds at most 16 MiB
stub = kv_cache_pb2_grpc.KvCacheServiceStub(grpc.insecure_channel(sys.argv[1], options))
group = kv.KvLayerGroup(layers=[0], num_heads=4, num_kv_heads=2, head_dim=16)
cache = stub.CreateCache(kv.CreateCacheRequest(spec=kv.KvCacheSpec(
    groups=[group], dtype=tensor_pb2.DATA_TYPE_FLOAT32, blocks=16)))
opened = stub.OpenCache(kv.OpenCacheRequest(cache_id=cache.cache_id))


def tensor(*shape):
    return np.random.standard_normal(shape).astype(np.float32).tobytes()


def requests():
    yield kv.StepRequest(hello=kv.StepHello(cache_id=cache.cache_id, epoch=opened.epoch, token=opened.token))
    row = kv.StepRow(sequence=1, append_tokens=1, q_tokens=1)
    yield kv.StepRequest(begin=kv.StepBegin(step=opened.next_step, rows=[row]))
    yield kv.StepRequest(call=kv.LayerCall(step=opened.next_step, layer=0, q=tensor(1, 4, 16), k=tensor(1, 2, 16),
                                           v=tensor(1, 2, 16)))


for response in stub.Steps(requests()):
    if response.HasField("result"):
        out = np.frombuffer(response.result.out, np.float32).reshape(1, 4, 16)
        print("out", out.shape, "finite", bool(np.isfinite(out).all()))
stub.DeleteCache(kv.DeleteCacheRequest(cache_id=cache.cache_id))

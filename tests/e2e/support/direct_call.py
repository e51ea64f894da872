"""A client of direct streams over stock stubs, whose every step a test can do wrong."""

import queue

import grpc
import numpy as np

from attention import Result, header_for
from cluster import CHANNEL_OPTIONS
from stubs import attention_pb2 as pb, shard_pb2, shard_pb2_grpc, tensor_pb2 as T

ROWS = {"q": "q", "k": "kv", "v": "kv", "dout": "q", "out": "q", "lse": "q",
        "dq": "q", "dk": "kv", "dv": "kv"}


def tensor_id(name):
    return getattr(T, f"TENSOR_ID_{name.upper()}")


def tokens_of(spans):
    return np.concatenate([span.begin + np.arange(span.count) * max(1, span.stride)
                           for span in spans] or [np.zeros(0)]).astype(int)


def token_axis(name):
    return 2 if name == "lse" else 1


def cut(array, ticket, name):
    """The member's rows, as bytes."""
    rows = tokens_of(getattr(ticket, ROWS[name]))
    return np.ascontiguousarray(np.take(array, rows, token_axis(name))).tobytes()


def opening(**fields):
    """The metadata that says what a stream is for: fields of OpenShard."""
    return "ringattn-open-bin", shard_pb2.OpenShard(**fields).SerializeToString()


class Stream:
    """One Exchange call: `begin` or `open` starts it with the messages sent so far; `call`
    reads."""

    def __init__(self, address, options=()):
        self.channel = grpc.insecure_channel(address, CHANNEL_OPTIONS + list(options))
        self.queue = queue.Queue()

    def begin(self, *metadata, timeout=60):
        stub = shard_pb2_grpc.ShardServiceStub(self.channel)
        self.call = stub.Exchange(iter(self.queue.get, None), timeout=timeout, metadata=metadata)
        return self

    def open(self, token, part=0, parts=1, **fields):
        return self.begin(opening(token=token, part=part, parts=parts, **fields))

    def chunk(self, name, offset, data, **fields):
        self.queue.put(shard_pb2.ExchangeRequest(
            chunk=T.TensorChunk(tensor=tensor_id(name), offset=offset, data=data, **fields)))

    def end(self):
        self.queue.put(None)

    def opened(self):
        assert next(self.call).WhichOneof("message") == "opened"
        return self

    def error(self):
        """The status that ends it."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error
        return None

    def close(self):
        self.end()
        self.call.cancel()
        self.channel.close()


class DirectCall:
    def __init__(self, ring, inputs, backward=False, required=True, timeout=60, **options):
        self.inputs, self.backward = inputs, backward
        self.header = header_for(inputs, backward=backward, **options)
        self.header.transport.accept.append(pb.TRANSPORT_DIRECT)
        self.header.transport.required = required
        kind = pb.BackwardRequest if backward else pb.ForwardRequest
        self.names = ["q", "k", "v"] + (["dout"] if backward else [])
        method = ring.attention.Backward if backward else ring.attention.Forward
        self.stream = method(iter([kind(header=self.header)]), timeout=timeout)
        self.result = Result()

    def accept(self):
        self.result.take(next(self.stream))
        self.accepted = self.result.accepted
        self.tickets = list(self.accepted.tickets)
        return self

    def open(self, rank, part=0, parts=1, **fields):
        ticket = self.tickets[rank]
        return Stream(ticket.endpoints[0]).open(ticket.token, part, parts, **fields)

    def send(self, stream, rank, names=None, chunk_bytes=1 << 20):
        for name in self.names if names is None else names:
            data = cut(self.inputs[name], self.tickets[rank], name)
            for offset in range(0, len(data), chunk_bytes):
                stream.chunk(name, offset, data[offset:offset + chunk_bytes])

    def receive(self, streams):
        """Arrays of the outputs; `streams` by rank, one or several each."""
        shards = {}
        for rank, parts in enumerate(streams):
            for stream in parts:
                done = False
                for response in stream.call:
                    which = response.WhichOneof("message")
                    assert not done, "something after done"
                    if which == "chunk":
                        chunk = response.chunk
                        shards.setdefault((rank, chunk.tensor), []).append(
                            (chunk.offset, chunk.data))
                    done = which == "done"
                assert done
        arrays = {}
        for descriptor in self.accepted.outputs:
            name = T.TensorId.Name(descriptor.tensor)[len("TENSOR_ID_"):].lower()
            dtype = {T.DATA_TYPE_FLOAT32: np.float32, T.DATA_TYPE_FLOAT16: np.float16}[
                descriptor.dtype]
            shape = [int(n) for n in descriptor.dimensions]
            array = np.full(shape, np.nan, dtype)
            axis = token_axis(name)
            for rank, ticket in enumerate(self.tickets):
                rows = tokens_of(getattr(ticket, ROWS[name]))
                pieces = sorted(shards.get((rank, descriptor.tensor), []))
                position = 0
                for offset, data in pieces:
                    assert offset == position, "a gap or an overlap"
                    position += len(data)
                local = shape[:axis] + [len(rows)] + shape[axis + 1:]
                data = np.frombuffer(b"".join(d for _, d in pieces), dtype).reshape(local)
                np.moveaxis(array, axis, 0)[rows] = np.moveaxis(data, axis, 0)
            arrays[name] = array
        return arrays

    def run(self, parts=1):
        self.accept()
        streams = [[self.open(rank, part, parts) for part in range(parts)]
                   for rank in range(len(self.tickets))]
        for rank, mine in enumerate(streams):
            # Inputs on any of them.
            for index, name in enumerate(self.names):
                self.send(mine[index % parts], rank, [name], chunk_bytes=100_000)
        arrays = self.receive(streams)
        for response in self.stream:
            self.result.take(response)
        assert self.result.summary is not None
        for mine in streams:
            for stream in mine:
                stream.close()
        return arrays

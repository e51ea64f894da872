"""A writer over stock stubs, whose every step a test can do wrong."""

import grpc
import numpy as np

from attention import Result, header_for
from direct_call import ROWS, Stream, token_axis, tokens_of
from direct_ring import RING
from stubs import attention_pb2 as pb, attention_pb2_grpc, tensor_pb2 as T

TOKENS = 200


def shards(count, tokens=TOKENS):
    ends = [tokens * i // count for i in range(count + 1)]
    return [[pb.TokenSpan(begin=a, count=b - a)] for a, b in zip(ends, ends[1:])]


class Writer:
    """One of `count` clients, with a contiguous shard and a separate connection."""

    def __init__(self, ring, inputs, name, index, count, timeout=30, spans=None, header=None, backward=False):
        self.inputs, self.index, self.backward = inputs, index, backward
        own = (spans or shards(count))[index]
        header = header or header_for(inputs, request_id=name, causal=True, schedule=RING, world_size=2,
                                      backward=backward)
        transport = header.transport
        transport.accept.append(pb.TRANSPORT_DIRECT)
        transport.writer.index, transport.writer.count = index, count
        transport.writer.q.extend(own)
        transport.writer.kv.extend(own)
        self.header, self.own = header, own
        self.channel = grpc.insecure_channel(ring.address, [("grpc.use_local_subchannel_pool", 1)])
        stub = attention_pb2_grpc.AttentionServiceStub(self.channel)
        kind, method = ((pb.BackwardRequest, stub.Backward) if backward else (pb.ForwardRequest, stub.Forward))
        self.stream = method(iter([kind(header=header)]), timeout=timeout)
        self.result, self.streams = Result(), []

    def accept(self):
        self.result.take(next(self.stream))
        return self

    @property
    def accepted(self):
        return self.result.accepted

    def own_ranges(self, ticket, name):
        """(offset in the member's tensor, this writer's bytes) for each run of common tokens."""
        array = self.inputs[name]
        mine = tokens_of(self.own)
        members = tokens_of(getattr(ticket, ROWS[name]))
        batch, _, *rest = array.shape
        row = int(np.prod(rest)) * array.itemsize
        for b in range(batch):
            held = np.isin(members, mine)
            start = None
            for at in range(len(members) + 1):
                if at < len(members) and held[at]:
                    start = at if start is None else start
                elif start is not None:
                    rows = np.ascontiguousarray(array[b, members[start:at]])
                    yield (b * len(members) + start) * row, rows.tobytes()
                    start = None

    def open(self, rank, **fields):
        ticket = self.accepted.tickets[rank]
        stream = Stream(ticket.endpoints[0]).open(ticket.token, writer=self.index, **fields)
        self.streams.append(stream)
        return stream

    def send(self, stream, rank):
        for name in ["q", "k", "v"] + (["dout"] if self.backward else []):
            for offset, data in self.own_ranges(self.accepted.tickets[rank], name):
                stream.chunk(name, offset, data)

    def transfer(self):
        for rank in range(len(self.accepted.tickets)):
            self.send(self.open(rank), rank)

    def outputs(self):
        """This writer's rows of each output, after the end of the call."""
        arrays = {}
        for descriptor in self.accepted.outputs:
            name = T.TensorId.Name(descriptor.tensor)[len("TENSOR_ID_"):].lower()
            arrays[name] = np.full([int(n) for n in descriptor.dimensions], np.nan, np.float32)
        mine = tokens_of(self.own)
        for rank, stream in enumerate(self.streams):
            members = {axis: tokens_of(getattr(self.accepted.tickets[rank], axis)) for axis in ("q", "kv")}
            received = {}
            for response in stream.call:
                if response.WhichOneof("message") == "chunk":
                    received.setdefault(response.chunk.tensor, []).append(response.chunk)
            for tensor, chunks in received.items():
                name = T.TensorId.Name(tensor)[len("TENSOR_ID_"):].lower()
                array, axis, tokens = arrays[name], token_axis(name), members[ROWS[name]]
                local = np.full([*array.shape[:axis], len(tokens), *array.shape[axis + 1:]], np.nan, np.float32)
                flat = local.reshape(-1).view(np.uint8)
                for chunk in chunks:
                    flat[chunk.offset:chunk.offset + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
                common, in_mine, in_member = np.intersect1d(mine, tokens, return_indices=True)
                np.moveaxis(array, axis, 0)[in_mine] = np.moveaxis(local, axis, 0)[in_member]
        for response in self.stream:
            self.result.take(response)
        assert self.result.summary is not None
        return arrays

    def close(self):
        for stream in self.streams:
            stream.close()
        self.channel.close()

"""K/V caches through plain stubs: a writer over the relay, over direct streams or over step rings in
host memory, and a reference in numpy with fp64."""

import dataclasses
import queue
import uuid

import grpc
import numpy as np

from cluster import CHANNEL_OPTIONS
from stubs import attention_pb2, kv_cache_pb2 as kv, kv_cache_pb2_grpc, tensor_pb2

DTYPES = {np.dtype(np.float32): tensor_pb2.DATA_TYPE_FLOAT32,
          np.dtype(np.float16): tensor_pb2.DATA_TYPE_FLOAT16}
RELAY, DIRECT = attention_pb2.TRANSPORT_RELAY, attention_pb2.TRANSPORT_DIRECT
HOST = attention_pb2.TRANSPORT_HOST_MEMORY
TIMEOUT = 60  # seconds, for every answer


@dataclasses.dataclass
class Group:
    layers: list
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    window: int = None
    softcap: float = None
    causal: bool = True
    sinks: np.ndarray = None  # [layers, heads]

    def proto(self):
        group = kv.KvLayerGroup(layers=self.layers, num_heads=self.heads,
                                num_kv_heads=self.kv_heads, head_dim=self.dim,
                                non_causal=not self.causal)
        if self.window is not None:
            group.window_left = self.window
        if self.softcap is not None:
            group.softcap = self.softcap
        if self.sinks is not None:
            group.sinks = self.sinks.astype(np.float32).tobytes()
        return group


@dataclasses.dataclass
class Spec:
    groups: list = dataclasses.field(default_factory=lambda: [Group([0, 1])])
    dtype: type = np.float32
    block_tokens: int = 16
    blocks: int = 64
    numbering: int = kv.KV_NUMBERING_SEQUENCES
    label: str = ""

    def proto(self):
        return kv.KvCacheSpec(groups=[g.proto() for g in self.groups],
                              dtype=DTYPES[np.dtype(self.dtype)], block_tokens=self.block_tokens,
                              blocks=self.blocks, numbering=self.numbering, label=self.label)

    def group_of(self, layer):
        return next(g for g in self.groups if layer in g.layers)

    @property
    def layers(self):
        return [layer for group in self.groups for layer in group.layers]


@dataclasses.dataclass
class Row:
    sequence: int
    append: int
    queries: int = None  # as many as `append` unless given
    keep: int = None     # all entries unless given
    expected: int = None
    tables: list = ()    # BLOCKS: (group, first, blocks)


def service(ring):
    return kv_cache_pb2_grpc.KvCacheServiceStub(ring.channel)


def create(ring, spec, **fields):
    fields.setdefault("request_id", uuid.uuid4().hex)
    return service(ring).CreateCache(kv.CreateCacheRequest(spec=spec.proto(), **fields),
                                     timeout=TIMEOUT)


def get(ring, cache_id):
    return service(ring).GetCache(kv.GetCacheRequest(cache_id=cache_id), timeout=TIMEOUT)


def delete(ring, cache_id):
    return service(ring).DeleteCache(kv.DeleteCacheRequest(cache_id=cache_id), timeout=TIMEOUT)


def direct_metadata(hello):
    """A worker checks the token here before it reads a message."""
    return [("ringattn-steps-bin", hello.SerializeToString())]


class Stream:
    """One Steps stream, used message by message."""

    def __init__(self, method, hello, metadata=None):
        self.requests = queue.Queue()
        self.call = method(iter(self.requests.get, None), metadata=metadata)
        self.opened = self.ask(kv.StepRequest(hello=hello)).opened

    def send(self, request):
        self.requests.put(request)

    def read(self):
        """The next answer. Raises the stream's error at its end."""
        for response in self.call:
            return response
        raise AssertionError("the stream ended without an error")

    def ask(self, request):
        self.send(request)
        return self.read()

    def end(self):
        """The error that ends the stream."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error
        raise AssertionError("the stream ended without an error")

    def close(self):
        self.requests.put(None)
        self.call.cancel()


class Writer:
    """The writer of one cache: opens it, and has a stream to the relay or to each worker. With HOST,
    the streams' messages travel in rings."""

    def __init__(self, ring, cache_id, spec, transport=RELAY, answered_step=0):
        self.spec = spec  # with position parts that divide the blocks, of the cache and not of the part
        self.cache_id = cache_id
        self.transport = transport
        self.region = None
        if transport == HOST:
            from kv_ring import RING_BYTES
            from local_region import Region
            members = get(ring, cache_id).placement.members
            self.region = Region(ring, max(1, len(members)) * RING_BYTES)
        try:
            self._open(ring, cache_id, transport, answered_step)
        except BaseException:
            if self.region is not None:
                self.region.close()
            raise

    def _open(self, ring, cache_id, transport, answered_step):
        self.answer = service(ring).OpenCache(
            kv.OpenCacheRequest(cache_id=cache_id, accept=[transport],
                                answered_step=answered_step,
                                region_id=self.region.id if self.region else b""), timeout=TIMEOUT)
        assert self.answer.transport == transport, self.answer.transport_reason
        self.placement = self.answer.placement
        self.next_step = self.answer.next_step
        self.streams = []
        self.channels = []
        if transport == RELAY:
            hello = kv.StepHello(cache_id=cache_id, epoch=self.answer.epoch,
                                 token=self.answer.token)
            self.streams.append(Stream(service(ring).Steps, hello))
        else:
            assert [t.rank for t in self.answer.shards] == list(range(self.world_size))
            for ticket in self.answer.shards:
                channel = grpc.insecure_channel(ticket.endpoints[0], CHANNEL_OPTIONS)
                self.channels.append(channel)
                stub = kv_cache_pb2_grpc.KvShardServiceStub(channel)
                hello = kv.StepHello(cache_id=cache_id, epoch=self.answer.epoch,
                                     token=ticket.token, rank=ticket.rank)
                self.streams.append(self._stream(stub.Steps, hello))

    def _stream(self, method, hello):
        if self.region is None:
            return Stream(method, hello, direct_metadata(hello))
        from kv_ring import RING_BYTES, RingStream
        return RingStream(method, hello, self.region, hello.rank * RING_BYTES)

    @property
    def world_size(self):
        return self.placement.head_parts * self.placement.position_parts

    def lengths(self):
        """Lengths of all sequences, the smallest of all ranks'."""
        lengths = {}
        for stream in self.streams:
            for each in stream.opened.sequences:
                lengths[each.sequence] = min(each.length, lengths.get(each.sequence, each.length))
        return lengths

    def close(self):
        for stream in self.streams:
            stream.close()
        for channel in self.channels:
            channel.close()
        if self.region is not None and self.region.links:
            self.region.close()

    # -------------------------------------------------------------------- steps

    def begin(self, begin):
        """The answers of all streams: accepted or refused, the same of each."""
        answers = [stream.ask(kv.StepRequest(begin=begin)) for stream in self.streams]
        kinds = {answer.WhichOneof("message") for answer in answers}
        assert len(kinds) == 1, kinds
        if kinds == {"accepted"}:
            assert len({answer.accepted.tables_crc32c for answer in answers}) == 1
        return answers[0]

    def commit(self, step):
        for stream in self.streams:
            assert stream.ask(kv.StepRequest(commit=kv.StepCommit(step=step))).committed.step == step

    def call(self, begin, layer, q, k=None, v=None, output=kv.KV_OUTPUT_OUT_AND_LSE):
        """q [tokens, heads, dim], k and v [entries, kv heads, dim]; out and lse, or None."""
        if self.transport == RELAY:
            request = kv.LayerCall(step=begin.step, layer=layer, output=output, q=q.tobytes())
            if k is not None:
                request.k, request.v = k.tobytes(), v.tobytes()
            result = self.streams[0].ask(kv.StepRequest(call=request)).result
            return self._arrays(result, q.shape[1], q, output)
        return self._call_ranks(begin, layer, q, k, v, output)

    def _arrays(self, result, heads, q, output):
        if output == kv.KV_OUTPUT_NONE:
            assert not result.out and not result.lse
            return None, None
        dtype = np.float32 if output == kv.KV_OUTPUT_PARTIAL else q.dtype
        out = np.frombuffer(result.out, dtype).reshape(q.shape[0], heads, -1)
        lse = None
        if output != kv.KV_OUTPUT_OUT:
            lse = np.frombuffer(result.lse, np.float32).reshape(heads, q.shape[0])
        return out, lse

    def _call_ranks(self, begin, layer, q, k, v, output):
        parts = self.placement.position_parts
        positions = np.concatenate(
            [np.arange(r.keep_length, r.keep_length + r.append_tokens) for r in begin.rows]
            or [np.arange(0)])
        each = output if parts == 1 or output == kv.KV_OUTPUT_NONE else kv.KV_OUTPUT_PARTIAL
        for rank, stream in enumerate(self.streams):
            heads = slice(*self._range(q.shape[1], rank))
            request = kv.LayerCall(step=begin.step, layer=layer, output=each,
                                   q=np.ascontiguousarray(q[:, heads]).tobytes())
            if k is not None:
                own = (positions // self.placement.block_tokens) % parts == rank % parts
                kv_heads = slice(*self._range(k.shape[1], rank))
                request.k = np.ascontiguousarray(k[own][:, kv_heads]).tobytes()
                request.v = np.ascontiguousarray(v[own][:, kv_heads]).tobytes()
            stream.send(kv.StepRequest(call=request))
        heads_each = q.shape[1] // self.placement.head_parts
        answers = [self._arrays(stream.read().result, heads_each, q, each)
                   for stream in self.streams]
        if output == kv.KV_OUTPUT_NONE:
            return None, None
        if parts > 1:
            group = self.spec.group_of(layer)
            sinks = None if group.sinks is None else group.sinks[group.layers.index(layer)]
            answers = [merge(answers[i:i + parts],
                             None if sinks is None else sinks[slice(*self._range(len(sinks), i))])
                       for i in range(0, len(answers), parts)]
        out = np.concatenate([a[0] for a in answers], axis=1).astype(q.dtype)
        lse = None if answers[0][1] is None else np.concatenate([a[1] for a in answers], axis=0)
        return out, lse

    def _range(self, heads, rank):
        each = heads // self.placement.head_parts
        part = rank // self.placement.position_parts
        return part * each, (part + 1) * each


def merge(partials, sinks):
    """Partial results over different entries; sinks join last."""
    lse = np.logaddexp.reduce([p[1].astype(np.float64) for p in partials], axis=0)  # [heads, q]
    total = lse if sinks is None else np.logaddexp(lse, sinks[:, None])
    out = 0
    for partial_out, partial_lse in partials:
        with np.errstate(invalid="ignore"):
            weight = np.where(np.isneginf(partial_lse), 0, np.exp(partial_lse - total))
        out = out + partial_out.astype(np.float64) * weight.T[:, :, None]
    return out, total.astype(np.float32)


class Model:
    """Returns a cache's content for comparison: K and V of every sequence and layer in fp64."""

    def __init__(self, spec, seed=0):
        self.spec = spec
        self.random = np.random.default_rng(seed)
        self.sequences = {}  # number -> layer -> (k, v) [entries, kv heads, dim]

    def length(self, sequence):
        layers = self.sequences.get(sequence)
        return 0 if layers is None else len(layers[self.spec.layers[0]][0])

    def draw(self, tokens, heads, dim):
        return self.random.standard_normal((tokens, heads, dim)).astype(self.spec.dtype)

    def fork(self, source, target, length):
        self.sequences[target] = {layer: (k[:length], v[:length])
                                  for layer, (k, v) in self.sequences[source].items()}

    def drop(self, *sequences):
        for sequence in sequences:
            del self.sequences[sequence]

    def begin(self, number, rows, commands=()):
        begin = kv.StepBegin(step=number, commands=commands)
        for row in rows:
            length = self.length(row.sequence)
            keep = length if row.keep is None else row.keep
            added = begin.rows.add(
                sequence=row.sequence, keep_length=keep, append_tokens=row.append,
                expected_length=length if row.expected is None else row.expected,
                q_tokens=row.append if row.queries is None else row.queries)
            if self.spec.numbering == kv.KV_NUMBERING_BLOCKS:
                added.expected_length = keep
            for group, first, blocks in row.tables:
                added.tables.add(group=group, first=first, blocks=blocks)
        return begin

    def run(self, writer, begin, check=True):
        """Calls every layer of an accepted step; compares results. The model follows."""
        tolerance = 2e-5 if self.spec.dtype == np.float32 else 4e-3
        for layer in self.spec.layers:
            group = self.spec.group_of(layer)
            q = self.draw(sum(r.q_tokens for r in begin.rows), group.heads, group.dim)
            new = sum(r.append_tokens for r in begin.rows)
            k, v = (self.draw(new, group.kv_heads, group.dim) for _ in "kv")
            imports = q.shape[0] == 0
            out, lse = writer.call(begin, layer, q, k if new else None, v if new else None,
                                   kv.KV_OUTPUT_NONE if imports else kv.KV_OUTPUT_OUT_AND_LSE)
            at = at_q = 0
            for row in begin.rows:
                if row.sequence in self.sequences:
                    old = self.sequences[row.sequence].get(layer)
                else:
                    old = None
                if old is None:
                    old = (np.zeros((0, group.kv_heads, group.dim)),) * 2
                kept = [np.concatenate([a[:row.keep_length], b[at:at + row.append_tokens]])
                        for a, b in zip(old, (k, v))]
                self.sequences.setdefault(row.sequence, {})[layer] = tuple(kept)
                at += row.append_tokens
                if row.q_tokens and check:
                    rows = slice(at_q, at_q + row.q_tokens)
                    want, want_lse = attend(group, group.layers.index(layer), q[rows], *kept)
                    np.testing.assert_allclose(out[rows], want, rtol=tolerance, atol=tolerance)
                    np.testing.assert_allclose(lse[:, rows], want_lse, rtol=1e-3, atol=1e-3)
                at_q += row.q_tokens

    def step(self, writer, rows, commands=()):
        """One accepted step with all its layers."""
        begin = self.begin(writer.next_step, rows, commands)
        answer = writer.begin(begin)
        assert answer.HasField("accepted"), answer
        writer.next_step += 1
        self.run(writer, begin)
        return answer.accepted


def attend(group, index, q, k, v):
    """Attention of q [m, heads, dim], aligned at the end of k and v [n, kv heads, dim], in fp64; out
    [m, heads, dim] and lse [heads, m]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    m, n = len(q), len(k)
    share = group.heads // group.kv_heads
    k, v = (np.repeat(x, share, axis=1) for x in (k, v))
    scores = np.einsum("mhd,nhd->hmn", q, k) / np.sqrt(group.dim)
    if group.softcap is not None:
        scores = group.softcap * np.tanh(scores / group.softcap)
    place = np.arange(n - m, n)[:, None]  # of each query
    entry = np.arange(n)[None, :]
    seen = np.ones((m, n), bool)
    if group.causal:
        seen &= entry <= place
    if group.window is not None:
        seen &= entry >= place - group.window
    scores = np.where(seen, scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=2)
    if group.sinks is not None:
        lse = np.logaddexp(lse, group.sinks[index].astype(np.float64)[:, None])
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(lse)[:, :, None], 0, np.exp(scores - lse[:, :, None]))
    return np.einsum("hmn,nhd->mhd", weights, v), lse

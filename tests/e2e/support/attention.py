"""A minimal client over stock stubs, and a numpy reference in fp64."""

import grpc
import numpy as np

from stubs import attention_pb2 as pb, error_details_pb2, status_pb2, tensor_pb2

T = tensor_pb2
NUMPY = {T.DATA_TYPE_FLOAT32: np.float32, T.DATA_TYPE_FLOAT16: np.float16}


def make_inputs(batch=1, sq=64, sk=None, heads=2, kv_heads=None, dim=16, dim_v=None, seed=0,
                dtype=np.float32):
    rng = np.random.default_rng(seed)
    sk = sq if sk is None else sk
    kv_heads, dim_v = kv_heads or heads, dim_v or dim
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    return dict(q=draw(batch, sq, heads, dim), k=draw(batch, sk, kv_heads, dim),
                v=draw(batch, sk, kv_heads, dim_v), dout=draw(batch, sq, heads, dim_v))


def header_for(inputs, backward=False, request_id="", causal=False, window=None, softcap=None,
               layout=0, schedule=0, world_size=None, crc=False, chunk_bytes=None,
               forward_result=False, timeline=False, heads_per_step=None, terms=(),
               bias_gradient=False, members=()):
    """`terms` are names of inputs that the request has too: a bias, fp32 [batch or 1, heads or 1, sq, sk],
    a mask, uint8 of that shape."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    kind = pb.BackwardHeader if backward else pb.ForwardHeader
    header = kind(
        request_id=request_id,
        shape=pb.AttentionShape(batch=q.shape[0], seq_len_q=q.shape[1], seq_len_kv=k.shape[1],
                                num_heads=q.shape[2], num_kv_heads=k.shape[2],
                                head_dim=q.shape[3], head_dim_v=v.shape[3]),
        dtype={np.dtype(np.float32): T.DATA_TYPE_FLOAT32,
               np.dtype(np.float16): T.DATA_TYPE_FLOAT16}[q.dtype],
        options=pb.AttentionOptions(causal=causal),
        plan=pb.PlanOptions(layout=layout, schedule=schedule, members=members),
        reply=pb.ReplyOptions(with_crc32c=crc, with_timeline=timeline))
    if window is not None:
        header.options.window.left, header.options.window.right = window
    if softcap is not None:
        header.options.softcap = softcap
    if world_size is not None:
        header.plan.world_size = world_size
    if heads_per_step is not None:
        header.plan.heads_per_step = heads_per_step
    for name in terms:
        form = getattr(header.options, name)
        form.SetInParent()
        form.per_batch, form.per_head = (n != 1 for n in inputs[name].shape[:2])
    if "bias" in terms:
        header.options.bias.dtype = T.DATA_TYPE_FLOAT32
        header.options.bias.gradient = bias_gradient
    if chunk_bytes is not None:
        header.reply.max_chunk_bytes = chunk_bytes
    if backward:
        header.has_forward_result = forward_result
    return header


def chunks_of(inputs, names, chunk_bytes=1 << 20):
    """TensorChunks of the named inputs, in order."""
    for name in names:
        data = memoryview(np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8))
        tensor = getattr(T, f"TENSOR_ID_{name.upper()}")
        for offset in range(0, len(data), chunk_bytes):
            yield T.TensorChunk(tensor=tensor, offset=offset,
                                data=bytes(data[offset:offset + chunk_bytes]))


def requests(header, chunks):
    kind = pb.BackwardRequest if isinstance(header, pb.BackwardHeader) else pb.ForwardRequest
    yield kind(header=header)
    for chunk in chunks:
        yield kind(chunk=chunk)


class Result:
    def __init__(self):
        self.accepted = None
        self.summary = None
        self.progress = []
        self.tensors = {}

    def take(self, response):
        which = response.WhichOneof("message")
        if which == "accepted":
            self.accepted = response.accepted
            for d in self.accepted.outputs:
                self.tensors[d.tensor] = (d, bytearray(d.bytes), [])
        elif which == "chunk":
            _, buffer, ranges = self.tensors[response.chunk.tensor]
            begin, data = response.chunk.offset, response.chunk.data
            assert begin + len(data) <= len(buffer)
            buffer[begin:begin + len(data)] = data
            ranges.append((begin, begin + len(data)))
        elif which == "progress":
            self.progress.append(response.progress)
        elif which == "summary":
            self.summary = response.summary

    def received_bytes(self):
        return sum(end - begin for _, _, ranges in self.tensors.values() for begin, end in ranges)

    def finish(self):
        """Every byte came exactly once, and the summary last."""
        assert self.summary is not None
        for descriptor, buffer, ranges in self.tensors.values():
            position = 0
            for begin, end in sorted(ranges):
                assert begin == position, "a gap or an overlap in the output"
                position = end
            assert position == len(buffer)
        return self

    def array(self, name):
        descriptor, buffer, _ = self.tensors[getattr(T, f"TENSOR_ID_{name.upper()}")]
        return np.frombuffer(bytes(buffer), NUMPY[descriptor.dtype]).reshape(
            [int(n) for n in descriptor.dimensions])


def run(stub, inputs, backward=False, timeout=60, names=None, **options):
    header = header_for(inputs, backward=backward, **options)
    if names is None:
        names = ["q", "k", "v"] + (["dout"] if backward else [])
        names += options.get("terms", ())
        if options.get("forward_result"):
            names += ["out", "lse"]
    method = stub.Backward if backward else stub.Forward
    result = Result()
    for response in method(requests(header, chunks_of(inputs, names)), timeout=timeout):
        result.take(response)
    return result.finish()


def details(error):
    """google.rpc details of an RpcError, by message name."""
    found = {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0]
            for any_ in status.details:
                name = any_.type_url.rsplit(".", 1)[-1]
                message = getattr(error_details_pb2, name)()
                any_.Unpack(message)
                found[name] = message
    return found


def reference(inputs, causal=False, window=None, softcap=None):
    """Forward and backward from the definition, in fp64. dense tensors."""
    q, k, v, dout = (inputs[n].astype(np.float64) for n in ("q", "k", "v", "dout"))
    batch, sq, heads, dim = q.shape
    sk, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = 1 / np.sqrt(dim)
    s = scale * np.einsum("bihd,bjhd->bhij", q, k)
    slope = np.ones_like(s)
    if softcap is not None:
        t = np.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    allowed = np.ones((sq, sk), bool)
    if causal:
        allowed &= j <= i + sk - sq
    if window is not None:
        left, right = window
        if left >= 0:
            allowed &= j >= i + sk - sq - left
        if right >= 0:
            allowed &= j <= i + sk - sq + right
    s = np.where(allowed, s, -np.inf)
    top = np.max(s, -1, initial=-np.inf, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    out = np.einsum("bhij,bjhd->bihd", p, v)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    delta = np.einsum("bihd,bihd->bhi", dout, out)
    ds = p * (dp - delta[..., None]) * slope
    fold = lambda x: x.reshape(batch, sk, kv_heads, group, x.shape[-1]).sum(3)
    return dict(out=out, lse=lse, dq=scale * np.einsum("bhij,bjhd->bihd", ds, k),
                dk=fold(scale * np.einsum("bhij,bihd->bjhd", ds, q)),
                dv=fold(np.einsum("bhij,bihd->bjhd", p, dout)))


def assert_close(actual, exact, relative):
    """For inputs of unit scale: an exact zero may come out as fp32's noise."""
    assert actual.shape == exact.shape
    assert not np.isnan(actual).any()
    assert (np.isinf(actual) == np.isinf(exact)).all()
    finite = np.isfinite(exact)
    error = np.abs(actual.astype(np.float64)[finite] - exact[finite])
    bound = relative * (np.abs(exact[finite]) + 1e-2 + (np.sqrt(np.mean(exact[finite] ** 2)) if finite.any() else 0))
    assert (error <= bound).all(), f"worst {np.max(error / bound):.2f} of the bound"


def reason_of(error):
    return details(error)["ErrorInfo"].reason


def error_of(stream):
    """Reads the stream to its end and returns the error it must end with."""
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        return error
    raise AssertionError("the stream ended without an error")

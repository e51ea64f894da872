"""Forwards that leave a residual and Backwards that read it, over stock stubs."""

import numpy as np

from attention import Result, chunks_of, header_for, make_inputs, requests
from stubs import attention_pb2 as pb, tensor_pb2 as T


def call(stub, header, inputs, names, timeout=60):
    method = stub.Backward if isinstance(header, pb.BackwardHeader) else stub.Forward
    result = Result()
    for response in method(requests(header, chunks_of(inputs, names)), timeout=timeout):
        result.take(response)
    return result.finish()


class Case:
    """One problem: inputs by name, and what both directions' headers say of it."""

    def __init__(self, inputs, plan=None, **options):
        self.inputs = dict(inputs)
        self.plan = dict(plan or {})
        self.options = options
        self.edit = lambda header: None  # beyond what header_for knows
        self.more = []                   # inputs of both directions other than q, k, v
        self.gradients = ["dq", "dk", "dv"]
        self.dlse = False

    def forward_header(self, ttl=30, **fields):
        header = header_for(self.inputs, **self.options, **self.plan, **fields)
        self.edit(header)
        if ttl is not None:
            header.retain.ttl.FromMilliseconds(int(1000 * ttl))
        return header

    def forward(self, stub, ttl=30, **fields):
        """The result; its residual_handle is there, or the reason why not."""
        header = self.forward_header(ttl, **fields)
        return call(stub, header, self.inputs, ["q", "k", "v", *self.more])

    def stateless_header(self, forward, **fields):
        header = header_for(self.inputs, backward=True, forward_result=True, **self.options,
                            **self.plan, **fields)
        self.edit(header)
        header.has_dlse = self.dlse
        return header

    def stateless(self, stub, forward):
        inputs = dict(self.inputs, out=forward.array("out"), lse=forward.array("lse"))
        names = ["q", "k", "v", "dout", "out", "lse", *self.more] + ["dlse"] * self.dlse
        return call(stub, self.stateless_header(forward), inputs, names)

    def backward(self, stub, handle, **fields):
        return call(stub, handle_header(handle, has_dlse=self.dlse, **fields), self.inputs,
                    ["dout"] + ["dlse"] * self.dlse)

    def bytes_beside(self):
        """Returns the bytes that a Backward with a handle sends: dout, and dlse where there is
        one."""
        return sum(self.inputs[name].nbytes for name in ["dout"] + ["dlse"] * self.dlse)


def handle_header(handle, **fields):
    return pb.BackwardHeader(residual_handle=handle, **fields)


def small_case(seed=0, **shape):
    return Case(make_inputs(**{"sq": 64, "heads": 2, "seed": seed, **shape}), causal=True)


def draw_case(seed):
    """Every option, layout and ring size, some of them at a time."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    heads, kv_heads = pick((2, 2), (4, 2), (4, 1))
    sq, sk = int(rng.integers(1, 180)), int(rng.integers(1, 180))
    packed = rng.random() < 0.3
    batch = 1 if packed else int(rng.integers(1, 3))
    half = rng.random() < 0.3
    inputs = make_inputs(batch=batch, sq=sq, sk=sk, heads=heads, kv_heads=kv_heads,
                         dim=pick(8, 24), dim_v=pick(8, 40), seed=seed,
                         dtype=np.float16 if half else np.float32)
    world_size = int(rng.integers(1, 5))
    plan = dict(world_size=world_size, layout=pick(0, pb.LAYOUT_CONTIGUOUS, pb.LAYOUT_ZIGZAG,
                                                   pb.LAYOUT_STRIPED),
                schedule=pb.SCHEDULE_RING if world_size > 1 else 0)
    case = Case(inputs, plan=plan, causal=bool(rng.random() < 0.5),
                softcap=pick(None, 5.0), window=pick(None, None, (40, 10)))
    edits = []

    def cuts(total):
        return [0, *sorted(int(c) for c in rng.integers(0, total + 1, 2)), total]

    documents = 1
    if packed:
        cu_q, cu_k = cuts(sq), cuts(sk)
        documents = len(cu_q) - 1
        edits.append(lambda h: (h.shape.packed.cu_seqlens_q.extend(cu_q),
                                h.shape.packed.cu_seqlens_k.extend(cu_k)))
    if half and rng.random() < 0.5:
        edits.append(lambda h: setattr(h.reply, "output_dtype", T.DATA_TYPE_FLOAT32))
    if rng.random() < 0.3:
        slopes = rng.random(heads).tolist()
        edits.append(lambda h: h.options.alibi.slopes.extend(slopes))
    if rng.random() < 0.3:
        edits.append(lambda h: (setattr(h.options.dropout, "rate", 0.25),
                                setattr(h.options.dropout, "seed", seed)))
    if rng.random() < 0.4:
        case.inputs["sinks"] = rng.standard_normal(heads).astype(np.float32)
        case.more.append("sinks")
        case.gradients.append("dsinks")
        edits.append(lambda h: h.options.sinks.SetInParent())
    if not packed and rng.random() < 0.4:
        case.inputs["bias"] = rng.standard_normal((1, heads, sq, sk)).astype(inputs["q"].dtype)
        case.more.append("bias")
        gradient = bool(rng.random() < 0.5)
        case.gradients += ["dbias"] * gradient
        edits.append(lambda h: (setattr(h.options.bias, "per_head", True),
                                setattr(h.options.bias, "gradient", gradient)))
    if not packed and rng.random() < 0.3:
        case.inputs["mask"] = (rng.random((batch, 1, sq, sk)) < 0.8).astype(np.uint8)
        case.more.append("mask")
        edits.append(lambda h: setattr(h.options.mask, "per_batch", True))
    if rng.random() < 0.3:
        case.inputs["q_segment_ids"] = np.sort(rng.integers(0, 3, (batch, sq))).astype(np.int32)
        case.inputs["kv_segment_ids"] = np.sort(rng.integers(0, 3, (batch, sk))).astype(np.int32)
        case.more += ["q_segment_ids", "kv_segment_ids"]
        edits.append(lambda h: h.options.segment_ids.SetInParent())
    if rng.random() < 0.4:
        case.dlse = True
        case.inputs["dlse"] = rng.standard_normal((batch, heads, sq)).astype(np.float32)
    case.edit = lambda header: [edit(header) for edit in edits]
    case.what = (f"seed {seed}: {case.options} {plan} sq {sq} sk {sk} batch {batch} heads {heads}"
                 f"/{kv_heads} documents {documents} half {half} more {case.more}")
    return case

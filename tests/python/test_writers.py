"""Writers: several clients that share one request, each with its own rows of the tensors."""
import concurrent.futures
import contextlib
import copy
import pickle
import subprocess
import sys
import threading
import uuid

import numpy as np
import pytest
import reference

import ringattn

# How each tensor depends on the tokens: the axis of queries or keys, counted from the end.
_QUERIES = {"q": -3, "dout": -3, "out": -3, "dq": -3, "lse": -1, "dlse": -1, "q_segment_ids": -1, "bias": -2,
            "mask": -2, "dbias": -2}
_KEYS = {"k": -3, "v": -3, "dk": -3, "dv": -3, "kv_segment_ids": -1}


def contiguous(tokens, count):
    ends = [tokens * i // count for i in range(count + 1)]
    return [[(a, b - a)] if b > a else [] for a, b in zip(ends, ends[1:])]


def zigzag(tokens, count):
    ends = [tokens * i // (2 * count) for i in range(2 * count + 1)]
    both = [((ends[i], ends[i + 1]), (ends[2 * count - 1 - i], ends[2 * count - i])) for i in range(count)]
    return [[(a, b - a) for a, b in pair if b > a] for pair in both]


def striped(tokens, count):
    return [[(i, -(-(tokens - i) // count), count)] if i < tokens else [] for i in range(count)]


def uneven(tokens, count):
    """The first writer has everything except one token for each other; the last has none if there is no token."""
    rest = min(count - 1, tokens)
    return [[(0, tokens - rest)]] + [[(tokens - rest + i, 1)] if i < rest else [] for i in range(count - 1)]


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped, "uneven": uneven}


def tokens_of(spans):
    return np.concatenate([np.arange(s[0], s[0] + s[1] * (s[2] if len(s) > 2 else 1), s[2] if len(s) > 2 else 1)
                           for s in spans] or [np.zeros(0, int)]).astype(int)


def rows(name, tensor, writer):
    """A writer's rows of a whole tensor."""
    if tensor is None or (name not in _QUERIES and name not in _KEYS):
        return tensor
    axis, spans = (_QUERIES[name], writer.q) if name in _QUERIES else (_KEYS[name], writer.kv)
    return np.ascontiguousarray(np.take(tensor, tokens_of(spans), axis=axis))


def writers_of(layout, count, queries, keys):
    q, kv = LAYOUTS[layout](queries, count), LAYOUTS[layout](keys, count)
    return [ringattn.Writer(i, count, q[i], kv[i], queries, keys) for i in range(count)]


@contextlib.contextmanager
def connections(address, count):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ringattn.connect(address)) for _ in range(count)]


def together(clients, call):
    """The results or errors of call(index, client), all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        calls = [pool.submit(call, index, client) for index, client in enumerate(clients)]
        return [c.exception() or c.result() for c in calls]


def assemble(name, parts, writers, like):
    whole = np.full_like(like, np.nan)
    axis, spans = (_QUERIES[name], "q") if name in _QUERIES else (_KEYS[name], "kv")
    for part, writer in zip(parts, writers):
        index = [slice(None)] * whole.ndim
        index[axis] = tokens_of(getattr(writer, spans))
        whole[tuple(index)] = np.asarray(part)
    return whole


def shared(client, transport, tensor):
    """The tensor in the memory that the transport needs."""
    if transport != "host_memory" or not isinstance(tensor, np.ndarray):
        return tensor
    copy = client.empty(tensor.shape, tensor.dtype)
    copy[...] = tensor
    return copy


def run(address, writers, transport, tensors, options, backward=None, plan=None):
    """Forward and, with `backward` (dout, and dlse or None), backward of all writers; results by name, assembled."""
    name, plan = str(uuid.uuid4()), plan or {}
    tensor_options = {key: value for key, value in options.items() if key in _QUERIES or key in _KEYS}
    others = {key: value for key, value in options.items() if key not in tensor_options}

    def call(index, client):
        writer = writers[index]
        own = {key: shared(client, transport, rows(key, value, writer)) for key, value in tensors.items()}
        given = {**others, **{key: shared(client, transport, rows(key, value, writer))
                              for key, value in tensor_options.items()}}
        common = dict(given, **plan, transport=transport, writer=writer)
        forward = client.forward(**own, **common, request_id=name + "-f")
        assert forward.report.transport == transport, forward.report.transport_reason
        if backward is None:
            return forward, None
        dout, dlse = (shared(client, transport, rows(key, value, writer))
                      for key, value in zip(("dout", "dlse"), backward))
        gradients = client.backward(dout, **own, **common, out=forward.out, lse=forward.lse, dlse=dlse,
                                    request_id=name + "-b")
        return forward, gradients

    with connections(address, len(writers)) as clients:
        results = together(clients, call)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def check(address, transport, layout, count, tensors, options, plan, gradients=True, rng=np.random.default_rng(1)):
    """All results of all writers are the bits of one client's call with the same plan."""
    queries, keys = tensors["q"].shape[-3], tensors["k"].shape[-3]
    dout = rng.standard_normal((*tensors["q"].shape[:-1], tensors["v"].shape[-1])).astype(tensors["q"].dtype)
    packed = "cu_seqlens_q" in options
    lse_shape = (tensors["q"].shape[-2], queries) if packed else (tensors["q"].shape[0], tensors["q"].shape[2], queries)
    dlse = rng.standard_normal(lse_shape).astype(np.float32)
    with ringattn.connect(address) as client:
        forward = client.forward(**tensors, **options, **plan)
        whole = None
        if gradients:
            whole = client.backward(dout, **tensors, **options, **plan, out=forward.out, lse=forward.lse, dlse=dlse)
    writers = writers_of(layout, count, queries, keys)
    results = run(address, writers, transport, tensors, options, (dout, dlse) if gradients else None, plan)
    for name in ("out", "lse"):
        own = assemble(name, [getattr(f, name) for f, _ in results], writers, getattr(forward, name))
        np.testing.assert_array_equal(own, getattr(forward, name), err_msg=name)
    if whole is None:
        return
    for name in ("dq", "dk", "dv", "dbias"):
        expected = getattr(whole, name)
        if expected is not None:
            own = assemble(name, [getattr(g, name) for _, g in results], writers, expected)
            np.testing.assert_array_equal(own, expected, err_msg=name)
    if whole.dsinks is not None:
        for _, own in results:
            np.testing.assert_array_equal(own.dsinks, whole.dsinks)


def tensors_of(rng, queries=96, keys=96, batch=2, heads=4, kv_heads=2, dim=16, dim_v=16, packed=False):
    leading = () if packed else (batch,)
    return {name: rng.standard_normal((*leading, tokens, h, d)).astype(np.float32)
            for name, tokens, h, d in (("q", queries, heads, dim), ("k", keys, kv_heads, dim),
                                       ("v", keys, kv_heads, dim_v))}


@pytest.mark.parametrize("transport", ["direct", "host_memory"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_results_are_those_of_one_client(address, rng, transport, layout, count):
    for plan_layout in ("contiguous", "zigzag", "striped"):
        check(address, transport, layout, count, tensors_of(rng), {"causal": True},
              {"world_size": 3, "layout": plan_layout, "schedule": "ring"})


def test_results_are_right(address, rng):
    """The same against the definition in fp64."""
    tensors = tensors_of(rng, queries=70, keys=90, dim_v=24)
    writers = writers_of("zigzag", 3, 70, 90)
    for transport in ("direct", "host_memory"):
        results = run(address, writers, transport, tensors, {"causal": True})
        expected = reference.forward(**tensors, causal=True)
        for name, value in zip(("out", "lse"), expected):
            own = assemble(name, [getattr(f, name) for f, _ in results], writers, value.astype(np.float32))
            reference.close(own, value, 1e-5)


@pytest.mark.parametrize("transport", ["direct", "host_memory"])
def test_options(address, rng, transport):
    tensors = tensors_of(rng, queries=48, keys=48)
    ids = np.repeat(np.arange(4), 12).astype(np.int32)[None].repeat(2, 0)
    bias = rng.standard_normal((2, 4, 48, 48)).astype(np.float32)
    cases = [
        {"window": (9, 3)}, {"softcap": 3.0}, {"alibi_slopes": np.array([.5, .25, .1, .05])},
        {"dropout_p": 0.25, "dropout_seed": 7}, {"sinks": rng.standard_normal(4).astype(np.float32)},
        {"bias": bias, "bias_gradient": True}, {"mask": rng.random((1, 1, 48, 48)) > 0.3},
        {"q_segment_ids": ids, "kv_segment_ids": ids},
    ]
    for options in cases:
        check(address, transport, "zigzag", 2, tensors, options, {"world_size": 2, "layout": "zigzag"})
    for schedule in ("single", "all_gather", "pass_q", "replicated_q"):
        world = {} if schedule == "single" else {"world_size": 2}
        check(address, transport, "contiguous", 3, tensors, {"bias": bias, "bias_gradient": True},
              {"schedule": schedule, **world}, gradients=schedule in ("single", "all_gather"))


@pytest.mark.parametrize("transport", ["direct", "host_memory"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_packed_documents(address, rng, transport, layout):
    cu = np.array([0, 5, 5, 40, 96])
    check(address, transport, layout, 3, tensors_of(rng, packed=True),
          {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}, {"world_size": 2})


@pytest.mark.parametrize("transport", ["direct", "host_memory"])
def test_large_tensors_of_half_precision(address, rng, transport):
    """Several chunks and streams for each writer."""
    tensors = {name: tensor.astype(np.float16)
               for name, tensor in tensors_of(rng, queries=3000, keys=3000, batch=1, heads=8, kv_heads=4,
                                              dim=128, dim_v=128).items()}
    check(address, transport, "zigzag", 2, tensors, {"causal": True, "window": (100, -1)},
          {"world_size": 2, "layout": "zigzag"})


@pytest.mark.parametrize("transport", ["direct", "host_memory"])
def test_a_residual_belongs_to_all_writers(address, rng, transport):
    tensors = tensors_of(rng)
    dout = rng.standard_normal((2, 96, 4, 16)).astype(np.float32)
    plan = {"world_size": 2, "layout": "zigzag"}
    with ringattn.connect(address) as client:
        whole = client.backward(dout, **tensors, causal=True, **plan)
    writers, name = writers_of("zigzag", 2, 96, 96), str(uuid.uuid4())

    def call(index, client):
        writer = writers[index]
        own = {key: shared(client, transport, rows(key, value, writer)) for key, value in tensors.items()}
        forward = client.forward(**own, causal=True, **plan, retain=True, writer=writer, transport=transport,
                                 request_id=name + "-f")
        assert forward.report.residual is not None, forward.report.residual_reason
        return client.backward(shared(client, transport, rows("dout", dout, writer)), residual=forward.report.residual,
                               writer=writer, transport=transport, request_id=name + "-b")

    with connections(address, 2) as clients:
        results = together(clients, call)
    for result in results:
        assert not isinstance(result, Exception), result
    for key in ("dq", "dk", "dv"):
        own = assemble(key, [getattr(result, key) for result in results], writers, getattr(whole, key))
        np.testing.assert_array_equal(own, getattr(whole, key))


# ---------------------------------------------------------------------- errors

def call_of(tensors, writer, name, **options):
    return lambda _, client: client.forward(**{key: rows(key, value, writer) for key, value in tensors.items()},
                                            writer=writer, request_id=name, **options)


def fail(address, calls):
    with connections(address, len(calls)) as clients:
        return together(clients, lambda index, client: calls[index](index, client))


def test_writers_with_other_headers(address, rng):
    tensors, writers, name = tensors_of(rng), writers_of("zigzag", 2, 96, 96), str(uuid.uuid4())
    errors = fail(address, [call_of(tensors, writers[0], name, causal=True), call_of(tensors, writers[1], name)])
    for error in errors:
        assert isinstance(error, ringattn.InvalidArgumentError) and error.reason == "WRITERS_DIFFER", error


@pytest.mark.parametrize("spans, text", [
    ([[(0, 48)], [(47, 49)]], "writer 1 has token 47, which another span has too"),
    ([[(0, 48)], [(49, 47)]], "no writer has token 48"),
    ([[(0, 48, 2)], [(1, 47, 2)]], "the span of writer 1 at token 1 with stride 2 has 47 tokens; of 96 it must have 48"),
])
def test_wrong_tokens_are_named(address, rng, spans, text):
    tensors, name = tensors_of(rng), str(uuid.uuid4())
    own = contiguous(96, 2)
    writers = [ringattn.Writer(i, 2, spans[i], own[i], 96, 96) for i in range(2)]
    for error in fail(address, [call_of(tensors, writer, name) for writer in writers]):
        assert isinstance(error, ringattn.InvalidArgumentError), error
        assert any(v.field == "transport.writer.q" and text in v.description for v in error.violations), error


def test_invalid_writers_are_named(client, rng):
    tensors = tensors_of(rng)
    good = contiguous(96, 2)[0]

    def error_of(writer, **options):
        with pytest.raises(ringattn.InvalidArgumentError) as caught:
            client.forward(**{key: value[:, :48] for key, value in tensors.items()}, writer=writer,
                           **{"request_id": "bad-writer", **options})
        return str(caught.value)

    half = ringattn.Writer(0, 2, good, good, 96, 96)
    assert "transport.writer.index" in error_of(ringattn.Writer(2, 2, good, good, 96, 96))
    assert "transport.writer.count" in error_of(ringattn.Writer(0, 65, good, good, 96, 96))
    assert "request_id is empty" in error_of(half, request_id="")
    assert "relay" in error_of(half, transport="relay")
    assert "transport.writer.q[0]" in error_of(ringattn.Writer(0, 2, [(60, 48)], good, 96, 96))
    with pytest.raises(ringattn.InvalidArgumentError, match="writer.q: has 48 tokens; q has 96 rows"):
        client.forward(**tensors, writer=half, request_id="bad-writer")
    with pytest.raises(TypeError, match="writer"):
        client.forward(**tensors, writer=(0, 2), request_id="bad-writer")


@pytest.mark.parametrize("change, text", [
    ({"q": None}, "writer.q: is None; must be a sequence"), ({"kv": 3}, "writer.kv: is 3; must be a sequence"),
    ({"q": [5]}, r"writer.q: is \[5\]; must be a sequence"), ({"q": [(0, 48, -1)]}, r"writer.q\[0\]: is \(0, 48, -1\)"),
    ({"kv": [(0, 8), (8,)]}, r"writer.kv\[1\]: is \(8,\); must be"), ({"q": [(0, 1.5)]}, r"writer.q\[0\]: is 1.5"),
    ({"index": "0"}, "writer.index: is '0'"), ({"count": 2.0}, "writer.count: is 2.0"),
    ({"seq_len_q": None}, "writer.seq_len_q: is None"), ({"seq_len_kv": 1e3}, "writer.seq_len_kv: is 1000.0"),
])
def test_arguments_of_a_writer(change, text):
    given = {"index": 0, "count": 2, "q": [(0, 48)], "kv": [(0, 48)], "seq_len_q": 96, "seq_len_kv": 96}
    with pytest.raises(ringattn.InvalidArgumentError, match=f"^INVALID_ARGUMENT: {text}"):
        ringattn.Writer(**{**given, **change})


def test_a_writer_is_a_value():
    """Spans may be of any iterable, and are read once. Writers are equal, hashed, copied and pickled by value."""
    writer = ringattn.Writer(0, np.int64(2), (span for span in [(0, 24), (72, 24)]), np.array([[0, 48, 1]]), 96, 96)
    same = ringattn.Writer(0, 2, [(0, 24, 1), (72, 24, 1)], [(0, 48)], 96, 96)
    assert writer == same and hash(writer) == hash(same) and writer.header() == same.header()
    assert writer.rows("q") == writer.rows("q") == 48
    assert pickle.loads(pickle.dumps(writer)) == copy.deepcopy(writer) == writer


def test_cancelling_the_request_ends_the_call_of_all(address):
    long = {key: np.zeros((1, 40000, 8, 64), np.float32) for key in ("q", "k", "v")}
    writers, name = writers_of("contiguous", 2, 40000, 40000), str(uuid.uuid4())
    started = threading.Event()
    with connections(address, 2) as clients, concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(call_of(long, writers[0], name, deadline=60.0,
                                    on_progress=lambda progress: progress.state == "computing" and started.set()),
                            0, clients[0])
        second = pool.submit(call_of(long, writers[1], name, deadline=60.0), 1, clients[1])
        assert started.wait(60)
        clients[1].cancel_operation(name)
        for call in (first, second):
            error = call.exception(60)
            assert isinstance(error, ringattn.CancelledError), error


def test_a_process_that_dies_ends_the_call_of_all(address):
    """SIGKILL of a writer while the request computes. The other retries, and reports the missing writer."""
    long = {key: np.zeros((1, 40000, 8, 64), np.float32) for key in ("q", "k", "v")}
    writers, name = writers_of("contiguous", 2, 40000, 40000), str(uuid.uuid4())
    program = f"""
import numpy as np, ringattn
z = np.zeros((1, 20000, 8, 64), np.float32)
writer = ringattn.Writer(1, 2, [(20000, 20000)], [(20000, 20000)], 40000, 40000)
with ringattn.connect({address!r}) as client:
    client.forward(z, z, z, writer=writer, request_id={name!r})
"""
    child = subprocess.Popen([sys.executable, "-c", program])

    def on_progress(progress):
        if progress.state == "computing" and child.poll() is None:
            child.kill()

    with connections(address, 1) as (client,), pytest.raises(ringattn.RingattnError) as caught:
        call_of(long, writers[0], name, deadline=15.0, on_progress=on_progress)(0, client)
    child.wait()
    assert caught.value.reason in ("WRITER_LOST", "WRITER_MISSING") or isinstance(
        caught.value, ringattn.DeadlineExceededError), caught.value
    assert child.returncode == -9


def test_a_later_stream_replaces_a_writer(address, rng):
    """The first process with index 0 gets ABORTED, retries with the same request, and replaces the other in turn. Both
    end with a typed error, or with the result if they are alone with writer 1."""
    tensors, writers, name = tensors_of(rng), writers_of("zigzag", 2, 96, 96), str(uuid.uuid4())
    calls = [call_of(tensors, writers[0], name, deadline=5.0) for _ in range(2)]
    for error in fail(address, calls):
        assert isinstance(error, (ringattn.AbortedError, ringattn.DeadlineExceededError)), error
        assert error.reason in ("WRITER_REPLACED", "WRITER_LOST", "DEADLINE_EXCEEDED", ""), error

"""K/V caches through real processes with plain stubs: every result against numpy in fp64."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import grpc
import numpy as np
import pytest

from attention import details
from cluster import open_descriptors, resident_bytes, wait_until
from direct_ring import make_direct_ring, metrics  # noqa: F401
from kv_ring import WAYS, opened, ring  # noqa: F401
from kv import (DIRECT, HOST, RELAY, Group, Model, Row, Spec, Writer, create, delete, direct_metadata,
                get, service)
from stubs import ROOT, cluster_pb2, kv_cache_pb2 as kv

LONG = os.environ.get("RINGATTN_KV_LOAD") == "full"


def fails(code, reason, call):
    with pytest.raises(grpc.RpcError) as error:
        call()
    assert error.value.code() == code, error.value.details()
    assert details(error.value)["ErrorInfo"].reason == reason, error.value.details()
    return error.value


def refused(writer, begin):
    """The refusals of a step, as (row, reason)."""
    answer = writer.begin(begin)
    assert answer.HasField("refused"), answer
    assert answer.refused.step == begin.step
    return [(row.row, row.reason) for row in answer.refused.rows]


# ------------------------------------------------------------------ results


def test_the_example_with_plain_stubs(ring):
    program = ROOT / "client/examples/kv_cache_stubs.py"
    stubs = pathlib.Path(kv.__file__).parents[2]
    done = subprocess.run([sys.executable, program, ring.address], env={**os.environ, "PYTHONPATH": str(stubs)},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 prompt tokens and 1 decoded token are exact\n"


def test_the_example_with_plain_stubs_in_go(ring, tmp_path):
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    module = tmp_path / "go"
    shutil.copytree(ROOT / "client/examples/go", module)
    made = subprocess.run([module / "generate.sh", ROOT / "proto", ROOT / ".deps/googleapis"],
                          capture_output=True, text=True, timeout=600)
    if "dial tcp" in made.stderr:
        pytest.skip("Go modules cannot be downloaded")
    assert made.returncode == 0, made.stderr
    done = subprocess.run(["go", "run", "./kv_cache", ring.address], cwd=module, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "20 prompt tokens and 1 decoded token are exact\n"


@WAYS
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_prefill_and_decode(opened, transport, world_size):
    writer, model = opened(Spec([Group([0, 1], heads=8, kv_heads=4)]), transport,
                           world_size=world_size)
    assert writer.placement.head_parts == world_size
    model.step(writer, [Row(1, 37)])
    model.step(writer, [Row(1, 90), Row(2, 5)])  # a chunk of a prompt next to another prompt
    for _ in range(6):
        model.step(writer, [Row(1, 1), Row(2, 1)])
    assert model.length(1) == 133


@WAYS
@pytest.mark.parametrize("heads,kv_heads,world_size,parts", [
    (4, 2, 4, (2, 2)), (4, 1, 4, (1, 4)), (6, 3, 2, (1, 2))])
def test_position_parts(opened, transport, heads, kv_heads, world_size, parts):
    spec = Spec([Group([0], heads=heads, kv_heads=kv_heads)])
    writer, model = opened(spec, transport, world_size=world_size)
    assert (writer.placement.head_parts, writer.placement.position_parts) == parts
    model.step(writer, [Row(1, 50)])
    for _ in range(20):
        model.step(writer, [Row(1, 1), Row(2, 1)])


@WAYS
@pytest.mark.parametrize("kv_heads,parts", [(1, (1, 4)), (2, (2, 2))])
def test_the_coordinator_chooses_position_parts_for_long_caches(ring, opened, transport, kv_heads, parts):
    ring.even_rates()
    spec = Spec([Group([0], heads=32, kv_heads=kv_heads, dim=64)], block_tokens=64, blocks=1024)
    writer, model = opened(spec, transport, divide_blocks=True)
    placement = writer.placement
    assert (placement.head_parts, placement.position_parts) == parts, placement.reason
    assert placement.block_tokens == 64 // parts[1]
    assert "with 4 workers (predicted); " in placement.reason
    info = get(ring, writer.cache_id)
    assert info.spec.block_tokens == placement.block_tokens and info.spec.blocks == 1024
    assert info.bytes_per_worker == 1024 * 64 * kv_heads * 128 * 4 // 4  # a quarter of the cache
    for _ in range(8):
        model.step(writer, [Row(1, 20)])  # a step ring's slot holds no more
    for _ in range(20):
        model.step(writer, [Row(1, 1), Row(2, 1)])


def test_short_caches_use_fewer_workers(opened):
    for kv_heads in (1, 2):
        short = Spec([Group([0], heads=4, kv_heads=kv_heads)], block_tokens=64, blocks=1)
        writer, _ = opened(short, divide_blocks=True)
        assert writer.world_size == 1 and writer.placement.block_tokens == 64
        assert "the fewest workers that have room" in writer.placement.reason


def test_parts_are_not_chosen_unless_they_may_divide_blocks(opened):
    spec = Spec([Group([0], heads=32, kv_heads=1, dim=64)], block_tokens=64, blocks=1024)
    writer, _ = opened(spec)
    assert writer.world_size == 1 and writer.placement.block_tokens == 64


def test_parts_divide_blocks_that_the_client_allocates(opened):
    """A block of the table holds block_tokens entries, with position parts as without them."""
    spec = Spec([Group([0], heads=4, kv_heads=1)], block_tokens=64, blocks=8, numbering=kv.KV_NUMBERING_BLOCKS)
    writer, model = opened(spec, DIRECT, world_size=4, divide_blocks=True)
    assert (writer.placement.position_parts, writer.placement.block_tokens) == (4, 16)
    model.step(writer, [Row(1, 100, tables=[(0, 0, [7, 2])])])  # 100 entries in two blocks of 64
    for length in range(100, 128):
        model.step(writer, [Row(1, 1, keep=length)])
    model.step(writer, [Row(1, 1, keep=128, tables=[(0, 2, [5])])])
    assert refused(writer, model.begin(writer.next_step, [Row(1, 64, keep=129)]))  # a fourth block is missing


@WAYS
@pytest.mark.parametrize("group", [
    dict(window=5), dict(softcap=2.0), dict(causal=False),
    dict(sinks=np.array([[0.5, -1.0, 2.0, 0.0], [1.0, 0.25, -2.0, 3.0]]))],
    ids=["window", "softcap", "non_causal", "sinks"])
def test_masks_and_scores(opened, transport, group):
    writer, model = opened(Spec([Group([0, 1], **group)]), transport, world_size=2)
    model.step(writer, [Row(1, 40)])
    for _ in range(5):
        model.step(writer, [Row(1, 1), Row(2, 3)])


def test_groups_of_layers_share_blocks(opened):
    spec = Spec([Group([0, 2], window=16), Group([1, 3], heads=2, kv_heads=1, dim=32)])
    writer, model = opened(spec, world_size=1)
    for _ in range(8):
        model.step(writer, [Row(1, 17), Row(2, 2)])


def test_half_precision(opened):
    writer, model = opened(Spec(dtype=np.float16), world_size=2)
    for tokens in (30, 1, 1):
        model.step(writer, [Row(1, tokens)])


def test_windows_give_blocks_back(opened):
    writer, model = opened(Spec([Group([0], window=16)], blocks=6), world_size=1)
    for _ in range(40):  # 320 entries in 96
        model.step(writer, [Row(1, 8)])


@WAYS
def test_reads_only_and_imports(opened, transport):
    writer, model = opened(transport=transport, world_size=2)
    model.step(writer, [Row(1, 20, queries=0)])  # append without queries
    model.step(writer, [Row(1, 0, queries=4)])   # the last four entries ask again
    model.step(writer, [Row(1, 3, queries=2)])


@WAYS
def test_fork_rollback_and_drop(opened, transport):
    writer, model = opened(transport=transport, world_size=2)
    model.step(writer, [Row(1, 40)])
    model.fork(1, 2, 30)
    model.fork(1, 3, 40)
    forks = [kv.KvCommand(fork=kv.KvFork(source=1, target=2, length=30)),
             kv.KvCommand(fork=kv.KvFork(source=1, target=3, length=40))]
    model.step(writer, [Row(2, 2), Row(3, 1)], forks)
    model.step(writer, [Row(1, 1), Row(2, 1), Row(3, 1)])
    model.step(writer, [Row(1, 3, keep=25), Row(3, 2, keep=39)])  # rejected drafts
    model.step(writer, [Row(1, 1), Row(2, 1), Row(3, 1)])
    model.drop(1)
    model.step(writer, [Row(2, 1)], [kv.KvCommand(drop=kv.KvDrop(sequences=[1]))])
    model.step(writer, [Row(1, 5), Row(3, 1)])  # the number is free again


@WAYS
def test_blocks_numbering(opened, transport):
    spec = Spec([Group([0, 1])], blocks=8, numbering=kv.KV_NUMBERING_BLOCKS)
    writer, model = opened(spec, transport, world_size=2)
    model.step(writer, [Row(1, 20, tables=[(0, 0, [5, 2])])])
    model.step(writer, [Row(1, 20, tables=[(0, 2, [7])]), Row(2, 3, tables=[(0, 0, [0])])])
    # Another request starts after a prefix that it shares.
    model.fork(1, 3, 32)
    model.step(writer, [Row(3, 4, tables=[(0, 0, [5, 2, 1])]), Row(1, 1)])
    model.step(writer, [Row(3, 1), Row(1, 1), Row(2, 1)])


def test_all_transports_give_the_same_bits(ring):
    results = []
    for transport in (RELAY, DIRECT, HOST):
        spec = Spec([Group([0], heads=8, kv_heads=4)])
        cache = create(ring, spec, world_size=4)
        writer = Writer(ring, cache.cache_id, spec, transport)
        model = Model(spec, seed=7)
        bits = []
        for step in range(5):
            begin = model.begin(step + 1, [Row(1, 9 if step == 0 else 1)])
            assert writer.begin(begin).HasField("accepted")
            q, k, v = (model.draw(begin.rows[0].append_tokens, heads, 16) for heads in (8, 4, 4))
            out, lse = writer.call(begin, 0, q, k, v)
            model.sequences[1] = {0: (np.zeros((begin.rows[0].keep_length + len(k), 4, 16)),) * 2}
            bits.append((out.tobytes(), lse.tobytes()))
        results.append(bits)
        writer.close()
        delete(ring, cache.cache_id)
    assert results[0] == results[1] == results[2]


# --------------------------------------------------------------- step protocol


@WAYS
def test_everything_of_a_step_may_be_sent_again(opened, transport):
    writer, model = opened(transport=transport, world_size=2)
    model.step(writer, [Row(1, 10)])
    begin = model.begin(2, [Row(1, 2)])
    first, again = writer.begin(begin), writer.begin(begin)
    assert first.accepted.tables_crc32c == again.accepted.tables_crc32c
    group = writer.spec.groups[0]
    q, k, v = (model.draw(2, h, group.dim) for h in (group.heads, group.kv_heads, group.kv_heads))
    for layer in writer.spec.layers:
        one, two = writer.call(begin, layer, q, k, v), writer.call(begin, layer, q, k, v)
        assert one[0].tobytes() == two[0].tobytes()
    writer.commit(2)
    writer.commit(2)


@WAYS
def test_every_bad_row_is_named_and_nothing_is_done(opened, transport):
    writer, model = opened(Spec(blocks=8), transport, world_size=2)
    model.step(writer, [Row(1, 20), Row(2, 3)])
    row = kv.StepRow
    fork = lambda source, target, length: kv.KvCommand(
        fork=kv.KvFork(source=source, target=target, length=length))
    cases = [
        ([row(sequence=1, expected_length=19, keep_length=19, append_tokens=1, q_tokens=1)],
         [], [(0, "LENGTH_MISMATCH")]),
        ([row(sequence=1, expected_length=20, keep_length=21, append_tokens=1, q_tokens=1)],
         [], [(0, "KEEP_BEYOND_LENGTH")]),
        ([row(sequence=9, expected_length=4, keep_length=4, append_tokens=1, q_tokens=1)],
         [], [(0, "UNKNOWN_SEQUENCE")]),
        ([row(sequence=1, expected_length=20, keep_length=20, append_tokens=1, q_tokens=1)] * 2,
         [], [(1, "ROW_TWICE")]),
        ([row(sequence=3, append_tokens=200, q_tokens=1)], [], [(0, "KV_FULL")]),
        ([row(sequence=1, expected_length=20, keep_length=20, append_tokens=1, q_tokens=1,
              tables=[kv.KvTable(group=0, first=0, blocks=[1])])], [], [(0, "BAD_ROW")]),
        ([], [fork(9, 4, 1)], [(0, "UNKNOWN_SEQUENCE")]),
        ([], [fork(1, 2, 1)], [(0, "SEQUENCE_EXISTS")]),
    ]
    for rows, commands, reasons in cases:
        begin = kv.StepBegin(step=2, rows=rows, commands=commands)
        assert refused(writer, begin) == reasons
    # Good rows next to a bad one are not executed.
    bad = kv.StepBegin(step=2, rows=[
        row(sequence=2, expected_length=3, keep_length=3, append_tokens=5, q_tokens=5),
        row(sequence=1, expected_length=7, keep_length=7, append_tokens=1, q_tokens=1)])
    assert refused(writer, bad) == [(1, "LENGTH_MISMATCH")]
    model.step(writer, [Row(1, 1), Row(2, 1)])


@WAYS
def test_calls_of_a_refused_step_are_skipped(opened, transport):
    writer, model = opened(transport=transport, world_size=2)
    model.step(writer, [Row(1, 10)])
    bad = model.begin(2, [Row(1, 1, expected=9)])
    for stream in writer.streams:
        stream.send(kv.StepRequest(begin=bad))
        stream.send(kv.StepRequest(call=kv.LayerCall(step=2, layer=0, q=b"of any size")))
    for stream in writer.streams:
        assert stream.read().HasField("refused")
        if transport == HOST:
            assert stream.read() == kv.StepResponse()
    model.step(writer, [Row(1, 1)])


def test_bad_tables_are_named(opened):
    spec = Spec([Group([0])], blocks=4, numbering=kv.KV_NUMBERING_BLOCKS)
    writer, model = opened(spec, world_size=1)
    model.step(writer, [Row(1, 10, tables=[(0, 0, [1])])])
    begin = model.begin(2, [Row(2, 3, tables=[(0, 0, [4])])])
    assert refused(writer, begin) == [(0, "BAD_BLOCK")]
    begin = model.begin(2, [Row(2, 3, tables=[(0, 0, [2])]), Row(3, 3, tables=[(0, 0, [2])])])
    assert (1, "BLOCK_WRITTEN_TWICE") in refused(writer, begin)


def test_entries_before_a_window_cannot_come_back(opened):
    writer, model = opened(Spec([Group([0], window=8)]), world_size=1)
    for _ in range(6):
        model.step(writer, [Row(1, 16)])
    assert refused(writer, model.begin(7, [Row(1, 1, keep=20)])) == [(0, "BEHIND_WINDOW")]


@pytest.mark.parametrize("message,code,reason", [
    (kv.StepBegin(step=5), grpc.StatusCode.FAILED_PRECONDITION, "STEP_ORDER"),
    (kv.LayerCall(step=1, layer=0), grpc.StatusCode.FAILED_PRECONDITION, "STEP_ORDER"),
])
@WAYS
def test_steps_in_the_wrong_order_end_the_stream(opened, transport, message, code, reason):
    writer, _ = opened(transport=transport, world_size=1)
    name = "begin" if isinstance(message, kv.StepBegin) else "call"
    fails(code, reason, lambda: writer.streams[0].ask(kv.StepRequest(**{name: message})))


@WAYS
@pytest.mark.parametrize("change,reason", [
    (dict(layer=9), "BAD_CALL"), (dict(q=b"x"), "BAD_CALL"), (dict(k=b"", v=b""), "BAD_CALL"),
], ids=["layer", "size", "read_first"])
def test_bad_calls_end_the_stream_but_not_the_cache(ring, opened, transport, change, reason):
    writer, model = opened(Spec([Group([0])]), transport, world_size=1)
    begin = model.begin(1, [Row(1, 2)])
    writer.begin(begin)
    call = kv.LayerCall(step=1, layer=0, q=bytes(2 * 4 * 16 * 4), k=bytes(2 * 2 * 16 * 4),
                        v=bytes(2 * 2 * 16 * 4))
    for field, value in change.items():
        setattr(call, field, value)
    fails(grpc.StatusCode.INVALID_ARGUMENT, reason,
          lambda: writer.streams[0].ask(kv.StepRequest(call=call)))
    topology = ring.topology()
    assert sum(w.kv_caches for w in topology.workers) >= 1


def test_another_begin_under_the_same_number_is_a_conflict(opened):
    writer, model = opened(world_size=1)
    writer.begin(model.begin(1, [Row(1, 2)]))
    fails(grpc.StatusCode.FAILED_PRECONDITION, "STEP_CONFLICT",
          lambda: writer.begin(model.begin(1, [Row(1, 3)])))


# ----------------------------------------------------------------- two writers


@WAYS
def test_the_next_writer_fences_the_older_one(ring, opened, transport):
    spec = Spec()
    cache = create(ring, spec, world_size=2)
    first, model = Writer(ring, cache.cache_id, spec, transport), Model(spec)
    model.step(first, [Row(1, 10)])
    writer = Writer(ring, cache.cache_id, spec, transport, answered_step=1)
    assert writer.next_step == 2 and writer.lengths() == {1: 10}
    for stream in first.streams:
        stream.send(kv.StepRequest(begin=model.begin(2, [Row(1, 1)])))
        error = stream.end()
        assert error.code() == grpc.StatusCode.ABORTED, error.details()
        assert details(error)["ErrorInfo"].reason == "KV_FENCED"
    model.step(writer, [Row(1, 1)])
    first.close()
    writer.close()
    delete(ring, cache.cache_id)


@WAYS
def test_a_step_without_answers_is_undone_and_a_claimed_one_is_kept(ring, transport):
    spec = Spec([Group([0])])
    cache = create(ring, spec, world_size=2)
    writer, model = Writer(ring, cache.cache_id, spec, transport), Model(spec)
    model.step(writer, [Row(1, 10)])
    writer.begin(model.begin(2, [Row(1, 5, keep=8)]))  # begun, never called
    writer.close()
    writer = Writer(ring, cache.cache_id, spec, transport)
    assert writer.next_step == 2
    length = writer.lengths()[1]
    assert length == 8  # entries from keep_length on may be overwritten
    for layer, (k, v) in model.sequences[1].items():
        model.sequences[1][layer] = k[:8], v[:8]
    model.step(writer, [Row(1, 2)])
    writer.close()
    # The step has all its answers, but the next one was not begun.
    writer = Writer(ring, cache.cache_id, spec, transport, answered_step=2)
    assert writer.next_step == 3 and writer.lengths() == {1: 10}
    model.step(writer, [Row(1, 1)])
    writer.close()
    fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST",
          lambda: Writer(ring, cache.cache_id, spec, transport, answered_step=9))
    delete(ring, cache.cache_id)


def test_wrong_tokens_are_rejected(ring):
    spec = Spec([Group([0])])
    cache = create(ring, spec, world_size=1)
    answer = service(ring).OpenCache(kv.OpenCacheRequest(cache_id=cache.cache_id))
    for token in (b"", b"x" * 32):
        hello = kv.StepHello(cache_id=cache.cache_id, epoch=answer.epoch, token=token)
        call = service(ring).Steps(iter([kv.StepRequest(hello=hello)]))
        fails(grpc.StatusCode.UNAUTHENTICATED, "BAD_TOKEN", lambda: next(call))
    direct = Writer(ring, cache.cache_id, spec, DIRECT)
    ticket = direct.answer.shards[0]
    with grpc.insecure_channel(ticket.endpoints[0]) as channel:
        from stubs import kv_cache_pb2_grpc
        hello = kv.StepHello(cache_id=cache.cache_id, epoch=direct.answer.epoch, token=b"x" * 32)
        call = kv_cache_pb2_grpc.KvShardServiceStub(channel).Steps(
            iter([kv.StepRequest(hello=hello)]), metadata=direct_metadata(hello))
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    direct.close()
    delete(ring, cache.cache_id)


# ---------------------------------------------------------------- life of a cache


def test_create_is_idempotent_by_request_id(ring):
    spec = Spec()
    first = create(ring, spec, request_id="the-same", world_size=2)
    assert create(ring, spec, request_id="the-same", world_size=2) == first
    error = fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST",
                  lambda: create(ring, Spec(blocks=5), request_id="the-same", world_size=2))
    assert details(error)["BadRequest"].field_violations[0].field == "request_id"
    delete(ring, first.cache_id)


@pytest.mark.parametrize("spec,fields,code,reason,field", [
    (Spec([Group([0], heads=4, kv_heads=3)]), {}, "INVALID_ARGUMENT", "INVALID_REQUEST",
     "spec.groups[0].num_kv_heads"),
    (Spec([Group([0]), Group([0])]), {}, "INVALID_ARGUMENT", "INVALID_REQUEST",
     "spec.groups[1].layers[0]"),
    (Spec(block_tokens=17), {}, "INVALID_ARGUMENT", "INVALID_REQUEST", "spec.block_tokens"),
    (Spec(blocks=0), {}, "INVALID_ARGUMENT", "INVALID_REQUEST", "spec.blocks"),
    (Spec(label="é"), {}, "INVALID_ARGUMENT", "INVALID_REQUEST", "spec.label"),
    (Spec(), dict(world_size=0), "INVALID_ARGUMENT", "INVALID_REQUEST", "world_size"),
    (Spec(), dict(members=["nobody"]), "FAILED_PRECONDITION", "MEMBER_NOT_READY", "members"),
    (Spec(), dict(world_size=40), "UNAVAILABLE", "WORKERS_MISSING", None),
    (Spec(), dict(world_size=4, divide_blocks=True), "INVALID_ARGUMENT", "INVALID_REQUEST", "spec.block_tokens"),
    (Spec(blocks=1 << 22, block_tokens=256), {}, "RESOURCE_EXHAUSTED", "KV_MEMORY", None),
])
def test_what_cannot_be_created_is_refused_by_name(ring, spec, fields, code, reason, field):
    error = fails(grpc.StatusCode[code], reason, lambda: create(ring, spec, **fields))
    if field is not None:
        violations = details(error)["BadRequest"].field_violations
        assert [v.field for v in violations] == [field]
    if code == "UNAVAILABLE":
        assert "RetryInfo" in details(error)


def test_get_list_and_delete(ring):
    caches = [create(ring, Spec(label=f"number {i}"), world_size=1) for i in range(5)]
    ids, token = [], ""
    while True:
        page = service(ring).ListCaches(kv.ListCachesRequest(page_size=2, page_token=token))
        ids += [info.cache_id for info in page.caches]
        token = page.next_page_token
        if not token:
            break
    assert sorted(ids) == ids and {c.cache_id for c in caches} <= set(ids)
    info = get(ring, caches[0].cache_id)
    assert info.spec.label == "number 0" and not info.open and not info.HasField("ended")
    assert 55 <= info.expires_in.seconds <= 60
    assert info.bytes_per_worker == caches[0].bytes_per_worker == 2 * 64 * 16 * 2 * 2 * 16 * 4
    for cache in caches:
        delete(ring, cache.cache_id)
        delete(ring, cache.cache_id)  # again
        assert get(ring, cache.cache_id).ended.code == 9
        fails(grpc.StatusCode.FAILED_PRECONDITION, "KV_DELETED",
              lambda: Writer(ring, cache.cache_id, Spec()))
    for call in (get, delete):
        fails(grpc.StatusCode.NOT_FOUND, "KV_NOT_FOUND", lambda: call(ring, b"x" * 16))


def test_topology_and_server_info_show_caches(ring):
    before = [w.kv_cache_bytes for w in ring.topology().workers]
    cache = create(ring, Spec(), world_size=2)
    workers = ring.topology().workers
    added = [w.kv_cache_bytes - b for w, b in zip(workers, before)]
    assert sorted(added) == [0, 0, cache.bytes_per_worker, cache.bytes_per_worker]
    assert all(w.reserved_bytes >= w.kv_cache_bytes for w in workers)
    assert all(w.max_kv_cache_bytes > 0 for w in workers)
    delete(ring, cache.cache_id)
    limits = ring.cluster.GetServerInfo(cluster_pb2.GetServerInfoRequest()).limits
    assert limits.max_kv_caches == 4096 and limits.default_kv_ttl.seconds == 60
    assert limits.max_step_rows == 4096 and limits.max_step_bytes == 64 << 20


def test_a_lease_ends_unless_steps_or_holds_renew_it(make_ring):
    ring = make_ring(workers=1, server_flags=["--residual_hold_grace=2s"])
    spec = Spec([Group([0])])
    ttl = dict(ttl=dict(seconds=2))
    idle, used, held = (create(ring, spec, **ttl) for _ in range(3))
    stop = []

    def holds():
        yield kv.HoldCachesRequest(cache_ids=[held.cache_id, b"x" * 16])
        while not stop:
            time.sleep(0.05)

    hold = service(ring).HoldCaches(holds())
    first = next(hold)
    assert [status.ended_reason for status in first.caches] == ["", "KV_NOT_FOUND"]
    writer, model = Writer(ring, used.cache_id, spec), Model(spec)
    for _ in range(16):
        model.step(writer, [Row(1, 1)])
        time.sleep(0.25)
    assert get(ring, idle.cache_id).ended.code == 9
    assert not get(ring, used.cache_id).HasField("ended")
    assert not get(ring, held.cache_id).HasField("ended")
    error = writer.streams[0].end()
    assert details(error)["ErrorInfo"].reason == "KV_EXPIRED"
    stop.append(True)
    wait_until(lambda: get(ring, held.cache_id).HasField("ended"), 8, "the hold's grace")
    fails(grpc.StatusCode.FAILED_PRECONDITION, "KV_EXPIRED",
          lambda: Writer(ring, held.cache_id, spec))
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 5, "memory")


def test_many_caches_and_sequences_leave_everything_flat(make_ring):
    ring = make_ring(workers=2)
    spec = Spec([Group([0], heads=2, kv_heads=2, dim=16)], blocks=4)
    caches = 10_000 if LONG else 1_000
    sequences = 1_000_000 if LONG else 100_000

    def usage():
        """Of the coordinator and of each worker: resident bytes, descriptors, threads."""
        pids = [ring.server.pid, *(w.pid for w in ring.workers.values())]
        return [(resident_bytes(pid), open_descriptors(pid), len(os.listdir(f"/proc/{pid}/task")))
                for pid in pids]

    def make_caches(count):
        for _ in range(count):
            delete(ring, create(ring, spec, world_size=2).cache_id)

    def make_sequences(count):
        # A step's drops free blocks for the next step.
        cache = create(ring, Spec([Group([0], heads=2, kv_heads=2)], blocks=512), world_size=2)
        writer = Writer(ring, cache.cache_id, spec)
        each, number = 200, 1
        for first in range(0, count, each):
            ids = range(first, first + each)
            rows = [kv.StepRow(sequence=i, append_tokens=1, q_tokens=0) for i in ids]
            begin = kv.StepBegin(step=number, rows=rows)
            if first:
                begin.commands.add(drop=kv.KvDrop(sequences=range(first - each, first)))
            assert writer.begin(begin).HasField("accepted")
            k = np.zeros((each, 2, 16), np.float32)
            writer.call(begin, 0, np.zeros((0, 2, 16), np.float32), k, k, kv.KV_OUTPUT_NONE)
            number += 1
        writer.close()
        delete(ring, cache.cache_id)

    make_caches(caches // 10)
    make_sequences(sequences // 10)
    before = usage()
    make_caches(caches)
    make_sequences(sequences)
    wait_until(lambda: not any(w.reserved_bytes for w in ring.topology().workers), 10, "memory")
    after = usage()
    print(f"bytes, descriptors, threads: before {before}, after {after}")
    for now, then in zip(after, before):
        assert now[0] - then[0] < (24 << 20), (before, after)
        assert abs(now[1] - then[1]) <= 4, (before, after)
        assert now[2] - then[2] <= 16, (before, after)

"""Calls that travel as several requests: --streams."""

import json

import pytest

from test_cli import cli

# Each shape is split into blocks of queries. A window with a right part moves with the
# block; of a long q some rows, or all of a block, see no key.
SHAPES = {
    "equal": ["--seq_len=900", "--seq_len_kv=900"],
    "more_keys": ["--seq_len=500", "--seq_len_kv=1300"],
    "more_queries": ["--seq_len=1300", "--seq_len_kv=500"],
}
MASKS = {
    "full": [],
    "causal": ["--causal"],
    "window": ["--window=100,40"],
    "left": ["--window=64,-1"],
    "right": ["--window=-1,30"],
    "causal_window": ["--causal", "--window=100,7", "--softcap=20"],
}


def call(command, ring, source, target, *flags, streams=3, code=0):
    done = cli(command, f"--server={ring.address}", f"--input={source}", f"--output={target}",
               f"--streams={streams}", "--json", *flags, code=code)
    return json.loads(done.stdout)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_queries_are_right(ring, tmp_path, shape, mask):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--dtype=bf16", "--seed=7", *SHAPES[shape])
    report = call("forward", ring, source, forward, *MASKS[mask], "--schedule=ring",
                  "--world_size=4")
    assert report["streams"] == 3 and len(report["parts"]) == 3
    assert report["plan"]["world_size"] == 4 and report["plan"]["schedule"] == "ring"
    ids = [part["request_id"] for part in report["parts"]]
    assert ids == [f"{report['request_id']}/{i}" for i in range(3)]
    cli("verify", f"--input={source}", f"--output={forward}", "--rows=2000", *MASKS[mask])


def test_the_report_says_what_was_sent(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=3000", "--heads=2",
        "--head_dim=64", "--dtype=fp32", "--seed=7")
    once = call("forward", ring, source, forward, streams=1)
    assert once["streams"] == 1 and "parts" not in once
    split = call("forward", ring, source, forward, f"--trace={tmp_path}/t.json", streams=3)
    sent = lambda report: report["bytes"]["relay"]
    row = 2 * 64 * 4
    assert sent(once)["up"] == 3 * 3000 * row
    assert sent(split)["up"] == (3000 + 3 * 2 * 3000) * row  # all keys to every block
    assert sent(split)["up"] == sum(sent(part)["up"] for part in split["parts"])
    assert sent(split)["down"] == sent(once)["down"]
    assert split["flops"] == once["flops"]
    assert split["client_seconds"]["finished"] == pytest.approx(max(
        part["began_seconds"] + part["client_seconds"]["finished"] for part in split["parts"]))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"call 0", "call 1", "call 2"} <= rows


def test_batch_rows_forward_and_backward(ring, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", "--batch=3", "--seq_len=700", "--seq_len_kv=600",
        "--heads=4", "--kv_heads=2", "--head_dim=32", "--dtype=fp16", "--seed=7", "--with_dout")
    for mask in MASKS.values():
        report = call("forward", ring, source, forward, *mask)
        assert report["streams"] == 3
        call("backward", ring, source, backward, *mask)
        cli("verify", f"--input={source}", f"--output={backward}", f"--forward={forward}", *mask)
    # No more requests than there are batch rows.
    assert call("forward", ring, source, forward, streams=8)["streams"] == 3


# Heads lie between one another in memory. 5 K/V heads do not deal out evenly to 3 requests.
@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_groups_of_heads_backward(ring, tmp_path, dtype):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=900", "--seq_len_kv=1100",
        "--heads=10", "--kv_heads=5", "--head_dim=40", "--head_dim_v=24", f"--dtype={dtype}",
        "--seed=7", "--with_dout")
    for mask in MASKS.values():
        call("forward", ring, source, forward, *mask, streams=1)
        report = call("backward", ring, source, backward, *mask, "--schedule=ring",
                      "--world_size=4")
        assert report["streams"] == 3
        cli("verify", f"--input={source}", f"--output={backward}", f"--forward={forward}", *mask)
    sent = report["bytes"]["relay"]
    once = call("backward", ring, source, backward, *mask, streams=1)
    assert sent == once["bytes"]["relay"]  # nothing twice
    assert report["flops"] == once["flops"]
    assert call("backward", ring, source, backward, *mask, streams=8)["streams"] == 5


def test_documents_forward_and_backward(ring, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", "--documents=100,0,250,30,220",
        "--documents_kv=120,10,250,0,90", "--heads=4", "--kv_heads=2", "--head_dim=32",
        "--dtype=fp16", "--seed=7", "--with_dout")
    for mask in MASKS.values():
        report = call("forward", ring, source, forward, *mask)
        assert report["streams"] == 3
        call("backward", ring, source, backward, *mask)
        cli("verify", f"--input={source}", f"--output={backward}", f"--forward={forward}", *mask)
    assert call("forward", ring, source, forward, streams=8)["streams"] == 5


# A measured backward pass takes out and lse along.
def test_bench_verifies_in_streams(ring):
    for extra in (["--batch=1", "--seq_len=2000", "--kv_heads=1"],
                  ["--batch=3", "--seq_len=700", "--kv_heads=1", "--backward"],
                  ["--documents=500,90,700,400", "--kv_heads=1", "--backward"],
                  ["--batch=1", "--seq_len=900", "--kv_heads=4", "--backward"]):
        done = cli("bench", f"--server={ring.address}", "--heads=4", "--head_dim=64", "--causal",
                   "--streams=3", "--runs=2", "--json", *extra)
        result = json.loads(done.stdout)
        assert result["verified"]["passed"] and result["last_run"]["streams"] == 3


def test_what_cannot_be_split_is_refused_by_name(ring, tmp_path):
    source, target = tmp_path / "i.safetensors", tmp_path / "o.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=300", "--heads=2",
        "--kv_heads=1", "--head_dim=32", "--seed=7", "--with_dout")

    def refused(command, streams=2):
        error = call(command, ring, source, target, streams=streams, code=3)["error"]
        assert error["code"] == "INVALID_ARGUMENT"
        assert [violation["field"] for violation in error["violations"]] == ["streams"]
        assert not target.exists()
        return error["message"]

    assert "dk and dv" in refused("backward")
    call("backward", ring, source, target, streams=1)
    for streams in (0, 65, -1):
        done = cli("forward", f"--server={ring.address}", f"--input={source}",
                   f"--output={target}", f"--streams={streams}", code=2)
        assert "--streams" in done.stderr


def test_requests_queue_for_the_workers_memory(make_ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=16000", "--heads=8",
        "--head_dim=64", "--dtype=fp32", "--seed=7")
    flags = ["--schedule=ring", "--world_size=2", "--window=200,0", "--deadline=100s"]

    def needed(report):  # by each request on the rank that needs more
        return [max(rank["buffer_bytes"] for rank in part["plan"]["ranks"])
                for part in report["parts"]]

    ample = make_ring(workers=2)
    sizes = needed(call("forward", ample, source, forward, *flags, streams=4))
    limit = max(sizes) * 3 // 2
    assert limit < 2 * min(sizes)  # no two of them fit at a time
    tight = make_ring(workers=2, worker_flags=[f"--memory_limit={limit}"])
    report = call("forward", tight, source, forward, *flags, streams=4)
    assert report["streams"] == 4 and needed(report) == sizes
    cli("verify", f"--input={source}", f"--output={forward}", "--window=200,0")

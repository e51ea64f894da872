"""`ringattn cache` and `ringattn bench --steps`."""
import json
import subprocess

import pytest
from certificates import digest, write_clients
from cluster import CLI, Cluster, wait_until
from kv_ring import ring  # noqa: F401


def cli(address, *arguments, code=0):
    command, rest = arguments[0].split(), arguments[1:]
    run = subprocess.run([CLI, *command, f"--server={address}", "--json", *rest],
                         capture_output=True, text=True, timeout=120)
    assert run.returncode == code, run.stdout + run.stderr
    return json.loads(run.stdout) if run.stdout else run.stderr


def test_create_list_delete(ring):
    made = cli(ring.address, "cache create", "--layers=4", "--heads=8", "--kv_heads=4", "--head_dim=32",
                        "--tokens=1000", "--window=100", "--label=for the test", "--world_size=2", "--ttl=60s")
    assert made["bytes_per_worker"] == 4 * 1024 * 2 * (32 + 32) * 2  # layers, tokens, kv heads, k and v, bf16
    assert made["placement"]["head_parts"] == 2
    assert cli(ring.address, "cache delete", made["cache_id"]) == {"command": "cache delete", "deleted": 1}
    # The caches of a client without authentication are listed only on the connection that created them.
    assert cli(ring.address, "cache list") == {"command": "cache list", "caches": []}


def test_the_coordinator_chooses_parts_unless_forbidden(ring):
    ring.even_rates()
    shape = ("--heads=32", "--kv_heads=1", "--tokens=100000")
    for flags, workers, block_tokens in [((), 4, 16), (("--divide_blocks=false",), 1, 64),
                                         (("--world_size=2",), 2, 64),
                                         (("--world_size=2", "--divide_blocks=true"), 2, 32)]:
        made = cli(ring.address, "cache create", *shape, *flags)
        placement = made["placement"]
        assert (len(placement["members"]), placement["block_tokens"]) == (workers, block_tokens), placement
        assert placement["reason"]
        cli(ring.address, "cache delete", made["cache_id"])


TOKEN = "the-token-of-the-owner"


@pytest.fixture
def known(tmp_path):
    """A cluster with one known client, and the flag of its token."""
    write_clients(tmp_path / "clients.json", [{"name": "owner", "token_sha256": [digest(TOKEN)]}])
    (tmp_path / "token").write_text(TOKEN)
    directory = tmp_path / "cluster"
    directory.mkdir()
    cluster = Cluster(directory, workers=0, server_flags=[f"--clients_file={tmp_path / 'clients.json'}"])
    cluster.start_worker(0)
    yield cluster, f"--token_file={tmp_path / 'token'}"
    print(cluster.tail())
    cluster.close()


def test_a_known_client_lists_its_caches(known):
    cluster, token = known

    def create():
        run = subprocess.run([CLI, "cache", "create", f"--server={cluster.address}", "--json", token, "--tokens=1000",
                              "--label=mine"], capture_output=True, text=True, timeout=60)
        return json.loads(run.stdout).get("cache_id")  # none before the worker has joined

    cache_id = wait_until(create, 40, "a worker")
    [found] = cli(cluster.address, "cache list", token)["caches"]
    assert found["cache_id"] == cache_id and not found["open"]
    assert found["spec"]["label"] == "mine" and found["spec"]["blocks"] == "16"
    text = subprocess.run([CLI, "cache", "list", f"--server={cluster.address}", token], capture_output=True, text=True,
                          timeout=60).stdout
    assert cache_id in text and "mine" in text and "idle, expires in" in text
    cli(cluster.address, "cache delete", token, cache_id)
    assert all(cache["ended"] for cache in cli(cluster.address, "cache list", token)["caches"])


@pytest.mark.parametrize("arguments,words", [
    (("cache create",), "--tokens"), (("cache create", "--tokens=64", "--ttl=soon"), "--ttl"),
    (("cache delete", "xyz"), "hexadecimal"), (("cache",), "use one of create, list, delete")])
def test_wrong_usage(ring, arguments, words):
    run = subprocess.run([CLI, *arguments[0].split(), *arguments[1:],
                          *([f"--server={ring.address}"] if arguments != ("cache",) else [])],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and words in run.stdout + run.stderr


def test_an_unknown_cache_is_an_error(ring):
    error = cli(ring.address, "cache delete", "00" * 16, code=3)["error"]
    assert (error["code"], error["reason"]) == ("NOT_FOUND", "KV_NOT_FOUND")


@pytest.mark.parametrize("transport", ["host_memory", "direct", "relay"])
@pytest.mark.parametrize("dtype,mask", [("fp32", ["--window=50,0", "--softcap=20"]), ("bf16", []), ("fp16", [])])
def test_bench_steps(ring, transport, dtype, mask):
    report = cli(ring.address, "bench", "--steps=20", "--layers=2", "--heads=8", "--kv_heads=4", "--head_dim=32",
                          "--causal", "--seq_len=64", "--step_batches=1,3", "--step_lengths=70,300",
                          "--world_size=2", f"--dtype={dtype}", f"--transport={transport}", *mask)
    assert [(level["batch"], level["length"]) for level in report["levels"]] == [(1, 70), (1, 300), (3, 70), (3, 300)]
    element = 4 if dtype == "fp32" else 2
    for level in report["levels"]:
        assert level["verified"]["passed"] and level["verified"]["rows"] == 2 * level["batch"]
        assert level["verified"]["worst_error"] <= level["verified"]["worst_error_bound"]
        assert level["transport"] == transport and len(level["members"]) == 2
        tokens = level["batch"] * 2  # rows and layers
        assert level["sent_bytes_per_step"] == tokens * (8 + 4 + 4) * 32 * element
        assert level["received_bytes_per_step"] == tokens * 8 * 32 * element
        times = level["seconds_per_output_token"]
        assert 0 < times["p50"] <= times["p99"] and level["round_trip_seconds"]["p50"] > 0
        assert level["device_seconds"]["p50"] < level["call_seconds"]["p50"]
        assert level["tokens_per_second"]["value"] > 0
        assert ("word_round_trip_seconds" in level) == (transport == "host_memory")
        if transport == "host_memory":
            for times in level["word_round_trip_seconds"].values():
                assert 0 < times["p50"] <= times["p99"]


def test_bench_steps_chooses_host_memory(ring):
    report = cli(ring.address, "bench", "--steps=5", "--seq_len=64", "--causal", "--heads=4", "--head_dim=32")
    [level] = report["levels"]
    assert level["transport"] == "host_memory"
    assert level["transport_reason"] == "host memory: all members have the region of the step rings"


def test_bench_steps_refuses_other_options(ring):
    for arguments in (("--dropout=0.5",), ("--backward",), ("--transport=cuda_memory",), ("--step_batches=0",)):
        run = subprocess.run([CLI, "bench", f"--server={ring.address}", "--steps=2", "--seq_len=64",
                              "--causal", *arguments], capture_output=True, text=True, timeout=60)
        assert run.returncode == 2, run.stdout + run.stderr

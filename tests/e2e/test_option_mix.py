"""Options of the command line mixed at random, as users mix them: with a service's answer each result
is judged, and what one command takes the others take too. Draws keep to what is served together; what
is refused has its own tests."""

import json
import os
import random
import re

import pytest

from command_line import cli

CASES = int(os.environ.get("RINGATTN_OPTION_MIX_CASES", 24))


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    directory = tmp_path_factory.mktemp("mix")
    cluster = Cluster(directory, workers=3, worker_flags=["--local_memory=host_memory",
                                                          f"--local_socket_dir={directory}",
                                                          "--client_data_listen=127.0.0.1:0"])
    yield cluster
    print(cluster.tail())
    cluster.close()


def drawn(seed):
    """Flags of generate, of every command that computes or judges, of where, of the forward alone."""
    draw = random.Random(seed)
    often = lambda share: draw.random() < share
    made, asked, where, forward, backward = ["--with_dout", f"--seed={seed}"], [], [], [], []
    packing = draw.choice(["none", "none", "qkv", "kv"])
    heads, kv_heads = draw.choice([(4, 2), (3, 1), (6, 3), (2, 2)])
    kv_heads = heads if packing == "qkv" else kv_heads
    head_dim = draw.choice([8, 24, 40, 7])
    head_dim_v = head_dim if packing != "none" else draw.choice([head_dim, 16, 33])
    dtype = draw.choice(["fp32", "bf16", "fp16"])
    dilated = often(.2)
    is_square = dilated or packing == "qkv" or often(.4)
    documents = often(.4)
    if documents:
        queries = [draw.choice([0, 1, 33, 64, 150]) for _ in range(draw.randint(1, 4))] + [5]
        keys = queries if is_square else [draw.choice([0, 1, 40, 120]) for _ in queries]
        made += ["--documents=" + ",".join(map(str, queries)),
                 "--documents_kv=" + ",".join(map(str, keys))]
        asked += ["--lse=per_document"] if often(.3) else []
    else:
        length = draw.choice([5, 97, 200])
        made += [f"--batch={draw.choice([1, 3])}", f"--seq_len={length}",
                 f"--seq_len_kv={length if is_square else draw.choice([1, 64, 301])}"]
    made += [flag for flag in asked if "lse" in flag] + [
        f"--heads={heads}", f"--kv_heads={kv_heads}", f"--head_dim={head_dim}",
        f"--head_dim_v={head_dim_v}", f"--dtype={dtype}", f"--packing={packing}"]

    forms = ["one", "heads"] if documents else ["one", "heads", "batch", "both"]
    bias, mask = often(.4), often(.3)
    if bias:
        made += [f"--bias={draw.choice(forms)}"]
        asked += ["--bias"] + (["--bias_before_softcap"] if often(.3) else [])
        if often(.6):
            asked += ["--dbias"]
            made += ["--bias_dtype=fp32"] if dilated else []
    if mask:
        bits = ["--mask_bits"] if often(.4) else []
        made += [f"--mask={draw.choice(forms)}", *bits]
        asked += ["--mask", *bits]
    for flag in ["--sinks", "--segment_ids"]:
        if often(.3):
            made += [flag]
            asked += [flag]
    if often(.3):
        made += ["--dlse"]
        backward += ["--dlse"]
    for share, flags in [(.4, ["--causal"]), (.3, ["--window=10,3", "--window=5", "--window=0,0"]),
                         (.2, ["--softcap=3"]), (.2, ["--softmax_scale=-0.2", "--softmax_scale=0"]),
                         (.3, ["--alibi=geometric"]), (.3, ["--dropout=0.1,7", "--dropout=0.9,1"]),
                         (.2, ["--deterministic"]), (.2, ["--output_dtype=fp32"])]:
        asked += [draw.choice(flags)] if often(share) else []
    if dilated:
        asked += [draw.choice(["--dilation=16:1,64:4", "--dilation=32:3", "--dilation=8:2:1"])]

    pairs_stay = documents or dilated or "--mask_bits" in asked
    in_place = [] if (bias or mask) and pairs_stay else ["pass_q", "replicated_q"]
    schedule = draw.choice(["ring", "all_gather", "single", *in_place])
    where = [f"--schedule={schedule}",
             f"--layout={draw.choice(['contiguous', 'zigzag', 'striped', 'zigzag_per_document'])}"]
    # A group of heads has its part of what heads share: only all at once give dbias.
    shares = "--dbias" in asked and any(f in made for f in ["--bias=one", "--bias=batch"])
    if schedule == "all_gather" and not dilated and often(.5):
        where += [f"--heads_per_step={kv_heads if shares else 1}"]
    elif schedule in ["ring", "all_gather"] and not dilated and often(.4):
        forward += [f"--probabilities={len(queries) - 1 if documents else 0}:4"]
    where += [f"--world_size={1 if schedule == 'single' else draw.choice([1, 2, 3])}"]
    by_streams = not forward and "--lse=per_document" not in asked
    where += [f"--transport={draw.choice(['relay', 'host_memory'] + ['direct'] * by_streams)}"]
    return made, asked, where, forward, backward


@pytest.mark.parametrize("seed", range(CASES))
def test_drawn_options(ring, tmp_path, seed):
    source, out, gradients = (tmp_path / f"{n}.st" for n in "iog")
    made, asked, where, forward, backward = drawn(seed)
    server, read = f"--server={ring.address}", f"--input={source}"
    cli("generate", f"--output={source}", *made)
    kept = json.loads(cli("forward", server, read, f"--output={out}", *asked, *where, *forward,
                          "--retain=1m", "--json").stdout)
    cli("verify", read, f"--output={out}", *asked, *forward)
    named = ["--members=" + ",".join(kept["plan"]["members"])]
    # The flags of the forward are valid with its residual too, for every plan.
    for how in [[], [*named, f"--residual={kept['residual']['handle']}"]]:
        told = json.loads(cli("backward", server, read, f"--output={gradients}", *asked, *where,
                              *backward, *how, "--json").stdout)
        assert told["residual"]["failure"] == ""
        cli("verify", read, f"--output={gradients}", *asked, *backward)
    # The report names the requested options as the protocol does.
    names = {"softmax_scale", "softcap", "causal", "window", "dropout", "alibi", "bias", "mask",
             "segment_ids", "sinks", "dlse"}
    wanted = {name for name in names
              if any(re.match(f"--{name}(=|$)", flag) for flag in [*asked, *backward])}
    assert wanted == set(told["options"]) & names


def test_all_heads_in_one_step_may_share_a_bias(ring, tmp_path):
    """One kv head at a time of one: no groups, and so no sum over them that dbias would need."""
    source, gradients = tmp_path / "i.st", tmp_path / "g.st"
    cli("generate", f"--output={source}", "--seq_len=74", "--heads=3", "--kv_heads=1",
        "--head_dim=16", "--dtype=fp32", "--with_dout", "--bias=one")
    asked = ["--bias", "--dbias", "--causal"]
    cli("backward", f"--server={ring.address}", f"--input={source}", f"--output={gradients}", *asked,
        "--schedule=all_gather", "--world_size=2", "--heads_per_step=1", "--deadline=20s")
    assert "dbias ok" in cli("verify", f"--input={source}", f"--output={gradients}", *asked).stdout


def test_gradients_are_judged_or_missed(ring, tmp_path):
    """Verification fails if a requested gradient is missing, or if a gradient was not requested."""
    source, plain, all_of_it = (tmp_path / f"{n}.st" for n in "ipa")
    cli("generate", f"--output={source}", "--seq_len=64", "--heads=2", "--head_dim=16",
        "--dtype=fp32", "--with_dout", "--bias=one", "--sinks")
    server, read, asked = f"--server={ring.address}", f"--input={source}", ["--bias", "--sinks"]
    cli("backward", server, read, f"--output={plain}", *asked)
    done = cli("verify", read, f"--output={plain}", *asked, "--dbias", code=3)
    assert '"dbias" is missing; --dbias needs it' in done.stderr
    cli("backward", server, read, f"--output={all_of_it}", *asked, "--dbias")
    cli("verify", read, f"--output={all_of_it}", *asked, "--dbias")
    without = tmp_path / "w.st"
    cli("generate", f"--output={without}", "--seq_len=64", "--heads=2", "--head_dim=16",
        "--dtype=fp32", "--with_dout", "--bias=one")
    done = cli("verify", f"--input={without}", f"--output={plain}", "--bias", code=3)
    assert '"dsinks" is given without --sinks' in done.stderr


def test_plan_takes_what_the_calls_take(ring):
    problem = ["--documents=100,50", "--heads=4", "--head_dim=16", "--json"]

    def plan(*flags, **how):
        return json.loads(cli("plan", *problem, *flags, **how).stdout)

    asked = ["--causal", "--dropout=0.5,1", "--bias=heads", "--bias_dtype=fp32", "--lse=per_document",
             "--packing=qkv"]
    told = plan(*asked, "--probabilities=1:7")
    assert told["options"]["dropout"] == {"rate": 0.5, "seed": "1"}
    assert told["options"]["bias"] == {"per_head": True, "dtype": "DATA_TYPE_FLOAT32"}
    assert told["options"]["probabilities"] == [{"batch": 1, "position": 7}]
    assert (told["shape"]["packing"], told["shape"]["lse"]) == ("qkv", "per_document")
    without, rows = (sum(rank["buffer_bytes"] for rank in plan(*asked, *more)["plan"]["ranks"])
                     for more in [[], ["--probabilities=1:7"]])
    assert rows - without == 4 * 50 * 4  # heads, keys of its document, fp32
    assert plan("--backward", "--dlse")["options"]["dlse"]
    text = cli("plan", *problem[:-1], "--causal", "--sinks").stdout
    assert "with   causal, sinks\n" in text
    for flags in [["--dlse"], ["--with_forward_result"], ["--backward", "--probabilities=0:0"]]:
        assert flags[-1].split("=")[0] in cli("plan", *problem, *flags, code=2).stderr
    named = plan("--members=worker-1,worker-0")["plan"]
    assert named["members"] == ["worker-1", "worker-0"] and named["world_size"] == 2
    done = cli("plan", *problem, f"--server={ring.address}", "--members=nobody", code=3)
    assert "plan.members: worker nobody is not ready; ready workers: " in done.stderr
    assert all(f"worker-{index}" in done.stderr for index in range(3)), done.stderr
    assert "is -1; must not be negative" in cli("plan", "--seq_len=-1", code=2).stderr


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("transport", ["relay", "host_memory", "direct"])
def test_pairs_cut_by_keys(ring, tmp_path, transport, layout):
    """A bias, its gradient and a mask lie with the keys where queries travel."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    options = ["--causal", "--bias", "--mask", "--sinks", "--dropout=0.1,4"]
    # Sizes where sharding by queries and by keys gives equal byte counts, so they cannot reveal a
    # mix-up.
    cli("generate", f"--output={source}", "--seq_len=132", "--seq_len_kv=276", "--heads=4",
        "--kv_heads=2", "--head_dim=32", "--dtype=bf16", "--seed=6", "--with_dout", "--bias=heads",
        "--mask=batch", "--sinks")
    for schedule in ("pass_q", "replicated_q"):
        where = [f"--server={ring.address}", f"--schedule={schedule}", f"--layout={layout}",
                 f"--transport={transport}"]
        for command, more in (("forward", []), ("backward", ["--dbias"])):
            done = cli(command, *where, f"--input={source}", f"--output={output}", *options, *more,
                       "--json")
            report = json.loads(done.stdout)
            assert report["transport"]["kind"] == transport
            plan = report["plan"]
            assert (plan["schedule"], plan["world_size"]) == (schedule, 3)
            cli("verify", f"--input={source}", f"--output={output}", *options, *more)

"""Dilated levels through files, real processes and every schedule."""

import json
import re

import pytest

from command_line import SCHEDULES, cli

LONGNET = ["--dilation=64:1,256:2,1024:4"]


@pytest.fixture
def tensors(tmp_path):
    source = tmp_path / "in.safetensors"
    cli("generate", f"--output={source}", "--batch=2", "--seq_len=1000", "--heads=6",
        "--kv_heads=2", "--head_dim=32", "--dtype=bf16", "--seed=5", "--with_dout")
    return source


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if len(s) == 1], ids=str)
def test_every_schedule(ring, tmp_path, tensors, schedule, layout):
    output = tmp_path / "out.safetensors"
    for command in ("forward", "backward"):
        cli(command, f"--server={ring.address}", *schedule, f"--layout={layout}",
            f"--input={tensors}", f"--output={output}", "--causal", *LONGNET)
        cli("verify", f"--input={tensors}", f"--output={output}", "--causal", *LONGNET)
        # Levels are not ignored: another result without them, or with another.
        for other in ([], ["--dilation=64:1,256:2"]):
            cli("verify", f"--input={tensors}", f"--output={output}", "--causal", *other, code=1)


def test_heads_split_among_levels(ring, tmp_path, tensors):
    output = tmp_path / "out.safetensors"
    levels = ["--dilation=100:1,300:2,900:3", "--dilation_heads=split"]
    for command in ("forward", "backward"):
        cli(command, f"--server={ring.address}", f"--input={tensors}", f"--output={output}", *levels,
            "--schedule=ring", "--world_size=4")
        cli("verify", f"--input={tensors}", f"--output={output}", *levels)
    cli("verify", f"--input={tensors}", f"--output={output}", levels[0], code=1)


def test_with_every_other_option(ring, tmp_path):
    """Documents, score terms with gradients, sinks, softcap, a window: all at once."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    cli("generate", f"--output={source}", "--documents=200,0,333,90", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--head_dim_v=24", "--dtype=fp32", "--seed=4", "--with_dout", "--sinks",
        "--segment_ids", "--bias=heads", "--mask=one", "--alibi")
    options = ["--causal", "--window=150,0", "--softcap=20", "--sinks", "--segment_ids", "--bias",
               "--dbias", "--mask", "--alibi", "--dropout=0.2,9", "--dilation=50:1,128:3,400:2:1"]
    for command in ("forward", "backward"):
        cli(command, f"--server={ring.address}", "--schedule=ring", "--world_size=4",
            f"--input={source}", f"--output={output}", *options)
        checked = cli("verify", f"--input={source}", f"--output={output}", *options).stdout
    assert re.search(r"^dbias ok", checked, re.M) and re.search(r"^dsinks ok", checked, re.M)
    again = tmp_path / "again.safetensors"
    cli("backward", f"--server={ring.address}", "--schedule=ring", "--world_size=4",
        f"--input={source}", f"--output={again}", *options)
    assert again.read_bytes() == output.read_bytes()


def test_one_level_of_everything_is_none(ring, tmp_path, tensors):
    plain, dilated = tmp_path / "p.safetensors", tmp_path / "d.safetensors"
    where = [f"--server={ring.address}", f"--input={tensors}", "--schedule=ring", "--world_size=4"]
    cli("forward", *where, f"--output={plain}")
    cli("forward", *where, f"--output={dilated}", "--dilation=1000:1")
    assert plain.read_bytes() == dilated.read_bytes()


def test_kept_for_backward(ring, tmp_path, tensors):
    forward, kept, sent = (tmp_path / f"{n}.safetensors" for n in ("f", "k", "s"))
    where = [f"--server={ring.address}", "--schedule=ring", "--world_size=4"]
    done = cli("forward", *where, f"--input={tensors}", f"--output={forward}", "--retain=1m",
               "--json", *LONGNET)
    handle = json.loads(done.stdout)["residual"]["handle"]
    cli("backward", *where, f"--input={tensors}", f"--output={kept}", f"--residual={handle}",
        *LONGNET)
    cli("backward", *where, f"--input={tensors}", f"--output={sent}", *LONGNET)
    assert kept.read_bytes() == sent.read_bytes()


def test_what_it_costs_is_planned(ring, tmp_path):
    def plan(*flags):
        return json.loads(cli("plan", "--seq_len=65536", "--heads=8", "--workers=4",
                              "--schedule=ring", *flags, "--json").stdout)["plan"]

    whole, near = plan(), plan("--dilation=2048:1,8192:4")
    # Segments that lie within a rank's shard send nothing.
    assert near["exchanged_bytes"] == 0 < whole["exchanged_bytes"]
    pairs = 65536 * 2048 + 65536 * 8192 // 16
    assert near["flops"] == pytest.approx(whole["flops"] * pairs / 65536**2)


def test_what_cannot_be(ring, tmp_path, tensors):
    def refused(*flags, command="plan"):
        return cli(command, "--seq_len=900", "--heads=4", "--kv_heads=2", *flags, code=None).stderr

    assert "options.dilation_levels[0].segment_length" in refused("--dilation=0:1")
    assert "options.dilation_levels[1].offset" in refused("--dilation=8:2,8:2:2")
    assert "options.dilation_levels" in refused("--dilation=8:2", "--seq_len_kv=800")
    assert "plan.heads_per_step" in refused("--dilation=8:2", "--schedule=all_gather",
                                            "--heads_per_step=1")
    assert "plan.schedule" in refused("--dilation=8:2", "--schedule=pass_q", "--bias=heads")
    done = cli("forward", f"--server={ring.address}", f"--input={tensors}",
               f"--output={tmp_path}/x", "--dilation=8:2", "--probabilities=0:1", code=None)
    assert "reply.probability_rows" in done.stderr
    info = json.loads(cli("info", f"--server={ring.address}", "--json").stdout)
    assert "dilation_levels" in json.dumps(info)

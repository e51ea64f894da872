"""The command line and every schedule."""

import json

import pytest

from command_line import SCHEDULES, cli


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda flags: "".join(flags)[11:])
def test_every_schedule(ring, tmp_path, schedule, layout):
    """The ring's result is within the bound for every schedule and layout."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    cli("generate", f"--output={source}", "--seq_len=900", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--seed=3", "--with_dout")
    where = [f"--server={ring.address}", *schedule, f"--layout={layout}"]
    name = schedule[0].split("=")[1]
    for command in ("forward", "backward"):
        done = cli(command, *where, f"--input={source}", f"--output={output}", "--causal",
                   "--window=300,0", "--json")
        plan = json.loads(done.stdout)["plan"]
        assert (plan["schedule"], plan["world_size"]) == (name, 4)
        assert sum(rank["sent_bytes"] for rank in plan["ranks"]) == plan["exchanged_bytes"] > 0
        cli("verify", f"--input={source}", f"--output={output}", "--causal", "--window=300,0")
    shown = cli("plan", "--seq_len=900", "--heads=4", "--kv_heads=2", *schedule, "--workers=4",
                "--causal").stdout
    heads = "1 kv head at a time, " if "--heads_per_step=1" in schedule else ""
    assert f"{name} as requested, {heads}over all 4 workers" in shown


def test_every_schedule_with_options(ring, tmp_path):
    """Documents, sinks, segment ids, ALiBi, dropout, fewer queries than keys: all at once."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    options = ["--causal", "--softcap=20", "--sinks", "--segment_ids", "--alibi=geometric",
               "--dropout=0.2,9"]
    cli("generate", f"--output={source}", "--documents=200,100", "--documents_kv=500,90",
        "--heads=4", "--kv_heads=2", "--head_dim=32", "--head_dim_v=24", "--dtype=bf16",
        "--seed=4", "--with_dout", "--sinks", "--segment_ids")
    for schedule in SCHEDULES:
        for command in ("forward", "backward"):
            cli(command, f"--server={ring.address}", *schedule, f"--input={source}",
                f"--output={output}", *options)
            cli("verify", f"--input={source}", f"--output={output}", *options)


def test_schedules_that_cannot_be(ring, tmp_path):
    def refused(*flags):
        return cli("plan", "--seq_len=900", "--heads=4", "--kv_heads=2", *flags, code=None).stderr

    assert "plan.heads_per_step" in refused("--schedule=ring", "--heads_per_step=1")
    assert "plan.heads_per_step" in refused("--schedule=all_gather", "--heads_per_step=3")
    assert "plan.group_size" in refused("--schedule=ring", "--group_size=2")
    assert "plan.group_size" in refused("--schedule=double_ring", "--workers=4", "--group_size=3")
    for schedule in ("pass_q", "replicated_q"):
        assert "plan.schedule" in refused(f"--schedule={schedule}", "--mask=heads", "--mask_bits")

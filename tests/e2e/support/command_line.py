"""The command line, called as a user calls it."""

import subprocess

from cluster import CLI

OPTIONS = ["--causal", "--schedule=ring", "--world_size=4"]
SCHEDULES = [["--schedule=all_gather"], ["--schedule=all_gather", "--heads_per_step=1"],
             ["--schedule=pass_q"], ["--schedule=replicated_q"],
             ["--schedule=double_ring", "--group_size=2"]]


def cli(*arguments, code=0, timeout=120):
    done = subprocess.run([str(CLI), *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == code if code is not None else done.returncode != 0, \
        f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def generate(path, *extra, seq_len=700, dtype="bf16"):
    cli("generate", f"--output={path}", "--batch=2", f"--seq_len={seq_len}", "--heads=4",
        "--kv_heads=2", "--head_dim=32", f"--dtype={dtype}", "--seed=7", "--with_dout", *extra)

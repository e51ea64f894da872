"""Causal attention with grouped heads and its gradients, over numpy: python forward_backward.py 127.0.0.1:7700"""
import sys

import numpy as np

import ringattn

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 1024, 8, 64), np.float32)  # [batch, seq_len, heads, head_dim]
k, v = (rng.standard_normal((1, 1024, 2, 64), np.float32) for _ in range(2))

with ringattn.connect(sys.argv[1]) as client:
    out, lse, report = client.forward(q, k, v, causal=True, window=(256, 0))
    gradients = client.backward(np.ones_like(out), q, k, v, out=out, lse=lse, causal=True, window=(256, 0))
    print(f"out {out.shape}, dk {gradients.dk.shape}, on {', '.join(report.plan.members)}: {report.plan.reason}")
    try:
        client.forward(q, k, v, softcap=-1.0)
    except ringattn.InvalidArgumentError as error:
        print("refused:", *(f"{field} {why}" for field, why in error.violations))

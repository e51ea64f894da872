"""Prefill and decode over a K/V cache on the workers, with numpy: python kv_cache.py 127.0.0.1:7700"""
import sys

import numpy as np

import ringattn
from ringattn import Row

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 4, 64
random = np.random.default_rng(0)


def tensors(tokens):
    return (random.standard_normal((tokens, heads, DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))


with ringattn.connect(sys.argv[1]) as client:
    with client.create_cache(layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32",
                             tokens=4096) as cache:
        step = cache.step([Row(sequence=1, append=300), Row(sequence=2, append=40)])  # two prompts
        for layer in range(LAYERS):
            step.attend(layer, *tensors(340))
        for _ in range(8):  # one token for each sequence
            step = cache.step([Row(sequence=1), Row(sequence=2)])
            for layer in range(LAYERS):
                out = step.attend(layer, *tensors(2))
        step = cache.step([Row(sequence=1, append=2, keep=305), Row(sequence=2)])  # sequence 1 rejects three drafts
        for layer in range(LAYERS):
            out = step.attend(layer, *tensors(3))
        print(f"lengths {cache.sequences} on {cache.placement['members']} by {cache.transport}")

"""Many users after one prompt: attention over the prompt once for all, merged with each user's own by lse.

python shared_prefix.py 127.0.0.1:7700
"""
import sys

import numpy as np

import ringattn


def merge(out_1, lse_1, out_2, lse_2):
    """Attention over the keys of both results. out: [tokens, heads, head_dim]; lse: [heads, tokens]."""
    top = np.maximum(np.maximum(lse_1, lse_2), np.finfo(np.float32).min)  # finite, also if neither sees a key
    weight_1, weight_2 = np.exp(lse_1 - top), np.exp(lse_2 - top)
    total = weight_1 + weight_2
    share_1, share_2 = (np.divide(weight, total, out=np.zeros_like(total), where=total > 0).T[..., None]
                        for weight in (weight_1, weight_2))
    with np.errstate(divide="ignore"):
        return share_1 * out_1 + share_2 * out_2, top + np.log(total)


rng = np.random.default_rng(0)
prefix, suffixes = 2048, [40, 7, 96, 64, 1, 32]  # tokens of the prompt, and of each user
users = np.cumsum([0, *suffixes])
# Packed tensors: the users' tokens one after another.
q = rng.standard_normal((users[-1], 8, 64), np.float32)
k, v = (rng.standard_normal((users[-1], 2, 64), np.float32) for _ in range(2))
prefix_k, prefix_v = (rng.standard_normal((prefix, 2, 64), np.float32) for _ in range(2))

with ringattn.connect(sys.argv[1]) as client:
    # All queries are one document that sees the whole prompt: its keys and values are sent and read once.
    out_prefix, lse_prefix, _ = client.forward(q, prefix_k, prefix_v, cu_seqlens_q=[0, users[-1]],
                                               cu_seqlens_k=[0, prefix])
    # Each user's tokens are one causal document.
    out_suffix, lse_suffix, _ = client.forward(q, k, v, cu_seqlens_q=users, cu_seqlens_k=users, causal=True)
    out, lse = merge(out_prefix, lse_prefix, out_suffix, lse_suffix)

    # The same without sharing: every user's document repeats the prompt.
    starts = np.arange(len(suffixes) + 1) * prefix + users
    whole_k, whole_v = (np.concatenate([part for begin, end in zip(users, users[1:])
                                        for part in (shared, own[begin:end])])
                        for shared, own in ((prefix_k, k), (prefix_v, v)))
    expected = client.forward(q, whole_k, whole_v, cu_seqlens_q=users, cu_seqlens_k=starts, causal=True)

error = max(np.abs(out - expected.out).max(), np.abs(lse - expected.lse).max())
assert error < 1e-4, error
shared, repeated = (sum(array.nbytes for array in arrays)
                    for arrays in ((prefix_k, prefix_v, k, v), (whole_k, whole_v)))
print(f"{len(suffixes)} users: {shared / 2**20:.1f} MiB of keys and values instead of {repeated / 2**20:.1f}; "
      f"largest difference {error:.1e}")

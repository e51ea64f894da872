"""Runs one of ring_flash_attn's published test files as one rank: `published_program.py FILE [compile]`, with torchrun's
variables.

The file runs as it is, except for what names a GPU. Its import of ring_flash_attn gets ringattn.ring_flash_attn. Its
import of flash_attn gets PyTorch's own CPU attention in fp32, as the reference. Published files print errors; `log`
checks them here: a difference is small compared with the value that was logged before it.
"""
import pathlib
import re
import sys
import types

import torch

import ringattn
import ringattn.ring_flash_attn

RELATIVE = 0.02  # mean difference of two bf16 results to the mean of the value
REPLACED = [(r'"nccl"', '"gloo"'), (r'f"cuda:\{rank\}"', '"cpu"'), (r'torch\.device\("cuda"\)', 'torch.device("cpu")')]


def _dense(q, k, v, causal):
    """[tokens, heads, head_dim] each: out and lse [heads, tokens]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(tensor.float().transpose(0, 1)[None] for tensor in (q, k, v)), 0.0, causal)
    return out[0].transpose(0, 1).to(q.dtype), lse[0]


def flash_attn_qkvpacked_func(qkv, dropout_p, causal, window_size, alibi_slopes, deterministic, return_attn_probs):
    assert dropout_p == 0 and window_size == (-1, -1) and alibi_slopes is None and return_attn_probs and len(qkv) == 1
    out, lse = _dense(*qkv[0].unbind(1), causal)
    return out[None], lse[None], None


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p, causal, window_size, alibi_slopes,
                                     deterministic, return_attn_probs):
    assert dropout_p == 0 and window_size == (-1, -1) and alibi_slopes is None and return_attn_probs
    outs, lses = zip(*(_dense(*document.unbind(1), causal) for document in qkv.split(cu_seqlens.diff().tolist())))
    return torch.cat(outs), torch.cat(lses, 1), None


def main():
    path = pathlib.Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    sys.argv = sys.argv[1:]
    import utils

    compared = 0
    scale = None

    def log(message, value, rank0_only=False):
        nonlocal compared, scale
        mean = value.float().abs().mean().item()
        if "diff" not in message:
            scale = mean
            return
        assert value.numel() and mean <= RELATIVE * scale, f"{message}: the mean is {mean}; the value's is {scale}"
        compared += 1

    utils.log = log
    sys.modules["flash_attn"] = types.ModuleType("flash_attn")
    sys.modules["flash_attn"].__dict__.update(flash_attn_qkvpacked_func=flash_attn_qkvpacked_func,
                                              flash_attn_varlen_qkvpacked_func=flash_attn_varlen_qkvpacked_func)
    sys.modules["ring_flash_attn"] = ringattn.ring_flash_attn
    text = path.read_text()
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    exec(compile(text, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    print(f"compared {compared}")


if __name__ == "__main__":
    main()

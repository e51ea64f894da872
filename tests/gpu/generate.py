#!/usr/bin/env python3
"""`generate` of Hugging Face on a GPU with keys and values on GPU workers: tokens equal to those of eager attention with
transformers' own cache, and time per token next to sdpa. The model has 4 layers of 32 query heads and 8 kv heads of
128 with random weights. Tokens are compared in fp32, where no two logits are closer than the rounding. Times are of
bf16. Needs PyTorch with CUDA, transformers and the package (an unpacked wheel in PYTHONPATH will do). Prints JSON.

  generate.py --server=HOST:PORT [--lengths=8192,32768,131072] [--equal=8192,32768] [--tokens=64] [--world_size=1]
      [--profile]

Run the workers on other GPUs than this program: two processes take turns on one GPU.
"""
import argparse
import cProfile
import json
import pstats
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessor, LogitsProcessorList

import ringattn
import ringattn.huggingface

LAYERS, HEADS, KV_HEADS, DIM = 4, 32, 8, 128


class Clock(LogitsProcessor):
    """The time at which the logits of each token are there."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def make_model(dtype, implementation, tokens):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=HEADS * DIM, intermediate_size=4096, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=4096,
                         max_position_embeddings=tokens, pad_token_id=0, eos_token_id=None, rope_theta=5e5)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype).eval()


def generate(model, prompt, tokens, cache=None):
    """(new tokens, seconds per token after the first two)"""
    clock = Clock()
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
                         prefill_chunk_size=2048, logits_processor=LogitsProcessorList([clock]),
                         **({} if cache is None else {"past_key_values": cache}))
    gaps = [end - begin for begin, end in zip(clock.times[1:], clock.times[2:])]
    return ids[0, prompt.shape[1]:].tolist(), gaps


def ours(client, model, prompt, tokens, world_size):
    with ringattn.KvCache(client, model.config, tokens=prompt.shape[1] + tokens + 64, world_size=world_size) as cache:
        found, gaps = generate(model, prompt, tokens, cache)
        return found, gaps, cache.worker_cache.transport


def run(client, arguments, length, dtype, tokens, reference):
    prompt = torch.randint(1, 4096, (1, length), device="cuda", generator=torch.Generator("cuda").manual_seed(length))
    model = make_model(dtype, "ringattn", length + tokens + 64)
    profile = cProfile.Profile()
    found, gaps, transport = ours(client, model, prompt, tokens, arguments.world_size)
    if arguments.profile:
        profile.runcall(ours, client, model, prompt, tokens, arguments.world_size)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    model.set_attn_implementation(reference)
    want, reference_gaps = generate(model, prompt, tokens)
    us = lambda seconds: round(statistics.median(seconds) * 1e6, 1)  # noqa: E731
    equal = next((i for i, (a, b) in enumerate(zip(found, want)) if a != b), len(want))
    return {"keys": length, "dtype": str(dtype), "tokens": tokens, "equal_tokens": equal, "reference": reference,
            "transport": transport, "us_per_token": us(gaps), "reference_us_per_token": us(reference_gaps),
            "world_size": arguments.world_size}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--equal", default="8192,32768")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--world_size", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="print where a second run of ours spends its time")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    # cuDNN's attention makes a plan for every length of the keys: 40 ms per token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    ringattn.huggingface.register()
    numbers = lambda text: [int(word) for word in text.split(",") if word]  # noqa: E731
    results = []
    with ringattn.connect(arguments.server) as client, torch.inference_mode():
        for length in numbers(arguments.equal):
            # Eager attention holds [heads, queries, keys] in fp32, for chunks of 2,048 queries.
            results.append(run(client, arguments, length, torch.float32, 24, "eager"))
            print(json.dumps(results[-1]), flush=True)
        for length in numbers(arguments.lengths):
            results.append(run(client, arguments, length, torch.bfloat16, arguments.tokens, "sdpa"))
            print(json.dumps(results[-1]), flush=True)
    wrong = [r for r in results if r["dtype"] == "torch.float32" and r["equal_tokens"] != r["tokens"]]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Generates with vLLM on CPUs, with keys and values on the workers.

    python vllm_generate.py HOST:PORT

A tiny model with random weights stands in for a real one.
"""
import os
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    os.environ["RINGATTN_VLLM"] = "1"  # before vLLM is imported
    os.environ["RINGATTN_ADDRESS"] = sys.argv[1]
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as model:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                     head_dim=32, vocab_size=320, intermediate_size=64,
                                     initializer_range=0.3)).save_pretrained(model)
        llm = LLM(model, skip_tokenizer_init=True, dtype="float32", max_model_len=512, enforce_eager=True,
                  block_size=32, num_gpu_blocks_override=64,  # the cache: 64 blocks of 32 tokens
                  kv_cache_memory_bytes=1 << 20,  # vLLM's placeholder
                  additional_config={"ringattn": {"label": "an example"}})
        outputs = llm.generate([{"prompt_token_ids": list(range(3, 3 + tokens))} for tokens in (5, 40)],
                               SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False),
                               use_tqdm=False)
        for output in outputs:
            print(len(output.prompt_token_ids), "tokens, then", *output.outputs[0].token_ids)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()

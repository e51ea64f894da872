"""Generation with keys and values on the workers: python huggingface_generate.py 127.0.0.1:7700"""
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ringattn
import ringattn.huggingface

client = ringattn.connect(sys.argv[1])
ringattn.huggingface.register()

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=128, max_position_embeddings=512, pad_token_id=0,
                     eos_token_id=None)  # yours: AutoModelForCausalLM.from_pretrained(...)
model = AutoModelForCausalLM.from_config(config, attn_implementation="ringattn").eval()
prompt = torch.randint(1, 128, (1, 200))
with ringattn.KvCache(client, model.config, tokens=2048) as cache:
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=20,
                         do_sample=False)
    # The next turn sends only its own tokens.
    question = torch.cat([ids, torch.randint(1, 128, (1, 10))], dim=1)
    ids = model.generate(question, attention_mask=torch.ones_like(question), past_key_values=cache, max_new_tokens=20,
                         do_sample=False)
    print(f"{ids.shape[1]} tokens, {cache.get_seq_length()} of them in the cache")

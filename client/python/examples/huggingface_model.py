"""A Hugging Face model with our attention, on a padded batch: python huggingface_model.py 127.0.0.1:7700"""
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ringattn
import ringattn.huggingface

ringattn.set_default_client(ringattn.connect(sys.argv[1]))
ringattn.huggingface.register()

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=128)  # yours: AutoModelForCausalLM.from_pretrained(...)
model = AutoModelForCausalLM.from_config(config, attn_implementation="ringattn")
tokens = torch.randint(0, 128, (2, 64))
mask = torch.ones_like(tokens)
mask[0, :20] = 0
loss = model(tokens, attention_mask=mask, labels=tokens).loss
loss.backward()
print(f"loss {loss.item():.3f}")

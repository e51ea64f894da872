"""Small models with random weights, once with eager attention and once with ringattn's."""
import copy

import pytest
import ringattn.huggingface
import torch
import transformers

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 101, "intermediate_size": 64, "max_position_embeddings": 256, "pad_token_id": 0,
        "initializer_range": 0.3}  # large, for attention that is not nearly uniform
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 3.0,
                                           "query_pre_attn_scalar": 9}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 9, "head_dim": 16}),
    "gpt_oss": (transformers.GptOssConfig, {"head_dim": 16, "sliding_window": 9, "num_local_experts": 2,
                                            "num_experts_per_tok": 1}),
}


@pytest.fixture(autouse=True)
def registered(default_client):
    """Registers ringattn's attention, which uses the default client."""
    ringattn.huggingface.register()


def pair(name, **more):
    """Returns the models with eager and with ringattn's attention. They have equal weights."""
    kind, options = MODELS[name]
    models = [transformers.AutoModelForCausalLM.from_config(
        kind(**{**SIZE, **options, **more}), attn_implementation=implementation).eval()
        for implementation in ("eager", "ringattn")]
    models[1].load_state_dict(models[0].state_dict())
    return models


def pair_of(config, kind=None):
    """(eager's, ours) of a configuration."""
    kind = kind or transformers.AutoModelForCausalLM
    models = [(kind.from_config if hasattr(kind, "from_config") else kind._from_config)(
        copy.deepcopy(config), attn_implementation=implementation).train(False)
        for implementation in ("eager", "ringattn")]
    models[1].load_state_dict(models[0].state_dict())
    return models


def tokens():
    return torch.randint(1, SIZE["vocab_size"], (3, 40))


def padding(side):
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :11], mask[1, :3] = 0, 0
    return mask if side == "left" else mask.flip(1)


def eager_attention(q, k, v, mask=None, sinks=None):
    """transformers' eager attention, in fp64; q, k, v: [batch, heads, tokens, head_dim]."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :k.shape[2]]
    return (weights @ v).transpose(1, 2)

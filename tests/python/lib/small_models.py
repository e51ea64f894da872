"""Small models with random weights, once with eager attention and once with ringattn's."""
import pytest
import ringattn.huggingface
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

"""Generates with vLLM and tiny random models. Run by test_vllm.py, in an environment of vLLM's packages.

  python vllm_program.py models FOLDER        writes the models
  python vllm_program.py tokens FOLDER OUT    writes the tokens of every case to OUT, JSON
  python vllm_program.py refused FOLDER OUT   writes the errors of options that are not served
  python vllm_program.py lost FOLDER OUT PIDS kills the cache's worker; PIDS: {"worker-0": 123, ...}

With RINGATTN_VLLM=1 in the environment, ringattn computes the attention.
"""
import contextlib
import gc
import json
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads slow each other down on a busy machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 320
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": VOCABULARY, "intermediate_size": 64, "max_position_embeddings": 1024, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.3}  # large, for attention that is not nearly uniform
GEMMA = {"sliding_window": 48, "query_pre_attn_scalar": 32}
BERT = {name: SIZE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "multi_query": ("Mistral", {"sliding_window": 40, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 8.0}),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 7}),  # six layers with a window, one without
    "bert": ("Bert", BERT),
    "deepseek": ("DeepseekV2", {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
                                "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 2, "head_dim": 64}),
}


def write_models(folder):
    import torch
    import transformers

    for name, (kind, options) in MODELS.items():
        torch.manual_seed(1)
        config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
        cls = getattr(transformers, "BertModel" if kind == "Bert" else f"{kind}ForCausalLM")
        model = cls(config(**(options if kind == "Bert" else {**SIZE, **options})))
        for parameter_name, parameter in model.named_parameters():
            if "gemma" in name and "post_attention_layernorm" in parameter_name:
                parameter.data.fill_(30.0)  # else the embeddings outweigh the attention, and all tokens are equal
            if "q_norm" in parameter_name:
                parameter.data.fill_(4.0)  # for attention that is not nearly uniform
        model.save_pretrained(folder / name)


def prompt(seed, tokens):
    return [(seed * 7919 + 31 * at * at + 17 * at) % (VOCABULARY - 3) + 3 for at in range(tokens)]


def mixed():
    """Prompts of several lengths; the long ones are prefilled in chunks while others decode."""
    return [prompt(seed, tokens) for seed, tokens in enumerate((5, 40, 150, 17, 97, 1))]


def sharing(tokens):
    return [prompt(9, tokens) + prompt(seed, 10 + 7 * seed) for seed in range(4)]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def repeating():
    return [prompt(seed, 6 + seed) * 9 for seed in range(3)]


# name: (model, options of LLM, rounds of prompts, options of ringattn)
CASES = {
    "llama": ("llama", {}, [mixed()], {}),
    "llama, bfloat16": ("llama", {"dtype": "bfloat16"}, [], {}),
    "llama by relay": ("llama", {}, [mixed()], {"transport": "relay"}),
    "llama on two workers": ("llama", {}, [mixed()], {"world_size": 2}),
    "llama, shared prefixes": ("llama", {}, [sharing(100), sharing(100)[::-1]], {}),
    "llama, drafts": ("llama", {"speculative_config": NGRAM}, [repeating()], {}),
    "llama, preemption": ("llama", {"num_gpu_blocks_override": 16, "max_model_len": 256}, [[prompt(s, 90) for s in range(6)]], {}),
    "mistral": ("mistral", {}, [mixed()], {}),
    "one kv head, position parts": ("multi_query", {}, [mixed()], {"world_size": 2}),
    "gemma2": ("gemma2", {}, [mixed()], {}),
    "gemma2, shared prefixes": ("gemma2", {}, [sharing(130), sharing(130)[::-1]], {}),
    "gemma2, drafts": ("gemma2", {"speculative_config": NGRAM}, [repeating()], {}),
    "gemma2, preemption": ("gemma2", {"num_gpu_blocks_override": 24, "max_model_len": 256}, [[prompt(s, 90) for s in range(6)]], {}),
    "gemma3": ("gemma3", {}, [mixed()], {}),
}


def options_of(folder, model, options, ringattn_options):
    return {"model": str(folder / model), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
            "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32, "seed": 0,
            "num_gpu_blocks_override": 256, "disable_log_stats": False,
            "additional_config": {"ringattn": ringattn_options}, **options}


@contextlib.contextmanager
def engine(*arguments):
    from vllm import LLM
    from vllm.platforms import current_platform

    llm = LLM(**options_of(*arguments))
    # Every engine registers the same kernels for the whole process, which fails once drafts have imported numba.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def counter(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def generate(llm, prompts, **sampling):
    from vllm import SamplingParams

    sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "detokenize": False, **sampling}
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(**sampling), use_tqdm=False)


def prompt_logprobs(llm, ids):
    """The log probability of every token of a prompt but the first."""
    (output,) = generate(llm, [ids], max_tokens=1, prompt_logprobs=0)
    return [found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]


def run_case(folder, case):
    model, options, rounds, ringattn_options = CASES[case]
    with engine(folder, model, options, ringattn_options) as llm:
        tokens = []
        begin = time.monotonic()
        for prompts in rounds:
            tokens.append([list(output.outputs[0].token_ids) for output in generate(llm, prompts)])
        seconds = time.monotonic() - begin
        logprobs = prompt_logprobs(llm, prompt(5, 100)) if model == "llama" else []
        return {"tokens": tokens, "seconds": seconds, "logprobs": logprobs,
                "parts": placement_of(llm)["position_parts"] if os.environ["RINGATTN_VLLM"] == "1" else 1,
                "hits": counter(llm, "vllm:prefix_cache_hits"),
                "preemptions": counter(llm, "vllm:num_preemptions"),
                "drafted": counter(llm, "vllm:spec_decode_num_draft_tokens"),
                "accepted": counter(llm, "vllm:spec_decode_num_accepted_tokens")}


# name in the error's text: (model, options of LLM)
REFUSED = {
    "enforce_eager": ("llama", {"enforce_eager": False}),
    "num_gpu_blocks_override": ("llama", {"num_gpu_blocks_override": None}),
    "tensor_parallel_size": ("llama", {"tensor_parallel_size": 2}),
    "pipeline_parallel_size": ("llama", {"pipeline_parallel_size": 2}),
    "kv_transfer_config": ("llama", {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}),
    "speculative_config": ("llama", {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}}),
    "transprot": ("llama", {"additional_config": {"ringattn": {"transprot": "relay"}}}),
    "block_size": ("llama", {"block_size": 48}),
    "kv_cache_dtype": ("llama", {"kv_cache_dtype": "fp8"}),
    "sliding_window": ("gemma2", {"disable_hybrid_kv_cache_manager": True}),
    "attn_type": ("bert", {"max_num_batched_tokens": 512}),
    "MLA": ("deepseek", {}),
}
OF_THE_CONFIG = ("enforce_eager", "num_gpu_blocks_override", "tensor_parallel_size", "pipeline_parallel_size",
                 "kv_transfer_config", "speculative_config", "transprot")


def refuse(folder, name):
    """The error's type and text; without an engine where the configuration alone is refused."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from ringattn._vllm_cache import check_config

    model, options = REFUSED[name]
    options = options_of(folder, model, options, {}) if "additional_config" not in options else {
        **options_of(folder, model, {}, {}), **options}
    if options.get("speculative_config"):
        options["speculative_config"]["model"] = options["model"]
    try:
        if name in OF_THE_CONFIG:
            options.pop("disable_log_stats")
            check_config(EngineArgs(**options).create_engine_config())
        else:
            LLM(**options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        gc.collect()
    return ["nothing", ""]


def lose(folder, pids):
    """Kills the worker of the cache while two requests decode. Returns the error's type and text."""
    from vllm import SamplingParams

    with engine(folder, "llama", {}, {"world_size": 1}) as llm:
        for seed in range(2):
            llm.llm_engine.add_request(str(seed), {"prompt_token_ids": prompt(seed, 40)},
                                       SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False))
        for _ in range(5):
            llm.llm_engine.step()
        (member,) = placement_of(llm)["members"]
        os.kill(pids[member], signal.SIGKILL)
        try:
            for _ in range(100):
                llm.llm_engine.step()
        except Exception as error:
            return [type(error).__name__, str(error)]
    return ["nothing", ""]


def cache_of(llm):
    """The EngineCache of an engine in this process."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return runner.attn_groups[0][0].get_metadata_builder()._cache


def placement_of(llm):
    return cache_of(llm).worker_cache.placement


def main():
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if command == "models":
        write_models(folder)
    elif command == "tokens":
        found = {}
        for case in sys.argv[4:] or CASES:
            found[case] = run_case(folder, case)
            pathlib.Path(sys.argv[3]).write_text(json.dumps(found))
    elif command == "refused":
        pathlib.Path(sys.argv[3]).write_text(json.dumps({name: refuse(folder, name) for name in sys.argv[4:] or REFUSED}))
    elif command == "lost":
        pathlib.Path(sys.argv[3]).write_text(json.dumps(lose(folder, json.loads(sys.argv[4]))))
    else:
        sys.exit(f"unknown command {command}")


if __name__ == "__main__":
    main()

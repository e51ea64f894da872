"""substitute_hf_flash_attn: packed documents on the ranks give the logits and gradients of eager attention."""
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

from lib.small_models import MODELS, SIZE  # noqa: E402

OFFSETS = [0, 9, 40, 48]


def model_of(name, implementation):
    torch.manual_seed(1)
    kind, options = MODELS[name]
    return transformers.AutoModelForCausalLM.from_config(kind(**SIZE, **options), attn_implementation=implementation)


def inputs():
    tokens = torch.randint(1, SIZE["vocab_size"], (1, OFFSETS[-1]), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(end - begin) for begin, end in zip(OFFSETS, OFFSETS[1:])])[None]
    return tokens, positions


def on_rank(rank, world_size, name, implementation):
    from ringattn.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

    substitute_hf_flash_attn(None, 1)
    if implementation == "flash_attention_2":  # needs the package flash_attn when the model is made
        model = model_of(name, "eager")
        model.config._attn_implementation = implementation
    else:
        model = model_of(name, implementation)
    update_ring_flash_attn_params(torch.tensor(OFFSETS, dtype=torch.int32), None)
    tokens, positions = (value.chunk(world_size, 1)[rank] for value in inputs())
    logits = model(tokens, position_ids=positions, use_cache=False).logits
    logits.square().sum().backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
    return logits.detach().numpy(), {key: gradient.numpy() for key, gradient in gradients.items()} if rank == 0 else None


@pytest.mark.parametrize("name, implementation, world_size", [
    ("llama", "flash_attention_2", 1), ("llama", "flash_attention_2", 2), ("llama", "flash_attention_2", 4),
    ("mistral", "flash_attention_2", 2), ("gemma2", "flash_attention_2", 2), ("gemma2", "ringattn_shards", 2)])
def test_logits_and_gradients_equal_eagers(ranks, name, implementation, world_size):
    eager = model_of(name, "eager")
    tokens, _ = inputs()
    expected = torch.cat([eager(tokens[:, begin:end]).logits for begin, end in zip(OFFSETS, OFFSETS[1:])], 1)
    expected.square().sum().backward()
    results = ranks(world_size).run(on_rank, name, implementation)
    reference.close(torch.cat([torch.from_numpy(logits) for logits, _ in results], 1), expected.detach(), 1e-5)
    for key, parameter in eager.named_parameters():
        reference.close(results[0][1][key], parameter.grad, 2e-4)


def refused(rank, world_size, change):
    from ringattn.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

    group = torch.distributed.new_group([0, 1])
    substitute_hf_flash_attn(None, 1)
    model = model_of("gpt_oss" if change == "sinks" else "llama", "ringattn_shards")
    update_ring_flash_attn_params(torch.tensor([0, 30] if change == "offsets" else OFFSETS),
                                  group if change == "group" else None)
    tokens, positions = (value.chunk(world_size, 1)[rank] for value in inputs())
    options = {}
    if change == "padding":
        options["attention_mask"] = (torch.arange(tokens.shape[1]) > 2).long()[None]
    elif change == "batch":
        tokens = tokens.repeat(2, 1)
    return model(tokens, position_ids=positions, use_cache=False, **options)


@pytest.mark.parametrize("change, kind, match", [
    ("padding", "NotImplementedError", "attention_mask: hides keys"), ("batch", "NotImplementedError", "batch: is 2"),
    ("offsets", "InvalidArgumentError", "cu_seqlens: gives each rank 15 tokens; the model has 24 queries and 24 keys"),
    ("sinks", "NotImplementedError", "s_aux: "), ("group", "ValueError", "process_group: .* different groups"),
])
def test_what_is_refused(ranks, change, kind, match):
    import re

    for _, found, text in ranks(2).outcomes(refused, change):
        assert found == kind and re.search(f"(^|: ){match}", text), text


def offsets_for(rank, world_size, offsets):
    from ringattn.ring_flash_attn import update_ring_flash_attn_params

    update_ring_flash_attn_params(torch.tensor(offsets), None)


def test_offsets_that_cannot_be_shared(ranks):
    for _, kind, text in ranks(2).outcomes(offsets_for, [0, 7]):
        assert kind == "InvalidArgumentError" and "cu_seqlens: ends with 7; must be a multiple of the 2 ranks" in text

"""substitute_hf_flash_attn: packed documents on the ranks give the logits and gradients of eager attention."""
import os
import re

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

from lib.small_models import MODELS, SIZE, eager_attention  # noqa: E402

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


class Module(torch.nn.Module):
    """An attention module that may say of itself what is not so."""

    def __init__(self, is_causal):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def attended(rank, world_size, kind, is_causal, name):
    """This rank's attention with the mask of a mask function, as a model makes both."""
    from ringattn.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    substitute_hf_flash_attn(None, 1)
    update_ring_flash_attn_params(torch.tensor(OFFSETS), None)
    functions = {
        "causal": (masking_utils.causal_mask_function, {}),
        "everything": (masking_utils.bidirectional_mask_function, {"allow_is_bidirectional_skip": True}),
        "window": (masking_utils.sliding_window_causal_mask_function(4), {"local_size": 4}),
        "window to both sides": (masking_utils.sliding_window_bidirectional_mask_function(3), {"local_size": 3}),
        "chunks": (lambda b, h, i, j: (j <= i) & (j // 4 == i // 4), {"local_size": 4}),
        "of no known form": (lambda b, h, i, j: (i + j) % 3 != 1, {}),
    }
    tensors = [tensor.chunk(world_size, 2)[rank] for tensor in heads_first()]
    tokens, mask = tensors[0].shape[2], None
    if kind in functions:
        function, options = functions[kind]
        mask = AttentionMaskInterface()[name](1, tokens, tokens, mask_function=function, **options)
    return AttentionInterface()[name](Module(is_causal), *tensors, mask)[0].numpy()


def heads_first():
    return torch.randn(3, 1, 2, OFFSETS[-1], 16, generator=torch.Generator().manual_seed(3)).unbind(0)


@pytest.mark.parametrize("name", ["ringattn_shards", "flash_attention_2"])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_the_masks_meaning_decides_and_not_the_module(ranks, name, is_causal):
    places = torch.arange(OFFSETS[-1])
    distance = places[None] - places[:, None]
    document = torch.searchsorted(torch.tensor(OFFSETS), places, right=True)
    for kind, seen in (("causal", distance <= 0), ("everything", distance < 99),
                       ("window", (distance <= 0) & (distance > -4)), ("window to both sides", distance.abs() <= 3)):
        results = ranks(2).run(attended, kind, is_causal, name)
        exact = eager_attention(*heads_first(), torch.where(seen & (document[:, None] == document), 0.0, -torch.inf))
        reference.close(torch.cat([torch.from_numpy(result) for result in results], 1), exact, 1e-5)


@pytest.mark.parametrize("kind, is_causal, name, match", [
    ("chunks", True, "ringattn_shards", "attention_mask: the mask function of .* is neither causal nor complete"),
    ("of no known form", None, "ringattn_shards", "attention_mask: the mask function of .* is neither causal nor complete"),
    ("no mask", None, "ringattn_shards", "is_causal: Module has no mask and does not say"),
    ("no mask", None, "flash_attention_2", "is_causal: Module has no mask and does not say"),
    ("no mask", True, "ringattn_shards", "is_causal: Module has no mask and says that it is causal"),
])
def test_masks_that_are_refused(ranks, kind, is_causal, name, match):
    for _, found, text in ranks(2).outcomes(attended, kind, is_causal, name):
        assert found == "NotImplementedError" and re.search(match, text), text


def test_an_encoder(ranks):
    """Splinter's modules say that they are causal."""
    eager = encoder("eager")
    tokens, _ = inputs()
    expected = torch.cat([eager(tokens[:, begin:end]).last_hidden_state
                          for begin, end in zip(OFFSETS, OFFSETS[1:])], 1).detach()
    results = ranks(2).run(encoded)
    reference.close(torch.cat([torch.from_numpy(result) for result in results], 1), expected, 1e-5)


def encoder(implementation):
    """A tiny Splinter without dropout. Its positions are those of the documents."""
    torch.manual_seed(1)
    options = {key: value for key, value in SIZE.items() if key != "num_key_value_heads"}
    config = transformers.SplinterConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.SplinterModel._from_config(config, attn_implementation=implementation).eval()


def encoded(rank, world_size):
    from ringattn.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

    substitute_hf_flash_attn(None, 1)
    update_ring_flash_attn_params(torch.tensor(OFFSETS), None)
    tokens, positions = (value.chunk(world_size, 1)[rank] for value in inputs())
    return encoder("ringattn_shards")(tokens, position_ids=positions).last_hidden_state.detach().numpy()


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
    for _, found, text in ranks(2).outcomes(refused, change):
        assert found == kind and re.search(f"(^|: ){match}", text), text


def offsets_for(rank, world_size, offsets):
    from ringattn.ring_flash_attn import update_ring_flash_attn_params

    update_ring_flash_attn_params(torch.tensor(offsets), None)


def test_offsets_that_cannot_be_shared(ranks):
    for _, kind, text in ranks(2).outcomes(offsets_for, [0, 7]):
        assert kind == "InvalidArgumentError" and "cu_seqlens: ends with 7; must be a multiple of the 2 ranks" in text

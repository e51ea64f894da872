"""Tiny configurations and inputs for the model families of transformers.

`tiny_config` makes a family's default configuration small: two layers, four heads, width 64. Sizes are recognised by
their names. `FAMILIES` has what a family needs beyond that.
"""
import copy
import csv
import dataclasses
import importlib.util
import inspect
import io
import re

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ringattn import huggingface

VOCABULARY = 160
# Names of whole numbers in configurations, and the value that a tiny model has. The first match counts.
RULES = [(re.compile(pattern), value) for pattern, value in [
    (r"(^|_)vocab_size(_per_layer_input)?$", VOCABULARY),
    (r"^(num_labels|num_channels|pretraining_tp|type_vocab_size)$", None),
    (r"^(qk_nope_head_dim|qk_rope_head_dim|rotary_dim)$", 8),
    (r"^(v_head_dim|head_dim|d_kv|qk_head_dim|index_head_dim|attention_head_dim|.*_head_dim|dim_head|mamba_d_head|"
     r"attention_head_size|.*_attention_head_size|mamba_head_dim|head_size)$", 16),
    (r"^(kv_lora_rank|q_lora_rank|.*_lora_rank|o_lora_rank)$", 32),
    (r"^index_topk$", 12),
    (r"^(num_key_value_heads|num_kv_heads|n_head_kv|.*_num_key_value_heads|num_key_value_heads_.*|index_n_heads)$", 2),
    (r"^(num_attention_heads|n_heads?|num_heads|attention_heads|.*attention_heads|.*_num_heads|.*_n_heads|"
     r"num_attention_heads_.*)$", 4),
    (r"^(num_hidden_layers|n_layers?|num_layers|.*_num_layers|.*_layers|depth|.*_num_hidden_layers|"
     r"num_hidden_layers_.*|n_layer)$", 2),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts|.*_num_experts)$", 4),
    (r"^(num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|moe_top_k|top_k_experts|num_selected_experts)$", 2),
    (r"^(n_group|topk_group|num_expert_groups?|n_shared_experts|num_shared_experts)$", 1),
    (r"^(intermediate_size|.*_intermediate_size|ffn_dim|.*_ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|"
     r"feed_forward_dim|.*_ffn_hidden_size|intermediate_size_.*|.*intermediate_dim|dense_intermediate_size)$", 64),
    (r"^(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|model_dim|emb_dim|embedding_size|embedding_dim|"
     r"d_embed|.*hidden_size|.*_embed_dim|.*hidden_dim|projection_dim|.*_projection_dim|encoder_hidden_dim|"
     r"output_dim|.*_output_dim|lm_hidden_size|word_embed_proj_dim|cross_attention_dim|hidden_size_.*)$", 64),
    (r"^(max_position_embeddings|n_positions|max_source_positions|max_target_positions|n_ctx|max_seq_len|seq_length|"
     r"max_sequence_length|context_length|max_seq_length)$", 256),
    (r"^(sliding_window|.*_sliding_window|local_attention)$", 9),
    (r"^attention_chunk_size$", 8),
]]
# A family's own values, of the fields of its configuration.
FAMILIES = {
    "autoformer": {"prediction_length": 8, "context_length": 16},
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}},
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "informer": {"prediction_length": 8, "context_length": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64, "expand": 2},
    "nemotron": {"num_key_value_heads": 2},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4},
    "hunyuan_vl_text": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "reformer": {"is_decoder": True},
    "sam3_vision_model": {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]},
    "sam3_vit_model": {"image_size": 112, "pretrain_image_size": 56, "window_size": 4},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
}
# A model above this many parameters is not tiny, and is not tried.
MAX_PARAMETERS = 30_000_000


def tiny_number(name, value):
    for pattern, tiny in RULES:
        if pattern.match(name):
            return value if tiny is None or value <= 0 else min(tiny, value)
    return value


def _own_fields(kind):
    of_all = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default is dataclasses.MISSING and \
            field.default_factory is not dataclasses.MISSING else field.default
        if field.name not in of_all and default is not dataclasses.MISSING:
            yield field.name, default


def tiny_config(kind, **given):
    """A configuration of the class `kind`, whose sub-configurations are tiny, too."""
    values = {}
    token_ids = []
    parts = getattr(kind, "sub_configs_defaults", None) or {}
    fields = dict(_own_fields(kind))
    for name, default in fields.items():
        if name in parts:
            continue
        if re.search(r"(token_id|token_index|_id)$", name) and isinstance(default, int) and default >= 0:
            token_ids.append((name, default))
        elif isinstance(default, int) and not isinstance(default, bool):
            values[name] = tiny_number(name, default)
    for name, spec in parts.items():
        if name in fields and not spec.optional:
            part = spec.config_class
            if not issubclass(part, PreTrainedConfig):
                part = CONFIG_MAPPING[spec.model_type]
            own = {key: tiny_number(key, value) if isinstance(value, int) and not isinstance(value, bool) else value
                   for key, value in spec.init_kwargs.items()}
            values[name] = tiny_config(part, **own)
    # Special tokens keep their order, at the end of the vocabulary if they are not at its beginning.
    free = VOCABULARY - 2
    for name, default in sorted(token_ids, key=lambda item: item[1]):
        if default >= VOCABULARY - 40:
            values[name] = free
            free -= 1
    if "qk_rope_head_dim" in fields:  # latent attention: the rotary part has its own width, and heads are not grouped
        values |= {name: value for name, value in (("head_dim", 8), ("num_key_value_heads", 4)) if name in fields}
    values |= FAMILIES.get(kind.model_type, {}) | given
    return kind(**values)


# The kinds of models that are tried, with transformers' mapping of families to their classes.
KINDS = [("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
         ("encoder-decoder", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
         ("encoder", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
         ("speech", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
         ("multimodal", modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
         ("multimodal", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)]


def _classes_of(kind):
    """Model classes for the configuration class `kind`, by name."""
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    return {name: value for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
            and getattr(value, "config_class", None) is kind and not name.endswith("PreTrainedModel")}


def models_of(family):
    """{kind of model: its class} of a family: of its language models, or else its largest model."""
    found = {}
    for kind, mapping in KINDS:
        names = mapping.get(family)
        if names and kind not in found:
            found[kind] = getattr(transformers, names if isinstance(names, str) else names[0])
    names = modeling_auto.MODEL_MAPPING_NAMES.get(family)
    if not found and names:
        found["model"] = getattr(transformers, names if isinstance(names, str) else names[0])
    if not found:
        config = CONFIG_MAPPING[family]
        classes = _classes_of(config) if importlib.util.find_spec(
            config.__module__.replace("configuration_", "modeling_")) else {}
        if classes:
            found["part"] = max(sorted(classes.items()), key=lambda item: len(item[0]))[1]
    return found


def pair(family, kind):
    """A model with eager attention, and one with ours and the same weights. `kind`: of `models_of`.

    None for the second: the family does not accept other attention than its own.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(tiny_config(CONFIG_MAPPING[family])).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters")
    models = []
    for implementation in ("eager", "ringattn"):
        config = tiny_config(CONFIG_MAPPING[family])
        torch.manual_seed(0)
        try:
            models.append(kind._from_config(config, attn_implementation=implementation).train(False))
        except NotImplementedError as error:
            if not models or not str(error).startswith("attn_implementation: "):
                raise
            return models[0], None
    _spread(models[0])
    models[1].load_state_dict(models[0].state_dict())
    return models


@torch.no_grad()
def _spread(model):
    """Weights large enough for an attention that is not uniform, and none that are zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        if not parameter.isfinite().all() or parameter.abs().max() > 100:  # the family leaves it uninitialised
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        # The deviation of equal values is their rounding.
        if parameter.dim() >= 2 and parameter.std() > 1e-3 * parameter.abs().max():
            parameter *= 1.2 * parameter[0].numel() ** -0.5 / parameter.std()
        else:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


BATCH, TOKENS = 3, 24


def _parts(config):
    """The configuration, and those inside."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part)


def _of_parts(config, name, default):
    return next((value for part in _parts(config) if (value := getattr(part, name, None)) is not None), default)


def _pixels(config, random):
    size = _of_parts(config, "image_size", 32)
    size = list(size) if isinstance(size, (list, tuple)) else [size, size]
    return torch.randn(BATCH, _of_parts(config, "num_channels", 3), *size, generator=random)


def inputs_for(model):
    """Inputs for its forward that may do, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    config = model.config
    random = torch.Generator().manual_seed(1)
    text, more = {}, {}
    if "input_ids" in parameters:
        size = getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY
        text["input_ids"] = torch.randint(5, max(min(size, VOCABULARY) - 60, 10), (BATCH, TOKENS), generator=random)
        if "decoder_input_ids" in parameters:
            text["decoder_input_ids"] = text["input_ids"].flip(1)[:, :TOKENS - 7]
        yield text
    if "pixel_values" in parameters:
        more["pixel_values"] = _pixels(config, random)
        if text:
            yield {**text, **more}
        yield more
    if "input_features" in parameters:
        bins = _of_parts(config, "num_mel_bins", 80)
        length = _of_parts(config, "max_source_positions", 128)
        for shape in ((BATCH, bins, 2 * length), (BATCH, 2 * length, bins)):
            features = {"input_features": torch.randn(shape, generator=random)}
            if "decoder_input_ids" in parameters:
                features["decoder_input_ids"] = torch.randint(5, 90, (BATCH, TOKENS - 7), generator=random)
            yield {**text, **features}
    if "input_values" in parameters:
        yield {"input_values": torch.randn(BATCH, 4000, generator=random)}
        yield {"input_values": torch.randn(BATCH, 1024, _of_parts(config, "num_mel_bins", 128), generator=random)}
    for name in ("inputs_embeds", "hidden_states", "query_embeds"):
        if name in parameters and "input_ids" not in parameters:
            yield {name: torch.randn(BATCH, TOKENS, _of_parts(config, "hidden_size", 64), generator=random)}


def _floats(output):
    """The floating-point results of a model's forward that have rows."""
    values = output.items() if hasattr(output, "items") else enumerate(output if isinstance(output, tuple) else (output,))
    found = {}
    for name, value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
            found[name] = value
    return found


def run(model, given, rows=None):
    """(results, gradients by parameter). `rows` [batch, tokens]: of results with tokens alone, and of those rows."""
    model.zero_grad()
    torch.manual_seed(2)
    results = {}
    for name, value in _floats(model(**given)).items():
        if rows is not None:
            if value.shape[:2] == rows.shape:
                value = value[rows]
            elif "decoder_input_ids" not in given or value.shape[1] != given["decoder_input_ids"].shape[1]:
                continue  # a pooled row may be one of padding
        results[name] = value
    random = torch.Generator().manual_seed(3)
    loss = sum((value.float() * torch.randn(value.shape, generator=random)).sum() for value in results.values()
               if value.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return ({name: value.detach() for name, value in results.items()},
            {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None})


def distance(ours, theirs):
    """The largest relative error of results or gradients, and where it is."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    largest = max((value.double().norm().item() for value in theirs.values()), default=0.0)
    worst = (0.0, "")
    for name, value in theirs.items():
        assert ours[name].shape == value.shape, name
        error = (ours[name].double() - value.double()).norm().item()
        relative = error / (value.double().norm().item() + 1e-3 * largest + 1e-12)
        if not relative <= worst[0]:
            worst = (relative, name)
    return worst


class Calls:
    """Counts calls of ringattn's attention function."""

    def __enter__(self):
        self.count = 0
        self._function = huggingface.attention

        def counted(*tensors, **options):
            self.count += 1
            return self._function(*tensors, **options)

        huggingface.attention = counted
        return self

    def __exit__(self, *_):
        huggingface.attention = self._function


def padding(side):
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, :9], mask[1, :2] = 0, 0
    return mask if side == "left" else mask.flip(1)


def _runs(given):
    """What is compared: (name, inputs, rows that count) of each run."""
    yield "plain", given, None
    if "input_ids" in given:
        for side in ("left", "right"):
            mask = padding(side)
            yield f"padding on the {side}", {**given, "attention_mask": mask}, mask.bool()


def _generate(model, given):
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": padding("left")}
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = 0
    with torch.no_grad():
        return model.generate(given["input_ids"], **options)


def _first_that_runs(model):
    """(inputs, results) of the first inputs that the model accepts; None and the last error, in words."""
    why = "no input is known"
    for given in inputs_for(model):
        try:
            found = run(model, given)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".replace("\n", " ")[:150]
            continue
        if found[0] and all(value.isfinite().all() for value in found[0].values()):
            return given, found
        why = "its results are not finite" if found[0] else "it has no results with rows"
    return None, why


def _in_float64(model, given, rows):
    exact = copy.deepcopy(model).double()
    return run(exact, {name: value.double() if value.is_floating_point() else value for name, value in given.items()},
               rows)


def _difference(eager, inputs, rows, exact, actual):
    """What differs, in words; "" if nothing does. `exact` and `actual`: results of `run` of eager's model and of ours."""
    for index, (what, bound) in enumerate((("results", 1e-4), ("gradients", 2e-3))):
        worst = distance(actual[index], exact[index])
        if not worst[0] <= bound:  # eager attention's own rounding, if float64 agrees with ours
            in_float64 = _in_float64(eager, inputs, rows)[index]
            worst = distance(actual[index], in_float64)
            bound = max(bound, 1.2 * distance(exact[index], in_float64)[0])
        if not worst[0] <= bound:
            return f"{what} differ by {worst[0]:.1e} at {worst[1]}"
    return ""


@torch.no_grad()
def _moved(model):
    """A copy whose weights are a little different, in the same way for all models."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(4)
    for parameter in moved.parameters():
        if parameter.is_floating_point():
            parameter *= 1 + 0.02 * torch.randn(parameter.shape, generator=generator)
    return moved


def compare(kind, eager, ours):
    """(verdict, detail) of a pair of models. AssertionError: they differ, and nothing was refused.

    "service": equal, and the service computed. "own attention": equal, and the service was not called. "refused": by
    name. "not tried": the eager model does not run with inputs that are known here.
    """
    if ours is None:
        return "refused", "attn_implementation"
    given, plain = _first_that_runs(eager)
    if given is None:
        return "not tried", plain
    with Calls() as calls:
        for name, inputs, rows in _runs(given):
            try:
                exact = plain if rows is None else run(eager, inputs, rows)
            except Exception:
                continue  # a family that takes no attention mask
            try:
                actual = run(ours, inputs, rows)
            except NotImplementedError as error:
                return "refused", str(error).split(":")[0]
            difference = _difference(eager, inputs, rows, exact, actual)
            if difference.startswith("gradients"):
                # A ReLU whose input is within rounding of 0 has another derivative. With other weights it has not.
                moved = _moved(eager)
                difference = _difference(moved, inputs, rows, run(moved, inputs, rows), run(_moved(ours), inputs, rows))
            assert not difference, f"{kind}, {name}: {difference}"
        if kind in ("causal", "encoder-decoder") and "input_ids" in given and eager.can_generate():
            try:
                exact = _generate(eager, given)
            except Exception:
                exact = None  # it does not generate from text alone
            if exact is not None:
                try:
                    actual = _generate(ours, given)
                except NotImplementedError as error:
                    return "refused", str(error).split(":")[0]
                assert torch.equal(actual, exact), f"{kind}: other tokens are generated"
    return ("service" if calls.count else "own attention"), ""


def table(verdicts):
    """The families that were tried, as CSV."""
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["family", "attention", "reason"])
    rows.writerows((family, verdict, detail if verdict == "refused" else "")
                   for family, (verdict, detail) in sorted(verdicts.items()) if verdict != "not tried")
    return file.getvalue()

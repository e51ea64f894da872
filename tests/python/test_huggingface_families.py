"""Model families of transformers, made tiny: logits, gradients and generated tokens equal eager attention's, or the
family is refused by name.

A sample runs by default, every family with RINGATTN_PYTHON_FAMILIES=full. RINGATTN_PYTHON_FAMILIES_TABLE names the file
to write; huggingface_families.csv is one.
"""
import os
import pathlib

import pytest

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402
from lib import tiny_models  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

IS_FULL = os.environ.get("RINGATTN_PYTHON_FAMILIES") == "full"
# What each stands for: plain decoders, windows, softcap, sinks, chunks, sparse attention, latent keys, experts, position
# biases, encoders, encoder-decoders, speech, vision, and models that do not use the attention interface.
SAMPLE = ["llama", "mistral", "gemma3_text", "gemma2", "gpt_oss", "llama4_text", "deepseek_v32", "deepseek_v3", "qwen3_moe",
          "t5", "bert", "modernbert", "bart", "bigbird_pegasus", "pegasus_x", "nllb-moe", "whisper", "vit", "splinter",
          "bloom", "mpt", "deepseek_v4", "glm_moe_dsa", "inkling2_text"]
# Families that are neither equal nor refused would fail; fewer than these equal ones means that the tiny models broke.
# huggingface_families.csv has 346.
MIN_EQUAL = 335


@pytest.fixture(autouse=True)
def registered(default_client):
    ringattn.huggingface.register()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def verdicts():
    """{family: (verdict, detail)}, filled by the tests."""
    return {}


@pytest.mark.parametrize("family", CONFIG_MAPPING_NAMES if IS_FULL else SAMPLE)
def test_family(family, verdicts):
    try:
        models = tiny_models.models_of(family)
        assert models, "there is no model class"
        pairs = [(kind, tiny_models.pair(family, cls)) for kind, cls in models.items()]
    except Exception as error:
        verdicts[family] = ("not tried", f"{type(error).__name__}: {error}"[:100])
        if not IS_FULL:
            raise
        pytest.skip(f"cannot be made tiny: {type(error).__name__}: {error}"[:200])
    found = [tiny_models.compare(kind, *pair) for kind, pair in pairs]
    # A family with several models gets the first of these verdicts.
    verdict = min(found, key=lambda verdict: ("refused", "service", "own attention", "not tried").index(verdict[0]))
    verdicts[family] = verdict
    if verdict[0] == "not tried":
        assert IS_FULL, verdict
        pytest.skip(f"the tiny model does not run with eager attention: {verdict[1]}")


def test_enough_families_were_compared(verdicts):
    counts = {}
    for verdict, _ in verdicts.values():
        counts[verdict] = counts.get(verdict, 0) + 1
    print(counts)
    if IS_FULL:
        assert counts.get("service", 0) >= MIN_EQUAL, counts
        assert len(verdicts) == len(CONFIG_MAPPING_NAMES)
    else:
        assert counts.get("service", 0) >= len(SAMPLE) - 4, counts
    if path := os.environ.get("RINGATTN_PYTHON_FAMILIES_TABLE"):
        pathlib.Path(path).write_text(tiny_models.table(verdicts))

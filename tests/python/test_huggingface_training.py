"""Training steps of tiny models, with our attention and with eager's."""
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402
from lib.small_models import MODELS, SIZE, pair, registered, tokens  # noqa: E402, F401


def test_gradient_checkpointing():
    plain, ours = pair("gemma2")
    ids = tokens()
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for model in (plain, ours):
        model(ids, use_cache=False).logits.square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    reference.close(gradients[1], gradients[0], 1e-4)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(1, SIZE["vocab_size"], (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


TRAINED = {**MODELS, "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
           "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16})}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_step_of_the_trainer_in_bfloat16(name, tmp_path, monkeypatch):
    """Under `bf16=True` norms and rotary embeddings leave q and k in float32, next to a v in bfloat16."""
    pytest.importorskip("accelerate")
    monkeypatch.setitem(MODELS, name, TRAINED[name])
    seen, losses = set(), []
    forward = ringattn.huggingface.attention

    def spy(q, k, v, **options):
        seen.update((q.dtype, v.dtype))
        return forward(q, k, v, **options)

    monkeypatch.setattr(ringattn.huggingface, "attention", spy)
    for model in pair(name):
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path, per_device_train_batch_size=4, max_steps=2, bf16=True, use_cpu=True, report_to=[],
            logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1, learning_rate=1e-2)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Data())
        trainer.train()
        losses.append(torch.tensor([[entry["loss"], entry["grad_norm"]]
                                    for entry in trainer.state.log_history if "grad_norm" in entry]))
    assert torch.bfloat16 in seen
    exact, actual = losses
    assert exact.shape == (2, 2)
    # bfloat16's own error, of the loss and of the gradients' norm.
    assert ((actual - exact).abs() < torch.tensor([0.01, 0.1]) * exact).all(), losses


def test_a_step_in_float16_with_scaled_gradients():
    eager, ours = pair("gemma2")
    ids, gradients = tokens(), []
    for model in (eager, ours):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
        scaler.step(optimizer)
    reference.close(gradients[1], gradients[0], 2e-2)

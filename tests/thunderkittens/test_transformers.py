"""Models of transformers with these functions where they look for mamba_ssm's, causal_conv1d's and fla's."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import gpu_accel.thunderkittens as tk

transformers = pytest.importorskip("transformers")

OURS = {
    "mamba2_chunk_scan": tk.mamba_chunk_scan_combined,
    "torch_chunk_gated_delta_rule": tk.chunk_gated_delta_rule,
    "causal_conv1d_fn": tk.causal_conv1d_fn,
    "causal_conv1d_update": tk.causal_conv1d_update,
}


def mamba2():
    sizes = dict(hidden_size=32, num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=16, expand=2)
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(vocab_size=100, num_hidden_layers=2, **sizes))


def qwen3_next():
    attention = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    linear = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
    experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    sizes = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=4)
    config = transformers.Qwen3NextConfig(**sizes, **attention, **linear, **experts)
    return transformers.Qwen3NextForCausalLM(config)


def taken(function, called: list[str]):
    """What transformers makes of a package's function: arguments that it does not know are left out."""
    known = inspect.signature(function).parameters

    def call(*given, **named):
        called.append(function.__name__)
        return function(*given, **{name: x for name, x in named.items() if name in known})

    return call


@pytest.mark.parametrize(
    ("make", "module", "names"),
    [(mamba2, "mamba2", ("mamba2_chunk_scan", "causal_conv1d_fn", "causal_conv1d_update")),
     (qwen3_next, "qwen3_next", ("torch_chunk_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"))],
    ids=["mamba2", "qwen3-next"],
)  # fmt: skip
def test_a_model_computes_the_same(make, module, names, monkeypatch):
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    if not all(hasattr(code, name) for name in names):
        pytest.skip("this transformers calls these functions by other names")
    torch.manual_seed(0)
    model, called = make().eval(), []
    tokens = torch.randint(0, 100, (2, 37), generator=torch.Generator().manual_seed(1))

    def run():
        model.zero_grad()
        out = model(tokens, labels=tokens)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return out.logits.detach(), grads, model.generate(tokens, max_new_tokens=3, do_sample=False)

    logits, grads, text = run()
    for name in names:
        monkeypatch.setattr(code, name, taken(OURS[name], called))
    same, gradients, again = run()
    assert {OURS[name].__name__ for name in names} == set(called)
    torch.testing.assert_close(same, logits, rtol=1e-4, atol=1e-5)
    assert grads.keys() == gradients.keys() and torch.equal(text, again)
    for name, grad in grads.items():
        torch.testing.assert_close(gradients[name], grad, rtol=1e-3, atol=1e-6, msg=name)

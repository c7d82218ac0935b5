"""SmolLM2 with our attention on a GPU: logits and gradients against eager attention in float32, in bfloat16."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from gpu_accel.flash_attention3 import hugging_face  # noqa: E402
from papers.flash_attention3 import capture  # noqa: E402

pytestmark = pytest.mark.gpu


def run(model, text, mask, attention):
    model.set_attn_implementation(attention)
    model.zero_grad()
    out = model(text, attention_mask=mask, labels=text.masked_fill(mask == 0, -100))
    out.loss.backward()
    layer = model.model.layers[0].self_attn
    grads = [p.weight.grad.double() for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    return [out.logits.detach().double()[mask.bool()], *grads]


@pytest.mark.skipif(bool(capture._no_model()), reason=capture._no_model() or "SmolLM2 is here")
def test_smollm2_errs_no_more_than_twice_what_eager_does():
    hugging_face.register()
    tokenizer, model, _ = capture._load_model()
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["Attention is a soft lookup: every query asks all keys before it. " * 20, "A short one."]
    given = tokenizer(texts, return_tensors="pt", padding=True).to("cuda")
    text, mask = given.input_ids, given.attention_mask
    truth = run(model.cuda(), text, mask, "eager")
    model.bfloat16()
    eager, ours = (run(model, text, mask, name) for name in ("eager", hugging_face.NAME))
    for name, a, b, c in zip(("logits", "q_proj", "k_proj", "v_proj"), ours, eager, truth, strict=True):
        error, bound = ((x - c).square().mean().sqrt().item() for x in (a, b))
        assert error <= 2 * bound, (name, error, bound)

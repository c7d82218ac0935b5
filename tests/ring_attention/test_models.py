"""Whole models: logits, loss and gradients of two ranks over gloo equal those of one device."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError
from gpu_accel.ring_attention import make_layout
from gpu_accel.ring_attention.simulate import simulate
from gpu_accel.ring_attention.transport import TorchTransport

sys.path.insert(0, str(Path(__file__).parent))
from processes import results, run_ranks  # noqa: E402

transformers = pytest.importorskip("transformers")
SEQLEN, VOCABULARY = 21, 60


def model(kind: str = "llama"):
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "sliding":
        config = transformers.MistralConfig(**sizes, head_dim=8, sliding_window=5, attn_implementation="eager")
        return transformers.MistralForCausalLM(config).double()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager")).double()


def tokens() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, SEQLEN), generator=torch.Generator().manual_seed(1))


def alone(kind: str):
    one = model(kind)
    out = one(tokens(), labels=tokens(), use_cache=False)
    out.loss.backward()
    return out.logits.detach(), float(out.loss.detach()), {n: p.grad for n, p in one.named_parameters()}


def on_ranks(rank: int, kind: str, layout: str, schedule: str):
    from gpu_accel.ring_attention.models import context_parallel

    one, transport = model(kind), TorchTransport(timeout=30)
    cut = make_layout(layout, seqlen=SEQLEN, ranks=transport.size)
    with context_parallel(one, layout=cut, transport=transport, schedule=schedule) as cp:
        logits = one(**cp.inputs(tokens()), use_cache=False).logits
        loss = cp.loss(logits, tokens())
        loss.backward()
        whole = cp.gather(logits)
    assert one.config._attn_implementation == "eager"
    for parameter in one.parameters():
        torch.distributed.all_reduce(parameter.grad)
    torch.distributed.all_reduce(total := loss.detach())
    return whole.numpy(), float(total), {n: p.grad.numpy() for n, p in one.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "layout", "schedule"),
    [("llama", "zigzag", "kv_ring"), ("llama", "striped", "ulysses"), ("sliding", "contiguous", "allgather")],
)
def test_two_ranks_equal_one(kind: str, layout: str, schedule: str, tmp_path: Path):
    logits, loss, grads = alone(kind)
    for found, total, gradients in results(run_ranks(on_ranks, 2, tmp_path, kind, layout, schedule)):
        # models compute the rotary embedding and the norms in float32 in parts, whatever their dtype
        assert torch.allclose(torch.from_numpy(found), logits, atol=1e-6)
        assert total == pytest.approx(loss, rel=1e-6)
        for name, grad in grads.items():
            assert torch.allclose(torch.from_numpy(gradients[name]), grad, atol=1e-6), name


def with_fsdp(rank: int) -> tuple[float, dict]:
    """Parameters in shards over all ranks, gradients averaged by FSDP2; each of two sequences in shards over two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gpu_accel.ring_attention.models import context_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    one, transport = model(), TorchTransport(mesh["sequence"].get_group(), timeout=30)
    for part in (*one.model.layers, one):
        fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    cut, mine = make_layout("zigzag", seqlen=SEQLEN, ranks=2), tokens()[rank // 2][None]
    with context_parallel(one, layout=cut, transport=transport, gradients="mean") as cp:
        loss = cp.loss(one(**cp.inputs(mine), use_cache=False).logits, mine)
        loss.backward()
    torch.distributed.all_reduce(total := loss.detach())
    return float(total) / 4, {n: p.grad.full_tensor().numpy() for n, p in one.named_parameters()}


def test_fsdp_averages_what_the_loss_is_scaled_for(tmp_path: Path):
    """Megatron-LM #673 and #906, DeepSpeed #5248: gradients must not grow with the ranks that share a sequence."""
    import torch.distributed.fsdp  # noqa: F401  before processes are forked that would each do it

    _, loss, grads = alone("llama")
    for total, gradients in results(run_ranks(with_fsdp, 4, tmp_path)):
        assert total == pytest.approx(loss, rel=1e-6)
        for name, grad in grads.items():
            assert torch.allclose(torch.from_numpy(gradients[name]), grad, atol=1e-6), name


@pytest.mark.parametrize(
    "changes",
    [{"layer_types": ["full_attention", "chunked_attention"]}, {"layer_types": ["linear_attention"] * 2},
     {"layers_block_type": ["mamba", "attention"]}, {"attention_chunk_size": 8}],
    ids=["chunks", "linear", "mamba", "chunks of old"],
)  # fmt: skip
def test_layers_that_would_silently_see_something_else_are_refused(changes: dict):
    from gpu_accel.ring_attention.models import check_layers

    config = model().config
    check_layers(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedError, match="cannot run on a shard: only attention, full_attention, sliding_"):
        check_layers(config)


def refused(rank: int) -> list[str]:
    from gpu_accel.ring_attention.models import context_parallel

    one, transport = model(), TorchTransport(timeout=30)
    cut = make_layout("zigzag", seqlen=SEQLEN, ranks=2)
    told = []
    padding = torch.ones(2, cut.local_length, dtype=torch.int64)
    padding[0, :3] = rank  # on rank 0 only
    mask = torch.ones(2, 1, cut.local_length, cut.local_length)
    mine = cut.shard(tokens(), rank)
    for changes in (
        {"attention_mask": mask}, {}, {"attention_mask": padding}, {"position_ids": None}, {"labels": mine},
        {"labels": mine, "shift_labels": mine},
    ):  # fmt: skip
        one.train()
        for layer in one.model.layers:
            layer.self_attn.attention_dropout = 0.0 if changes else 0.5
        try:
            with context_parallel(one, layout=cut, transport=transport) as cp:
                one(**{**cp.inputs(tokens()), **changes}, use_cache=False)
        except GpuAccelError as error:
            told.append(f"{type(error).__name__}: {error}")
        assert one.config._attn_implementation == "eager"
    return told


def test_masks_and_dropout_are_refused_and_the_model_is_set_back(tmp_path: Path):
    found = results(run_ranks(refused, 2, tmp_path))
    for masks, dropout, _, _, labels, means in found:
        assert "shifts its labels" in labels and "takes their mean" in means
        assert masks.startswith("UnsupportedError: attention masks are not taken")
        assert dropout.startswith("UnsupportedError: dropout (0.5)")
    assert found[0][2].startswith("UnsupportedError: padding is not taken") and "padding is not taken" in found[1][2]
    for _, _, _, positions, _, _ in found:
        assert "position_ids count the rows of a shard" in positions


def shifted(rank: int) -> float:
    """As transformers' own trainer does it: labels that are shifted already, and how many there are in all."""
    from gpu_accel.ring_attention.models import context_parallel

    one, transport = model(), TorchTransport(timeout=30)
    cut = make_layout("zigzag", seqlen=SEQLEN, ranks=2)
    with context_parallel(one, layout=cut, transport=transport) as cp:
        mine = cp.labels(tokens())
        loss = one(**cp.inputs(tokens()), labels=mine, shift_labels=mine, num_items_in_batch=2 * (SEQLEN - 1),
                   use_cache=False).loss  # fmt: skip
    assert not one._forward_pre_hooks
    return float(loss.detach())


def test_shifted_labels_and_their_number_give_the_loss(tmp_path: Path):
    assert sum(results(run_ranks(shifted, 2, tmp_path))) == pytest.approx(alone("llama")[1], rel=1e-6)


def test_a_mask_of_ones_hides_nothing() -> None:
    from gpu_accel.ring_attention.models import context_parallel
    from gpu_accel.ring_attention.transport import LocalTransport, World

    one, cut = model(), make_layout("zigzag", seqlen=SEQLEN, ranks=1)
    world = World(1)
    with world.changed, context_parallel(one, layout=cut, transport=LocalTransport(world, 0)) as cp:
        found = one(**cp.inputs(tokens()), attention_mask=torch.ones(2, cut.local_length), use_cache=False).logits
        assert torch.allclose(cp.gather(found), alone("llama")[0], atol=1e-6)
        with pytest.raises(InvalidInputError, match="logits must be"):
            cp.loss(found[:1], tokens())
        with pytest.raises(InvalidInputError, match="input_ids must be"):
            cp.inputs(tokens().float())


def test_a_model_that_keeps_its_own_attention_is_refused():
    """transformers only warns; Bloom, MPT, Falcon, RWKV, GPT-Neo and XGLM would each see their own shard."""
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    one = transformers.BloomForCausalLM(config)
    before = one.config._attn_implementation
    layout = make_layout("zigzag", seqlen=8, ranks=2)
    for told in entered(one, layout=layout):
        assert "BloomForCausalLM" in told
    assert one.config._attn_implementation == before


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("inside", [True, False], ids=["within", "after"])
def test_checkpoints_are_recomputed_over_the_ring_or_not_at_all(inside: bool):
    from torch.utils.checkpoint import CheckpointError

    from gpu_accel.ring_attention.models import context_parallel

    cut, whole = make_layout("zigzag", seqlen=SEQLEN, ranks=2), alone("llama")[2]

    def rank(transport):
        one = model().train()
        one.gradient_checkpointing_enable({"use_reentrant": False})
        with context_parallel(one, layout=cut, transport=transport) as cp:
            loss = cp.loss(one(**cp.inputs(tokens()), use_cache=False).logits, tokens())
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name: p.grad for name, p in one.named_parameters()}

    if inside:
        first, second = simulate(rank, 2)
        assert all(torch.allclose(first[n] + second[n], grad, atol=1e-6) for n, grad in whole.items())
    else:
        with pytest.raises(CheckpointError):
            simulate(rank, 2)
    one = model().train()
    one.gradient_checkpointing_enable({"use_reentrant": True})
    for told in entered(one):
        assert "checkpoints that re-enter autograd" in told


def test_models_that_count_positions_from_elsewhere_are_refused():
    """RoBERTa's first token is at padding_idx + 1: with positions from 0 it would be wrong without a word."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16, "max_position_embeddings": 32, "pad_token_id": 1}  # fmt: skip
    for kind in ("Roberta", "XLMRoberta", "Esm"):
        config = getattr(transformers, f"{kind}Config")(**sizes, mask_token_id=2)
        one = getattr(transformers, f"{kind}Model")(config)
        for told in entered(one, layout=make_layout("zigzag", seqlen=8, ranks=2)):
            assert "counts positions from its padding index on" in told, kind


def test_only_transformers_models():
    for told in entered(torch.nn.Linear(1, 1), layout=make_layout("zigzag", seqlen=8, ranks=2)):
        assert "a transformers model is needed" in told


def entered(one, alone: bool = False, **options) -> list[str]:
    """What each of two ranks is told that enters a context; with `alone`, which the second does with the options."""
    from gpu_accel.ring_attention.models import context_parallel

    right = {"layout": make_layout("zigzag", seqlen=8, ranks=2)}

    def rank(transport):
        given = right | (options if transport.rank == 1 or not alone else {})
        try:
            with context_parallel(one, transport=transport, **given) as cp:
                one(**cp.inputs(torch.ones(1, 8, dtype=torch.int64)), use_cache=False)
        except (InvalidInputError, UnsupportedError) as error:
            return str(error)
        raise AssertionError("nothing was refused")

    return simulate(rank, 2)


@pytest.mark.parametrize(
    "options",
    [{"layout": None}, {"layout": "zigzag"}, {"layout": make_layout("zigzag", seqlen=8, ranks=3)},
     {"gradients": "max"}, {"schedule": "ring"}, {"ulysses": 2}, {"schedule": "usp", "ulysses": 3}, {"foo": 1},
     {"softmax_scale": 1.0}, {"wire": torch.int8}],
    ids=["none", "name", "three ranks", "gradients", "schedule", "unread", "split", "foo", "of a layer", "wire"],
)  # fmt: skip
def test_a_rank_that_cannot_enter_the_context_tells_the_other(options: dict):
    first, second = entered(model(), alone=True, **options)
    assert first == f"nothing was sent, because another rank refused its inputs (rank 1: {second})"


def test_layers_are_recomputed_in_another_thread():
    """Of a GPU's tensors the backward runs in a thread of autograd, and there checkpoints call their layers again."""
    from gpu_accel.ring_attention.models import context_parallel
    from gpu_accel.ring_attention.transport import LocalTransport, World

    one, cut, found = model(), make_layout("zigzag", seqlen=SEQLEN, ranks=1), []
    world = World(1)
    with context_parallel(one, layout=cut, transport=LocalTransport(world, 0)) as cp:

        def call():
            with world.changed:
                found.append(one(**cp.inputs(tokens()), use_cache=False).logits[:, :SEQLEN])

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert found and torch.allclose(found[0], alone("llama")[0], atol=1e-6)


def test_labels_of_32_bits():
    from gpu_accel.ring_attention.models import ContextParallel
    from gpu_accel.ring_attention.transport import LocalTransport, World

    cut = make_layout("zigzag", seqlen=SEQLEN, ranks=2)
    cp = ContextParallel(cut, LocalTransport(World(2), 1), "kv_ring", "sum")
    logits = torch.randn(2, cut.local_length, VOCABULARY)
    assert torch.equal(cp.loss(logits, tokens().int()), cp.loss(logits, tokens()))


def test_positions_from_inputs_are_not_looked_into(monkeypatch):
    """To look waits for the GPU, in every step; what `inputs` has made is right. Anything else is looked into."""
    from gpu_accel.ring_attention import models
    from gpu_accel.ring_attention.layouts import Layout
    from gpu_accel.ring_attention.transport import LocalTransport, World

    layout = make_layout("zigzag", seqlen=SEQLEN, ranks=2)
    active = models.ContextParallel(layout, LocalTransport(World(2), 1), "kv_ring", "sum")
    given = [active.inputs(tokens())["position_ids"] for _ in range(3)]
    given[1] += 1  # each call has its own
    assert torch.equal(given[0][0], layout.positions(1, padding=0)) and torch.equal(given[2], given[0])
    counted = torch.arange(layout.local_length)[None]
    assert models._check_positions(active, given[0].clone()) is None
    assert isinstance(models._check_positions(active, counted), InvalidInputError)
    monkeypatch.setattr(Layout, "positions", None)
    assert all(models._check_positions(active, x) is None for x in given)
    with pytest.raises(TypeError):
        models._check_positions(active, given[0].clone())

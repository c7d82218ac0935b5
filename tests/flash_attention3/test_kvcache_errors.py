"""What `flash_attn_with_kvcache` refuses and how it says so; names, aliases, compilers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import explain_kvcache, flash_attn_with_kvcache, kvcache, quantize_cache
from gpu_accel.flash_attention3.kvcache import kvcache_op
from gpu_accel.testing.kvcache import clone, make

INT = torch.int32


def call(changes=None, **options):
    return flash_attn_with_kvcache(**make(poison=False, **options) | (changes or {}))


def q(*shape, **options):
    return torch.zeros(*shape, **{"dtype": torch.bfloat16} | options)


PAGED = {"page": 8}
WRONG = {
    "q-list": ({"q": [1]}, {}, "q must be a torch.Tensor"),
    "q-rank": ({"q": q(4, 32)}, {}, "batch, seqlen_q, heads, head_dim"),
    "q-integers": ({"q": q(2, 1, 4, 32, dtype=INT)}, {}, "q must be float16"),
    "heads": ({"q": q(2, 1, 5, 32)}, {}, "multiple of those of the cache"),
    "head-dim": ({"q": q(2, 1, 4, 40)}, {}, "one head_dim"),
    "head-dim-7": ({"q": q(2, 1, 4, 7), "k_cache": q(2, 64, 2, 7)}, {}, "multiple of 8"),
    "batch": ({"q": q(3, 1, 4, 32)}, {}, "give cache_batch_idx"),
    "cache-dtype": ({"k_cache": q(2, 64, 2, 32, dtype=torch.float16)}, {}, "k_cache must have the dtype of q"),
    "cache-dtypes": ({"k_cache": q(2, 64, 2, 32, dtype=torch.int8)}, {}, "one dtype"),
    "cache-shapes": ({"k_cache": q(2, 63, 2, 32)}, {}, "agree in all but head_dim"),
    "cache-strides": ({"k_cache": q(2, 64, 32, 2).transpose(2, 3)}, {}, "last stride 1"),
    "no-key-heads": ({"k_cache": q(2, 64, 0, 32), "v_cache": q(2, 64, 0, 32)}, {}, "multiple of those"),
    "lengths-int64": ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, {}, r"to\(torch.int32\)"),
    "lengths-shape": ({"cache_seqlens": torch.zeros(3, dtype=INT)}, {}, r"shape \(2,\)"),
    "lengths-too-long": ({"cache_seqlens": torch.tensor([3, 65], dtype=INT)}, {}, r"cache_seqlens\[1\] is 65"),
    "length-too-long": ({"cache_seqlens": 65}, {}, "from 0 to the capacity"),
    "length-bool": ({"cache_seqlens": True}, {}, "from 0 to the capacity"),
    "no-room": ({"cache_seqlens": torch.tensor([3, 63], dtype=INT)}, {"new": 2}, "2 tokens are appended"),
    "no-lengths": ({"cache_seqlens": None}, {"new": 2}, "where they are written"),
    "k-without-v": ({"v": None}, {"new": 2}, "k was given without v"),
    "new-shape": ({"k": q(2, 2, 3, 32)}, {"new": 2}, "seqlen_new"),
    "new-dtype": ({"v": q(2, 2, 2, 32, dtype=torch.float16)}, {"new": 2}, "v must have the dtype of q"),
    "table-int64": ({"page_table": torch.zeros(2, 8, dtype=torch.int64)}, PAGED, "page_table must be int32"),
    "table-batch": ({"page_table": torch.zeros(3, 8, dtype=INT)}, PAGED, "page_table must be of shape"),
    "table-rank": ({"page_table": torch.zeros(16, dtype=INT)}, PAGED, "pages of a sequence"),
    "table-page": ({"page_table": torch.full((2, 8), 99, dtype=INT)}, PAGED, "uses page 99, the cache has 17"),
    "table-negative": ({"page_table": torch.full((2, 8), -1, dtype=INT)}, PAGED, "uses page -1"),
    "two-tables": ({"block_table": torch.zeros(2, 8, dtype=INT)}, PAGED, "two names of one argument"),
    "page-size-0": ({"k_cache": q(9, 0, 2, 32), "v_cache": q(9, 0, 2, 32)}, PAGED, "page size"),
    "rows-with-pages": ({"cache_batch_idx": torch.zeros(2, dtype=INT)}, PAGED, "without pages"),
    "row": ({"cache_batch_idx": torch.tensor([0, 2], dtype=INT)}, {}, "the cache has 2 rows"),
    "row-twice": ({"cache_batch_idx": torch.tensor([1, 1], dtype=INT)}, {"new": 1}, "names a row twice"),
    "leftpad": ({"cache_leftpad": torch.tensor([0, 62], dtype=INT)}, {}, r"cache_leftpad\[1\] is 62"),
    "rotary-alone": ({"rotary_cos": torch.zeros(64, 8)}, {"new": 1}, "go together"),
    "rotary-no-k": ({"rotary_cos": torch.zeros(64, 8), "rotary_sin": torch.zeros(64, 8)}, {}, "need k and v"),
    "rotary-short": (dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(63, 8)), {"new": 1}, "63 positions"),
    "rotary-wide": (dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(64, 20)), {"new": 1}, "multiple of 8"),
    "sinks": ({"sinks": torch.zeros(2)}, {}, r"sinks must be \(4,\)"),
    "sinks-nan": ({"sinks": torch.tensor([0.0, float("nan"), 0.0, 0.0])}, {}, "sinks must be finite"),
    "window-below-minus-1": ({"window_size": (-5, 2)}, {}, "-1 or None for no bound, got -5"),
    "lse-text": ({"return_lse": "x"}, {}, "return_lse must be True or False"),
    "splits": ({"num_splits": -1}, {}, "num_splits"),
    "scale": ({"softmax_scale": 0.0}, {}, "softmax_scale"),
    "softcap": ({"softcap": -1.0}, {}, "softcap"),
    "window": ({"window_size": 3}, {}, "pair"),
    "causal": ({"causal": 1}, {}, "True or False"),
    "descale-without-use": ({"k_descale": torch.ones(2)}, {}, "8 or 4 bits"),
    "descale-shape": ({"k_descale": torch.ones(7)}, {"kind": "e4m3"}, r"must be \(\), \(heads_kv,\)"),
    "descale-dtype": ({"k_descale": torch.ones(2).double()}, {"kind": "e4m3"}, "float32"),
    "descale-kinds": ({"k_descale": torch.ones(2, 64, 2)}, {"kind": "e4m3"}, "one kind"),
    "descale-shared": (
        dict.fromkeys(("k_descale", "v_descale"), torch.ones(2, 64, 1)), {"kind": "e4m3", "new": 1}, "shared by heads",
    ),
    "out": ({"out": q(2, 1, 4, 40)}, {}, "out must be"),
    "out-expanded": ({"out": q(32).expand(2, 1, 4, 32)}, {}, "share memory"),
    "append-expanded": ({"k_cache": q(1, 64, 2, 32).expand(2, -1, -1, -1)}, {"new": 1}, "k_cache is written"),
    "append-shared-page": (
        {"page_table": torch.tensor([[1, 2], [1, 3]], dtype=INT)}, PAGED | {"new": 2, "lengths": [3, 2]},
        "both append to page 1",
    ),
    "append-where-another-reads": (
        {"page_table": torch.tensor([[1, 2], [1, 3]], dtype=INT)}, PAGED | {"new": 1, "lengths": [3, 8]},
        r"page_table\[0\] appends to page 1 where page_table\[1\] has keys",
    ),
    "append-page-twice": (
        {"page_table": torch.tensor([[1, 1], [2, 3]], dtype=INT)}, PAGED | {"new": 9, "lengths": [3, 2]},
        "both append to page 1",
    ),
    "backend": ({"backend": "cuda"}, {}, "backend must be one of"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments(changes, options, message):
    with pytest.raises(InvalidInputError, match=message):
        call(changes, **options)


def test_keys_and_values_must_not_be_appended_to_one_place():
    both, scales = q(2, 2, 64, 2, 32, dtype=torch.float32), torch.ones(2, 2, 64, 2)
    apart = {  # views of one tensor
        "halves": (both[0], both[1]),
        "rows": (both[:, 0], both[:, 1]),
        "tokens": (both[0, :, ::2], both[0, :, 1::2]),
        "packed": (both[0, ..., :16], both[0, ..., 16:]),
        "strides": tuple(both.as_strided((2, 8, 2, 8), (n, 16, 8, 1), at) for n, at in ((512, 0), (640, 128))),
    }
    overlapping = {
        "one-tensor": (both[0], both[0]),
        "slices": (both[0, :, :40], both[0, :, 24:]),
        "last-token": (both[0, :, :33], both[0, :, 31:]),
        "of-v-in-k": (both[0], both[0, ..., 24:]),
        "other-tokens": (both[0, :, ::2], both[0, :, 20:52]),
        "memory-of-numpy": (both[0], torch.from_numpy(both.numpy())[0]),
    }

    def append(caches, **options):
        batch, _, heads, dim, dim_v = *caches[0].shape, caches[1].shape[3]
        lengths = torch.zeros(batch, dtype=INT)
        k, v = (torch.ones(batch, 1, heads, d) for d in (dim, dim_v))
        asked = torch.ones(batch, 1, heads, dim)
        return flash_attn_with_kvcache(asked, *caches, k, v, cache_seqlens=lengths, **options)

    for name, caches in apart.items():
        assert append(caches, backend="reference").eq(1).all(), name
    for caches in overlapping.values():
        with pytest.raises(InvalidInputError, match="k_cache and v_cache share memory"):
            append(caches)
        q1 = torch.ones(2, 1, 2, caches[0].shape[3])
        flash_attn_with_kvcache(q1, *caches, backend="reference")  # nothing is written
    codes = both.to(torch.int8)
    append((codes[0], codes[1]), k_descale=scales[0], v_descale=scales[1])
    with pytest.raises(InvalidInputError, match="k_descale and v_descale share memory"):
        append((codes[0], codes[1]), k_descale=scales[0], v_descale=scales[0])
    with pytest.raises(InvalidInputError, match="v_descale is written"):
        append((codes[0], codes[1]), k_descale=scales[0], v_descale=torch.ones(()).expand(2, 64, 2))
    with torch.no_grad(), pytest.raises(InvalidInputError, match="k_cache and v_cache share memory"):
        torch.compile(lambda x: append((x, x)), backend="aot_eager")(both[0])


def test_nothing_is_written_over_what_is_read():
    """In the cache, or over q but shifted, o came out wrong: one row's result is where another row's key was."""
    memory = torch.randn(200)
    asked = memory[:64].view(2, 1, 2, 16)
    caches = [torch.randn(2, 8, 2, 16) for _ in range(2)]
    wanted = flash_attn_with_kvcache(asked, *caches, backend="reference")
    keys, values = (cache.view(-1) for cache in caches)
    for name, out in (("q", memory[16:80]), ("k_cache", keys[:64]), ("v_cache", values[64:128])):
        with pytest.raises(InvalidInputError, match=f"out and {name} share memory"):
            flash_attn_with_kvcache(asked, *caches, out=out.view(2, 1, 2, 16))
    new = torch.randn(2, 1, 2, 16)
    for given in ((caches[0][:, 3:4], new), (new, caches[1][:, :1]), (new, caches[0][:, :1])):
        with pytest.raises(InvalidInputError, match="lies in ._cache"):
            flash_attn_with_kvcache(asked, *caches, *given, cache_seqlens=4)
    flash_attn_with_kvcache(asked, *caches, out=memory[80:144].view(2, 1, 2, 16))
    flash_attn_with_kvcache(asked, *caches, out=asked)  # element on element
    torch.testing.assert_close(asked, wanted)


def test_what_there_is_no_kernel_for():
    with pytest.raises(HardwareError, match=r"compute capability 9\.0, got a cpu tensor"):
        call({"backend": "hopper"})
    with pytest.raises(UnsupportedError, match="head_dim 264 is above 256"):
        call({"backend": "portable"}, dim=264)
    with pytest.raises(UnsupportedError, match="power of two"):
        call({"backend": "portable"}, dim=48, kind="int4", granularity="token", groups=2)
    with pytest.raises(UnsupportedError, match="head_dim_v 16 is not a power of two from 32 up"):
        call({"backend": "portable"}, dim_v=16, kind="int4", granularity="token", groups=2)
    with pytest.raises(UnsupportedError, match="float64"):
        call({"backend": "portable"}, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="no backward"):
        call({"q": q(2, 1, 4, 32).requires_grad_()})
    assert call(dtype=torch.float64).dtype == torch.float64  # auto takes the reference on a CPU


def test_nothing_that_is_used_gets_a_silent_zero_for_a_gradient():
    table = torch.ones(64, 8, requires_grad=True)
    for changes in ({"rotary_cos": table, "rotary_sin": table}, {"out": q(2, 1, 4, 32).requires_grad_()}):
        with pytest.raises(UnsupportedError, match="no backward"):
            call(changes, new=1)


def test_without_interpreter_the_way_out_is_named():
    code = """
import torch
from gpu_accel.flash_attention3 import flash_attn_with_kvcache
q, c = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)
assert flash_attn_with_kvcache(q, c, c).shape == q.shape
try:
    flash_attn_with_kvcache(q, c, c, backend="portable")
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(HardwareError.__name__) and "TRITON_INTERPRET=1" in done.stdout, done.stderr


def _environment() -> dict[str, str]:
    import os

    kept = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_names_of_flash_attn():
    a = make(page=8, lengths=[20, 9], poison=False)
    o, lse = flash_attn_with_kvcache(**a, return_lse=True)
    a["block_table"] = a.pop("page_table")
    again, again_lse = flash_attn_with_kvcache(**a, return_softmax_lse=True)
    assert torch.equal(o, again) and torch.equal(lse, again_lse) and lse.shape == (2, 4, 1)


def test_given_output():
    a = make(lengths=[20, 9])
    out = torch.full((2, 3, 4, 40), 7.0, dtype=torch.bfloat16)[:, 1:2, :, :32]
    assert flash_attn_with_kvcache(**a, out=out) is out
    assert torch.equal(out, flash_attn_with_kvcache(**a))


def test_what_would_run():
    said = str(explain_kvcache(**make(page=16, kind="e4m3", new=2, batch_invariant=True, poison=False)))
    for words in ("portable: decode_attention", "e4m3, pages of 16, room for 64", "2 tokens", "splits of 64 keys"):
        assert words in said, said
    said = explain_kvcache(**make(dtype=torch.float64, poison=False))
    assert said.backend == "reference" and "float64" in said.refused["portable"]
    assert "compute capability 9.0" in said.refused["hopper"]
    with pytest.raises(HardwareError, match="take 'portable' or 'auto'"):
        explain_kvcache(**make(poison=False), backend="hopper")
    a = make(page=16, poison=False)
    by_name = {("block_table" if name == "page_table" else name): x for name, x in a.items()}
    assert str(explain_kvcache(**by_name)) == str(explain_kvcache(**a))
    with pytest.raises(TypeError, match="explain_kvcache.. got an unexpected keyword argument 'colour'"):
        explain_kvcache(**a, colour=1)


LLAMA = dict(batch=1, heads=32, heads_kv=8, dim=128, poison=False)
# what the Gluon kernel cannot do, and what it can and nobody has timed
HOPPER_REFUSES = {
    "float32": (dict(dtype=torch.float32), "takes q in bfloat16 and float16"),
    "int8": (dict(kind="int8"), "takes caches in the dtype of q and e4m3, got int8"),
    "token-scales": (dict(kind="e4m3", granularity="token"), "takes one scale for a head"),
    "head-dim": (dict(dim=96), "takes a head_dim of 64 or 128, got 96"),
    "rows": (dict(seqlen_q=5), "takes at most 16 queries x query heads of a key head, got 20"),
    "window": (dict(window_size=(5, 0)), "takes no window"),
    "softcap": (dict(softcap=3.0), "takes no soft cap"),
    "leftpad": (dict(cache_leftpad=torch.zeros(1, dtype=INT)), "takes no cache_leftpad"),
}  # fmt: skip
UNTIMED = {
    "fp16": (dict(dtype=torch.float16), "float16"),
    "head-dim-64": (dict(dim=64), "head_dim other than 128"),
    "queries": (dict(seqlen_q=4, causal=True), "several queries"),
    "splits": (dict(num_splits=3), "splits other than its own"),
    "batch-invariant": (dict(batch_invariant=True), "splits other than its own"),
}


@pytest.fixture
def hopper(monkeypatch):
    """As on a machine with an H100, as far as choosing goes."""
    hopper_decode = pytest.importorskip("gpu_accel.flash_attention3.hopper_decode")
    monkeypatch.setattr(kvcache, "_hopper_refusal", hopper_decode.refuse)


@pytest.mark.parametrize(("options", "why"), HOPPER_REFUSES.values(), ids=HOPPER_REFUSES.keys())
def test_what_the_gluon_kernel_refuses(hopper, options, why):
    said = explain_kvcache(**make(**LLAMA | options))
    assert said.backend != "hopper" and why in said.refused["hopper"]
    with pytest.raises(UnsupportedError, match=why):
        explain_kvcache(**make(**LLAMA | options), backend="hopper")


def test_an_address_the_gluon_kernel_cannot_read_from(hopper):
    a = make(**LLAMA)
    a["k_cache"] = torch.empty(1, 64, 8, 136, dtype=torch.bfloat16)[..., 4:132]
    said = explain_kvcache(**a)
    assert said.backend != "hopper" and "k_cache is not a multiple of 16 bytes" in said.refused["hopper"]


@pytest.mark.parametrize(("options", "why"), UNTIMED.values(), ids=UNTIMED.keys())
def test_auto_takes_the_gluon_kernel_only_where_it_was_timed(hopper, options, why):
    said = explain_kvcache(**make(**LLAMA | options))
    assert said.backend != "hopper" and why in said.refused["hopper"] and "backend='hopper'" in said.refused["hopper"]
    assert explain_kvcache(**make(**LLAMA | options), backend="hopper").backend == "hopper"


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, "4 warps of 16 keys, 2 per SM; 8 tiles, 32 splits"),
        ({"page": 16}, "of 16 keys"), ({"page": 1}, "of 16 keys"), ({"kind": "e4m3"}, "of 32 keys"),
        ({"kind": "e4m3", "page": 32}, "of 32 keys"), ({"kind": "e4m3", "page": 16}, "of 32 keys"),
        ({"kind": "e4m3", "page": 8}, "of 16 keys"), ({"new": 1, "causal": True}, "of 16 keys"),
    ],
)  # fmt: skip
def test_auto_takes_the_gluon_kernel(hopper, options, plan):
    a = make(**LLAMA | {"capacity": 4096} | options)
    said = explain_kvcache(**a)
    assert said.backend == "hopper" and plan in said.plan and "Gluon" in str(said)
    assert explain_kvcache(**a, backend="portable").refused["hopper"] == "not asked for"


def test_a_compiler_that_knows_no_addresses_leaves_the_choice_to_the_op(monkeypatch):
    hopper_decode = pytest.importorskip("gpu_accel.flash_attention3.hopper_decode")
    monkeypatch.setattr(hopper_decode, "capability", lambda device: (9, 0))
    with FakeTensorMode():
        one = {"device": "cuda", "dtype": torch.bfloat16}
        asked, cache = torch.empty(1, 1, 32, 128, **one), torch.empty(1, 64, 8, 128, **one)
        for backend in ("auto", "hopper"):
            assert flash_attn_with_kvcache(asked, cache, cache, backend=backend).shape == (1, 1, 32, 128)


@pytest.mark.parametrize("options", [{}, {"kind": "int8", "granularity": "token"}], ids=["bf16", "int8"])
def test_compiles_as_one_graph(options):
    a = make(new=1, batch=1, lengths=[20], poison=False, causal=True, **options)
    changed = [n for n in ("k_cache", "v_cache", "k_descale", "v_descale") if n in a]
    b = clone(a)

    def step(arguments):
        return flash_attn_with_kvcache(**arguments) * 2

    with torch.no_grad():
        expected = step(a)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(b)
    assert torch.equal(found, expected)
    assert all(torch.equal(a[n], b[n]) for n in changed)


def test_the_op_is_sound():
    a = make(new=1, lengths=[20, 9], poison=False)
    o, lse = torch.empty_like(a["q"]), torch.empty(2, 4, 1)
    arguments = (
        o, lse, a["k_cache"], a["v_cache"], None, None, a["q"], a["k"], a["v"], None, None, True, a["cache_seqlens"], 0,
        None, None, None, 0.2, -1, -1, 0.0, None, 0, False, "reference",
    )  # fmt: skip
    torch.library.opcheck(
        kvcache_op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"granularity": "heads"}, "granularity must be one of"),  # was taken for "token"
        ({"granularity": "tokens"}, "granularity must be one of"),
        ({"kind": "fp8"}, "kind must be one of"),
        ({"kind": ["int8"]}, "kind must be one of"),
        ({"groups": 2}, "groups go with int4"),  # was passed over
        ({"kind": "int4", "groups": 2}, "groups go with int4"),
        ({"kind": "int4", "granularity": "token", "groups": 3}, "groups must divide head_dim"),
        ({"groups": True}, "groups must divide head_dim"),
        ({"x": torch.zeros(2, 3, 4)}, "must be a tensor of floats"),
        ({"x": torch.zeros(1, 2, 3, 4, dtype=torch.int32)}, "must be a tensor of floats"),
        ({"x": torch.zeros(1, 2, 3, 5), "kind": "int4"}, "head_dim must be even"),
        ({"x": None}, "must be a tensor of floats"),
    ],
)
def test_caches_that_cannot_be_quantised(change, message):
    with pytest.raises(InvalidInputError, match=message):
        quantize_cache(**{"x": torch.zeros(1, 2, 3, 16), "kind": "int8"} | change)


@pytest.mark.parametrize("granularity", ["tensor", "head", "page", "token"])
@pytest.mark.parametrize("shape", [(0, 2, 1, 8), (2, 0, 1, 8), (2, 3, 0, 8)])
def test_caches_without_numbers_are_quantised(shape, granularity):
    codes, scales = quantize_cache(torch.zeros(shape), "int8", granularity)
    assert codes.shape == shape and bool((scales == 1).all())


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_a_nan_does_not_count_for_the_scale_of_its_token(kind):
    """The kernel and plain torch write the same scale and the same other numbers."""
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}[kind]
    q, new = torch.randn(1, 1, 1, 16), torch.tensor([3.0, float("nan"), -0.6, 0.1] * 4).reshape(1, 1, 1, 16)
    found = []
    for backend in ("portable", "reference"):
        caches = [torch.zeros(1, 4, 1, 16).to(dtype) for _ in range(2)]
        scales = [torch.ones(1, 4, 1) for _ in range(2)]
        flash_attn_with_kvcache(
            q, *caches, new, new, cache_seqlens=0, k_descale=scales[0], v_descale=scales[1], backend=backend
        )
        found.append((caches[0].float(), scales[0]))
    (codes, scale), (other, right) = found
    assert torch.equal(scale, right) and torch.equal(codes.nan_to_num(99), other.nan_to_num(99))
    expected = 3.0 / {"int8": 127.0, "e4m3": 448.0}[kind]
    assert abs(scale[0, 0, 0].item() / expected - 1) < 1e-6

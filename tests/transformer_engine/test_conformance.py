"""The published vectors: what the file says is what its generator makes, and what the reference and the kernels do."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.transformer_engine import conformance, formats
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import scheme as find_scheme

VECTORS = conformance.load()
BLOCKS = VECTORS["blocks"]


def numbers(texts: list[str]) -> torch.Tensor:
    return torch.tensor([float.fromhex(t) for t in texts], dtype=torch.float64)


def test_the_file_is_what_its_generator_makes():
    assert conformance.FILE.read_text() == conformance.text()


@pytest.mark.parametrize("name", VECTORS["formats"])
def test_decoding(name):
    wanted = numbers(VECTORS["formats"][name]["decode"]).float()
    codes = torch.arange(len(wanted), dtype=torch.uint8)
    torch.testing.assert_close(formats.decode(codes, name), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", conformance.DEFINITIONS)
def test_encoding(name):
    x, saturated, open_ended = zip(*VECTORS["formats"][name]["encode"], strict=True)
    x = numbers(list(x)).float()
    assert formats.encode(x, name).tolist() == list(saturated)
    known = torch.tensor([code is not None for code in open_ended])
    if known.all():
        assert formats.encode(x, name, saturate=False).tolist() == list(open_ended)
    else:  # a format with neither Inf nor NaN
        assert formats.FORMATS[name].nan_code is None


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("scheme", conformance.BLOCK_SCHEMES)
def test_blocks(scheme, backend, device):
    found = [block for block in BLOCKS if block["scheme"] == scheme]
    assert len(found) == len(VECTORS["inputs"])
    for block in found:
        rows = VECTORS["inputs"][block["case"]]
        x = torch.stack([numbers(row).float() for row in rows]).to(device)
        q = quantize(x, scheme, backend=backend)
        data, scales = q.codes.cpu().view(torch.uint8), q.scales.cpu()
        codes = formats.unpack_nibbles(data, x.shape[1]) if q.scheme.packed else data
        where = f"{scheme}, {block['case']}"
        assert codes.flatten().tolist() == block["codes"], where
        if scales.dtype == torch.float32:
            wanted = torch.stack([numbers(line) for line in block["scales"]]).float()
            torch.testing.assert_close(scales, wanted, rtol=0, atol=0, equal_nan=True, msg=where)
        else:
            assert scales.view(torch.uint8).tolist() == block["scales"], where
        if block["tensor_scale"] is not None:
            assert q.tensor_scale.item() == float.fromhex(block["tensor_scale"]), where


def test_packing_and_swizzle():
    from gpu_accel.transformer_engine import scales

    packing = VECTORS["packing"]
    assert formats.pack_nibbles(torch.tensor(packing["codes"], dtype=torch.uint8)).tolist() == packing["bytes"]
    order = VECTORS["swizzle"]["place_of_row_major_byte"]
    table = torch.arange(512, dtype=torch.int32).remainder(251).to(torch.uint8)
    flat = scales.swizzle_scales(table.view(128, 4))
    assert torch.equal(flat[torch.tensor(order)], table)


def test_the_vectors_hold_what_breaks_implementations():
    """Zero, NaN, infinite, tiny and huge blocks, ties, and the borders of the rules for scales."""
    assert {"zeros", "tiny", "huge", "special", "edges"} <= VECTORS["inputs"].keys()
    for name in ("mxfp8", "nvfp4", "int4_32"):
        text = find_scheme(name).text
        special = next(b for b in BLOCKS if b["scheme"] == text and b["case"] == "special")
        poisoned = {"mxfp8": 255, "nvfp4": 0x7F, "int4_32": "nan"}[name]
        assert poisoned in [s for line in special["scales"] for s in line]
    assert any(math.isinf(float.fromhex(t)) for row in VECTORS["inputs"]["special"] for t in row)

# SPDX-License-Identifier: Apache-2.0
"""Properties of the NVFP4 and FP8 codecs that hold for any weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lilicorr.checkpoint import fp8, nvfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def weights(draw: st.DrawFn, whole_groups: bool = False) -> torch.Tensor:
    """[N, K] of one of three dtypes: rows of very different size, groups of zeros, signs of zero."""
    num_rows = draw(st.integers(1, 9))
    columns = draw(st.integers(1, 5)) * 16 if whole_groups else draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn((num_rows, columns), generator=generator)
    weight *= torch.exp(draw(st.floats(0, 2)) * torch.randn((num_rows, 1), generator=generator))
    weight[torch.rand(weight.shape, generator=generator) < draw(st.sampled_from((0.0, 0.3, 0.95)))] = -0.0
    return weight.to(draw(st.sampled_from(DTYPES)))


@settings(max_examples=150, deadline=None)
@given(weights())
def test_nvfp4_shapes_dtypes_and_error_bound(weight: torch.Tensor) -> None:
    """Would catch codes or scales in another order, and a scale that does not reach the group's largest value.

    Half the widest gap between codes, 4 to 6, is a sixth of the group's range. E4M3 rounds the range by a sixteenth
    at most, where its numbers are normal, and by its smallest step where they are not.
    """
    encoded = nvfp4.encode(weight)
    num_rows, columns = weight.shape
    groups = -(-columns // 16)
    assert encoded.weight.shape == (num_rows, groups * 8) and encoded.weight.dtype == torch.uint8
    assert encoded.weight_scale.shape == (num_rows, groups) and encoded.weight_scale.dtype == torch.float8_e4m3fn
    assert encoded.weight_scale_2.shape == () and encoded.weight_scale_2.dtype == torch.float32
    decoded = nvfp4.decode(*encoded)
    assert (decoded[:, columns:] == 0).all()
    filled = torch.nn.functional.pad(weight.float(), (0, groups * 16 - columns)).view(num_rows, groups, 16)
    error = (decoded.view_as(filled) - filled).abs().amax(-1)
    bound = filled.abs().amax(-1) * (1 + 1 / 16) / 6 + 6 * 2.0**-9 * encoded.weight_scale_2
    assert (error <= bound).all()


@settings(max_examples=150, deadline=None)
@given(weights(whole_groups=True), st.sampled_from(DTYPES))
def test_nvfp4_survives_decoding_and_encoding_again(weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Would catch an encoder and a decoder that disagree: what one writes, the other must give back unchanged.

    Groups whose scale is subnormal in E4M3 are left out, because rounding may take them to a smaller scale, and
    -0 is encoded as 0.
    """
    first = nvfp4.encode(weight)
    decoded = nvfp4.decode(*first, dtype=torch.float32 if dtype == torch.float16 else dtype)
    again = nvfp4.encode(decoded, first.weight_scale_2)
    normal = (first.weight_scale.float() >= 2.0**-6).repeat_interleave(8, dim=1)
    codes = torch.stack((first.weight & 15, first.weight >> 4))
    codes[codes == 8] = 0
    same = codes[0] | codes[1] << 4
    assert torch.equal(again.weight[normal], same[normal])
    kept = first.weight_scale.float() >= 2.0**-6
    assert torch.equal(again.weight_scale.float()[kept], first.weight_scale.float()[kept])


@settings(max_examples=80, deadline=None)
@given(weights(whole_groups=True))
def test_rows_are_encoded_alone_and_in_blocks_alike(weight: torch.Tensor) -> None:
    """Would catch a block of rows that reads another's scale."""
    scale_2 = nvfp4.tensor_scale(weight)
    whole = nvfp4.encode(weight, scale_2)
    for row in range(len(weight)):
        alone = nvfp4.encode(weight[row : row + 1], scale_2)
        assert torch.equal(alone.weight, whole.weight[row : row + 1])
        assert torch.equal(alone.weight_scale.view(torch.uint8), whole.weight_scale[row : row + 1].view(torch.uint8))


@settings(max_examples=100, deadline=None)
@given(weights(), st.booleans())
def test_fp8_error_bound(weight: torch.Tensor, per_row: bool) -> None:
    """Would catch a scale taken over the wrong axis, and numbers that overflow to NaN.

    Three bits of mantissa: a sixteenth of the value; an eighth and a bit more where a bfloat16 quotient is
    rounded first.
    """
    encoded = fp8.encode(weight, fp8.row_scales(weight) if per_row else None)
    assert encoded.weight.shape == weight.shape
    assert encoded.weight_scale.shape == ((len(weight),) if per_row else ())
    decoded = fp8.decode(*encoded)
    smallest = 2.0**-9 * encoded.weight_scale.reshape(-1, 1)
    assert ((decoded - weight.float()).abs() <= weight.float().abs() / 14 + smallest).all()


def test_blocks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a row lost or repeated where a large weight is split into blocks of rows."""
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(1))
    whole = nvfp4.encode(weight), fp8.encode(weight), fp8.encode(weight, fp8.row_scales(weight))
    monkeypatch.setattr(nvfp4, "_BLOCK_ELEMENTS", 5 * 64)
    assert [len(range(37)[rows]) for rows in nvfp4.row_blocks(37, 64)] == [5] * 7 + [2]
    split = nvfp4.encode(weight), fp8.encode(weight), fp8.encode(weight, fp8.row_scales(weight))
    for ours, other in zip(whole, split, strict=True):
        for tensor, again in zip(ours, other, strict=True):
            assert torch.equal(tensor.view(-1).view(torch.uint8), again.view(-1).view(torch.uint8))
    assert torch.equal(nvfp4.decode(*split[0]), nvfp4.decode(*whole[0]))
    assert torch.equal(fp8.decode(*split[2]), fp8.decode(*whole[2]))


def test_a_weight_of_zeros_stays_zero() -> None:
    """Would catch zero divided by zero: Model Optimizer writes NaN scales for such a weight."""
    zeros = torch.zeros(4, 32)
    assert torch.equal(nvfp4.decode(*nvfp4.encode(zeros)), zeros)
    assert torch.equal(fp8.decode(*fp8.encode(zeros)), zeros)
    one_row = torch.eye(4, 32) * torch.tensor([[0.0], [1], [2], [3]])
    assert torch.equal(fp8.decode(*fp8.encode(one_row, fp8.row_scales(one_row))), one_row)


@pytest.mark.parametrize("codec", [nvfp4, fp8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(codec, bad: float) -> None:
    """Would catch a broken weight that becomes a plausible one."""
    weight = torch.ones(3, 32)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        codec.encode(weight)


@pytest.mark.parametrize("codec", [nvfp4, fp8])
@pytest.mark.parametrize("weight", [torch.ones(32), torch.ones(2, 32, dtype=torch.int8), torch.ones(0, 32)])
def test_only_matrices_of_floats_are_encoded(codec, weight: torch.Tensor) -> None:
    """Would catch a bias, an already packed weight or nothing at all being quantized."""
    with pytest.raises(ValueError, match="a matrix"):
        codec.encode(weight)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_must_be_positive(scale: float) -> None:
    """Would catch codes that no decoder can turn back."""
    with pytest.raises(ValueError, match="positive"):
        nvfp4.encode(torch.ones(2, 16), torch.tensor(scale))
    with pytest.raises(ValueError, match="positive"):
        fp8.encode(torch.ones(2, 16), torch.tensor(scale))


def test_decoders_refuse_what_does_not_belong_together() -> None:
    """Would catch scales of another weight, or of another format, being broadcast into plausible values."""
    encoded = nvfp4.encode(torch.ones(4, 32))
    with pytest.raises(ValueError, match=r"K/16"):
        nvfp4.decode(encoded.weight, encoded.weight_scale[:, :1], encoded.weight_scale_2)
    with pytest.raises(ValueError, match="needs uint8"):
        nvfp4.decode(encoded.weight, encoded.weight_scale.float(), encoded.weight_scale_2)
    with pytest.raises(ValueError, match="one per row"):
        fp8.decode(fp8.encode(torch.ones(4, 32)).weight, torch.ones(3))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        fp8.decode(torch.ones(4, 32), torch.ones(()))

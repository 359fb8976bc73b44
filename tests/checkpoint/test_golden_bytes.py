# SPDX-License-Identifier: Apache-2.0
"""Our encoders against bytes that NVIDIA Model Optimizer made (golden/make_golden.py)."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vllm_lilicorr.checkpoint import fp8, nvfp4

FILE = Path(__file__).parent / "golden" / "model_optimizer.safetensors"


def load_cases() -> dict[str, dict[str, torch.Tensor]]:
    cases: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(FILE, "pt") as file:
        for name in file.keys():
            case, _, tensor = name.rpartition("/")
            cases.setdefault(case, {})[tensor] = file.get_tensor(name)
    return cases


CASES = load_cases()


def assert_same_bytes(ours: torch.Tensor, golden: torch.Tensor) -> None:
    assert (ours.dtype, ours.shape) == (golden.dtype, golden.shape)
    assert torch.equal(ours.reshape(-1).view(torch.uint8), golden.reshape(-1).view(torch.uint8))


def encode(case: str) -> dict[str, torch.Tensor]:
    golden = CASES[case]
    if case.startswith("fp8-rows/"):
        return fp8.encode(golden["input"], fp8.row_scales(golden["input"]))._asdict()
    if case.startswith("fp8/"):
        return fp8.encode(golden["input"])._asdict()
    given = golden["weight_scale_2"] if case.endswith(("saturation", "shared scale")) else None
    return nvfp4.encode(golden["input"], given)._asdict()


@pytest.mark.parametrize("case", CASES)
def test_bytes_equal_model_optimizers(case: str) -> None:
    """Would catch a wrong tie, sign, nibble order, scale rounding, saturation, or filling of the last group."""
    ours = encode(case)
    assert set(CASES[case]) - {"input", "activation", "input_scale"} == set(ours)
    for name, tensor in ours.items():
        assert_same_bytes(tensor, CASES[case][name])


def test_cases_hold_what_they_are_for() -> None:
    """Would catch a golden file whose hard cases became easy ones."""
    scaled = CASES["nvfp4-w4a16/ties"]["input"]
    assert float(CASES["nvfp4-w4a16/ties"]["weight_scale_2"]) == 1
    assert all((scaled == sign * value).any() for value in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) for sign in (1, -1))
    zeros = CASES["nvfp4-w4a16/zeros"]
    assert torch.signbit(zeros["input"][4, :48]).all()
    assert (zeros["weight_scale"].float()[4, :3] == 1).all() and (zeros["weight"][4, :24] == 0).all()
    assert (zeros["weight"][3] >> 4 == 8).any(), "no negative value rounds to zero"
    smallest = CASES["nvfp4-w4a16/tiny groups"]["weight_scale"].float().amin()
    assert smallest == 2.0**-9
    assert (CASES["nvfp4-w4a16/saturation"]["weight_scale"].float() == 448).any()
    assert CASES["nvfp4-w4a16/tail"]["input"].shape[1] % 16
    with safe_open(FILE, "pt") as file:
        assert file.metadata()["producer"].startswith("modelopt 0.47")


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("nvfp4/")])
def test_input_scale_is_the_largest_activation_over_2688(case: str) -> None:
    """Would catch another meaning of input_scale than the exporter's: the constant that we write would be wrong."""
    golden = CASES[case]
    assert_same_bytes(golden["input_scale"], nvfp4.tensor_scale(golden["activation"]))

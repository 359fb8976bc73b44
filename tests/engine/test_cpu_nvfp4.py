# SPDX-License-Identifier: Apache-2.0
"""NVFP4 linears on the CPU platform: vLLM's own layers with our kernel, against the decoded weight."""

import subprocess
import sys

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

from vllm_lilicorr.checkpoint.nvfp4 import decode, encode
from vllm_lilicorr.engine import cpu_nvfp4, seams

# A float32 product of K up to 400 terms; a bfloat16 one is rounded once at the end.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7}}


def linear_layer(
    weight: torch.Tensor,  # [N, K] float
    dtype: torch.dtype,
    algo: str,
    bias: torch.Tensor | None = None,
    input_scale: float = 0.01,
) -> tuple[torch.nn.Module, torch.Tensor]:
    """A linear of vLLM with its NVFP4 method, loaded, and the weight that it stands for."""
    from vllm.model_executor.layers.linear import LinearBase

    seams.install_cpu_nvfp4()
    encoded = encode(weight)
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        method = ModelOptNvFp4Config(algo, True, None, []).get_quant_method(layer, "linear")
        with set_current_vllm_config(VllmConfig()):
            rows, columns = weight.shape
            method.create_weights(layer, columns, [rows], columns, rows, dtype, weight_loader=None)
        layer.weight.data.copy_(encoded.weight)
        layer.weight_scale.data.copy_(encoded.weight_scale)
        layer.weight_scale_2.data.fill_(encoded.weight_scale_2)
        if algo == "NVFP4":
            layer.input_scale.data.fill_(input_scale)
        method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(default)
    layer.quant_method = method
    layer.bias = bias
    return layer, decode(*encoded, dtype)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of vLLM ask for the rank of their group."""
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 48), (131, 400), (1500, 256)])
@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("switch", ["packed", "decoded"])
def test_a_product_is_that_of_the_decoded_weight(
    monkeypatch, dtype, rows: int, columns: int, num_tokens: int, switch: str
) -> None:
    """Would catch swapped nibbles, a scale of the neighbouring group or block, and a lost bias: 1500 rows of 256
    are two blocks, the second one short."""
    monkeypatch.setenv("LILICORR_CPU_NVFP4", switch)
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
    weight[rows // 2] *= 30  # scales of a row that is not like the others
    bias = torch.randn(rows, generator=generator).to(dtype)
    layer, decoded = linear_layer(weight, dtype, "W4A16_NVFP4")
    assert isinstance(layer.quant_method.kernel, cpu_nvfp4.CpuNvFp4LinearKernel)
    assert layer.weight.dtype == (torch.uint8 if switch == "packed" else dtype)
    x = torch.randn(num_tokens, columns, generator=generator).to(dtype)
    for given in (None, bias):
        wanted = torch.nn.functional.linear(x.double(), decoded.double(), None if given is None else given.double())
        found = layer.quant_method.apply(layer, x, given)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, **TOLERANCES[dtype])
    one = layer.quant_method.apply(layer, x[0])
    assert one.shape == (rows,)


def test_blocks_decode_to_the_codecs_weight() -> None:
    """Would catch a value that differs in its last bit: the weight is the codec's, whatever the block."""
    weight = torch.randn(70, 96) * torch.logspace(-6, 2, 70)[:, None]
    encoded = encode(weight)
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.tensor([2.0**-9, 448.0]).to(torch.float8_e4m3fn).repeat(16, 1)
    for tensors in (tuple(encoded), (every, scales, torch.tensor(0.3))):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(cpu_nvfp4._decode_rows(*tensors, dtype), decode(*tensors, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rounded_as_in_vllms_emulation(dtype) -> None:
    """Would catch another tie rule, a scale taken from the row instead of the group, or a group of zeros."""
    x = torch.randn(64, 160) * torch.logspace(-4, 3, 64)[:, None]
    x[3, 16:32] = 0
    x[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(20)  # every tie, at scale 1
    x[6] = -x[5]
    x = x.to(dtype)
    for input_scale in (1.0, 0.0123, 3e-5):
        inverse = (1 / torch.tensor(input_scale)).float()
        wanted = ref_nvfp4_quant_dequant(x, inverse, 16)
        found = cpu_nvfp4.round_activations(x, inverse)
        assert torch.equal(found, wanted)
        assert not torch.equal(found, x)


@pytest.mark.parametrize("switch", ["packed", "decoded"])
def test_quantized_activations(monkeypatch, switch: str) -> None:
    """Would catch W4A4 computed as W4A16: the activations must be rounded too."""
    monkeypatch.setenv("LILICORR_CPU_NVFP4", switch)
    layer, decoded = linear_layer(torch.randn(40, 64), torch.float32, "NVFP4", input_scale=0.005)
    assert isinstance(layer.quant_method.kernel, cpu_nvfp4.CpuNvFp4LinearKernel)
    x = torch.randn(9, 64)
    rounded = ref_nvfp4_quant_dequant(x, (1 / torch.tensor(0.005)).float(), 16)
    torch.testing.assert_close(layer.quant_method.apply(layer, x), rounded @ decoded.T)
    assert (rounded - x).abs().max() > 0.01


def test_a_compiled_graph_keeps_one_operation(monkeypatch) -> None:
    """Would catch a graph that unrolls every block of an LM head, or breaks at it."""
    monkeypatch.setattr(cpu_nvfp4, "_BLOCK_ELEMENTS", 64)
    layer, decoded = linear_layer(torch.randn(64, 32), torch.float32, "W4A16_NVFP4")
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    def product(x: torch.Tensor) -> torch.Tensor:
        return layer.quant_method.apply(layer, x)

    x = torch.randn(3, 32)
    found = torch.compile(product, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(found, x @ decoded.T)
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert calls == ["lilicorr.nvfp4_linear"]
    tensors = (layer.weight, layer.weight_scale, layer.weight_global_scale)
    # The other checks of opcheck compute with FP8 themselves, which a CPU cannot.
    torch.library.opcheck(torch.ops.lilicorr.nvfp4_linear.default, (x, *tensors, None), test_utils="test_faketensor")


def test_a_layer_keeps_the_packed_bytes() -> None:
    """Would catch a decoded copy that stays beside the packed weight."""
    layer, decoded = linear_layer(torch.randn(512, 256), torch.bfloat16, "W4A16_NVFP4")
    layer.quant_method.apply(layer, torch.randn(2, 256, dtype=torch.bfloat16))
    tensors = [*layer.parameters(), *layer.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    packed = 512 * 256 // 2 + 512 * 256 // 16
    assert sum(storages.values()) <= packed + 64
    assert decoded.nbytes > 3.5 * packed
    held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert held == []


MEMORY = """
import torch
from vllm_lilicorr.engine.cpu_nvfp4 import DECODED_BYTES, nvfp4_linear
rows, columns = 65536, 2048
weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
scale = torch.ones(rows, columns // 16, dtype=torch.float8_e4m3fn)
x = torch.randn(4, columns, dtype=torch.bfloat16)
nvfp4_linear(x, weight[:512], scale[:512], torch.tensor(0.1))  # code and pools are in memory now
def peak():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024
before = peak()
nvfp4_linear(x, weight, scale, torch.tensor(0.1))
print(peak() - before, DECODED_BYTES, weight.nbytes + scale.nbytes)
"""


def test_a_product_works_in_one_block() -> None:
    """Would catch blocks that are kept until the product is whole: 75 MB packed would need 268 MB more."""
    command = [sys.executable, "-c", MEMORY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    grown, block, packed = map(int, result.stdout.split())
    assert packed == 75_497_472
    assert grown <= 4 * block + 4 * 65536 * 2 + 8_000_000, f"{grown:,} bytes for blocks of {block:,}"


def test_an_unknown_word_is_refused(monkeypatch) -> None:
    """Would catch a misspelled switch that quietly means the default."""
    monkeypatch.setenv("LILICORR_CPU_NVFP4", "unpacked")
    with pytest.raises(ValueError, match="LILICORR_CPU_NVFP4='unpacked' is unknown; use packed or decoded"):
        linear_layer(torch.randn(16, 16), torch.float32, "W4A16_NVFP4")

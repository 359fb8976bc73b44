# SPDX-License-Identifier: Apache-2.0
"""vLLM's own choice of an attention backend for GPUs that are not here.

Run as a program, in a process of its own: it takes cases as JSON lines of (capability,
keyword arguments of DrafterAttention, sliding window or not, the backend that a user
names or null) from standard input and prints the backend of each, null for none. The
vLLM on PYTHONPATH answers; only what needs a GPU is put in its place: the platform's
capability, and extension modules that are imported for their presence.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)


class Present(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes extension modules and FlashInfer importable."""

    def find_spec(self, name, path, target=None):
        if name in EXTENSIONS or name.partition(".")[0] == "flashinfer":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


def stub_platform():
    """vLLM's CUDA platform with a capability that can be set; FlashAttention 4's sources said to be there."""
    sys.meta_path.insert(0, Present())
    exists = os.path.exists
    os.path.exists = lambda path: str(path).endswith("cute/interface.py") or exists(path)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Stub(CudaPlatformBase):
        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id=0):
            return cls.capability

        def set(self, major, minor):
            Stub.capability = DeviceCapability(major, minor)

    vllm.platforms._current_platform = vllm.platforms.current_platform = Stub()
    return vllm.platforms.current_platform


def main():
    platform = stub_platform()
    import torch
    import vllm.config
    import vllm.utils.flashinfer
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm.utils.flashinfer.has_nvidia_artifactory = lambda: True  # else it asks the network
    current = None
    vllm.config.get_current_vllm_config = vllm.config.get_current_vllm_config_or_none = lambda: current

    for line in sys.stdin:
        capability, attention, sliding, named = json.loads(line)
        platform.set(*capability)
        block_size, target_head_dim = attention["block_size"], attention["target_head_dim"]
        current = mock.MagicMock(
            cache_config=SimpleNamespace(
                user_specified_block_size=block_size is not None,
                block_size=block_size or 16,
                cache_dtype=attention["kv_cache_dtype"],
            ),
            kv_transfer_config=None,
            speculative_config=SimpleNamespace(enable_adaptive_verification=False),
            attention_config=SimpleNamespace(
                use_non_causal=attention["non_causal"],
                backend=AttentionBackendEnum[named] if named else None,
                backend_per_kind={},
                flash_attn_version=None,
                use_trtllm_attention=None,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
            ),
            model_config=SimpleNamespace(
                is_diffusion=False,
                is_mm_prefix_lm=False,
                rswa_window=None,
                hf_text_config=SimpleNamespace(),
                get_num_attention_heads=lambda parallel: 32,
                get_num_kv_heads=lambda parallel: 8,
                get_head_size=lambda width=target_head_dim: width,
            ),
        )
        selector._cached_get_attn_backend.cache_clear()
        try:
            backend = selector.get_attn_backend(
                attention["head_dim"],
                getattr(torch, attention["dtype"]),
                attention["kv_cache_dtype"],
                has_sink=attention["has_sinks"],
                has_sliding_window=sliding,
            ).get_name()
        except ValueError as error:
            if not str(error).startswith(("No valid attention backend", "Selected backend")):
                raise
            backend = None
        print(json.dumps({"backend": backend}), flush=True)
    print(json.dumps({"vllm": vllm.__version__}))


if __name__ == "__main__":
    main()

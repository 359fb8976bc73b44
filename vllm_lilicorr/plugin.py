# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `vllm.general_plugins`.

vLLM calls `register` once in every process it starts, before engine arguments
become a configuration. Nothing of vLLM is imported until then.
"""


def register() -> None:
    """Teaches this process's vLLM the method "lilicorr". Safe to call again."""
    from vllm_lilicorr.settings import Settings

    if Settings.from_environment().disable:
        return
    from vllm_lilicorr.doctor.startup import check_before_loading
    from vllm_lilicorr.engine.amx import allow_amx_tiles
    from vllm_lilicorr.engine.seams import install

    allow_amx_tiles()
    install(check_before_loading)

# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for the chips that vLLM serves on."""

import re

import pytest

pytest.importorskip("triton")

from compiled import SHARED_MEMORY, binary_for, builds, compile_for  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_fits_the_chip_without_spilling(capability: int) -> None:
    """Would catch a kernel that does not compile, spills registers, or cannot start for want of shared memory."""
    for build in builds():
        needs = compile_for(build, capability)
        assert needs.stack == 0, build.name
        assert needs.shared <= SHARED_MEMORY[capability], build.name


@pytest.mark.parametrize("name", ["score_and_walk (greedy)", "score_and_walk (expected length)"])
def test_every_score_is_visible_to_the_walk(name: str) -> None:
    """Would catch a walk that reads scores of slots still being written: the interpreter runs them in turn."""
    (build,) = (build for build in builds() if build.name == name)
    found = re.findall(r"st\.global|ld\.global|bar\.sync|atom\.\S*acq_rel\S*", binary_for(build, 90).asm["ptx"])
    count = found.index("atom.global.gpu.acq_rel.add.u32")
    last_store = max(place for place in range(count) if found[place] == "st.global")
    assert "bar.sync" in found[last_store:count], "all threads' scores are written before the slot is counted"
    first_load = found.index("ld.global", count)
    assert "bar.sync" in found[count:first_load], "no thread reads scores before the count is known"

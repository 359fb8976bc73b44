# SPDX-License-Identifier: Apache-2.0
"""Checks of the installed vLLM."""

import shutil
from pathlib import Path

import pytest

from vllm_lilicorr.checkpoint.findings import Level
from vllm_lilicorr.doctor import installation_rules
from vllm_lilicorr.doctor.installation_rules import check_installation
from vllm_lilicorr.serving.installation import VllmInstallation, VllmMissingError, find_vllm


def test_the_installed_vllm_fits(monkeypatch):
    """Would catch a check that fails on the tested release."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("LILICORR_DISABLE", raising=False)
    (found,) = check_installation()
    assert (found.level, found.value) == (Level.OK, f"vLLM {find_vllm().version}")


def test_other_versions_and_changed_sources_are_named(monkeypatch, tmp_path: Path):
    """Would catch a plugin that is silently inactive on the next release."""
    installed = find_vllm()
    later = VllmInstallation(installed.distribution, "0.34.0", installed.package)
    monkeypatch.setattr(installation_rules, "find_vllm", lambda: later)
    found = check_installation()[0]
    assert found.level is Level.ERROR
    assert found.sentence.startswith("vLLM 0.34.0: tested with 0.31, 0.32, 0.33; with any other the plugin leaves")

    package = tmp_path / "vllm"
    for seam in installation_rules.CONFIG_SEAMS + installation_rules.V1_SEAMS + installation_rules.CPU_SEAMS:
        name = Path(*seam.module.split(".")[1:]).with_suffix(".py")
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed.package / name, package / name)
    changed = VllmInstallation(installed.distribution, installed.version, package)
    monkeypatch.setattr(installation_rules, "find_vllm", lambda: changed)
    assert check_installation()[0].level is Level.OK
    proposer = package / "v1/spec_decode/dflash.py"
    proposer.write_text(proposer.read_text().replace("class DFlashProposer", "class Renamed"))
    found = check_installation()[0]
    assert found.level is Level.ERROR
    assert "vllm.v1.spec_decode.dflash has no DFlashProposer" in found.sentence


def test_a_missing_vllm_is_a_warning(monkeypatch):
    """Would catch a checkpoint that cannot be looked at without vLLM."""

    def missing():
        raise VllmMissingError("vLLM is not installed.")

    monkeypatch.setattr(installation_rules, "find_vllm", missing)
    (found,) = check_installation()
    assert (found.level, found.value) == (Level.WARNING, "vLLM is not installed.")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("VLLM_PLUGINS", "other", "VLLM_PLUGINS=other: vLLM loads the plugins of this list only"),
        ("LILICORR_DISABLE", "1", "LILICORR_DISABLE=1: it leaves vLLM as it is. Unset"),
        ("LILICORR_DISABLE", "perhaps", "LILICORR_DISABLE='perhaps' is neither true nor false"),
    ],
)
def test_settings_that_switch_the_plugin_off_are_named(monkeypatch, variable, value, words):
    """Would catch a server that never speculates and says nothing."""
    monkeypatch.setenv(variable, value)
    assert [finding.level for finding in check_installation() if words in finding.sentence] == [Level.ERROR]
    monkeypatch.setenv("VLLM_PLUGINS", "other, lilicorr")
    assert not [finding for finding in check_installation() if "VLLM_PLUGINS" in finding.sentence]


def test_misspelt_keys_are_named():
    """Would catch a misspelt key that only vLLM refuses, or our own key taken for one."""
    assert len(check_installation({"method": "lilicorr", "model": "d", "lilicorr": {}, "kv_cache_dtype": "auto"})) == 1
    (found,) = check_installation({"num_speculative_token": 7})[1:]
    assert found.level is Level.ERROR
    assert found.sentence.endswith("refuses to start with it. Did you mean 'num_speculative_tokens'?")
    assert check_installation({"zzz": 1})[1].remedy == "Leave it out."

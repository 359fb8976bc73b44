# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr speculative decoding for vLLM. Importing this package imports nothing else."""

__version__ = "0.1.0"

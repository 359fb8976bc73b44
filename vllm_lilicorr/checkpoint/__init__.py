# SPDX-License-Identifier: Apache-2.0
"""Drafter checkpoints on disk. Knows the method's geometry, not vLLM."""

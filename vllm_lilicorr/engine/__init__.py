# SPDX-License-Identifier: Apache-2.0
"""vLLM's side: the only package that imports vLLM at module level."""

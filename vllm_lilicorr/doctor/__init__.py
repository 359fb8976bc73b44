# SPDX-License-Identifier: Apache-2.0
"""What can be told of a drafter, its target, a machine and vLLM's options before anything is loaded."""

# SPDX-License-Identifier: Apache-2.0
"""Starting vLLM's own server well: by command line and HTTP, never by import."""

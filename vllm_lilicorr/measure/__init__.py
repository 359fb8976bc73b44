# SPDX-License-Identifier: Apache-2.0
"""What a drafter gains: acceptance, tokens per second, and the lattice behind one block."""

# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr itself: geometry, correlator head, walks. Needs torch only."""

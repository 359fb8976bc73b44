# SPDX-License-Identifier: Apache-2.0
"""Says once where almost nothing is accepted, on Model Runner V2.

There the counts that engine/guard.py reads lie on the device, and no step may wait for
it. The scheduler learns of every request how many drafted tokens were accepted anyway;
from that a drafter that drafts noise can be told, though not why it does.
"""

import logging

logger = logging.getLogger("vllm.lilicorr")

WINDOW = 512
# Of the first tokens in a window. Sound drafters of hard text stay far above it.
LEAST_SHARE = 0.05


class AcceptanceWatch:
    """Counts drafts of one engine, in windows of WINDOW."""

    def __init__(self, drafter: str, target: str) -> None:
        self._drafter, self._target = drafter, target
        self._drafts = self._accepted_first = 0
        self.has_spoken = False

    def observe(self, num_accepted: int) -> None:
        """Adds one draft of one request of which `num_accepted` tokens were accepted."""
        self._drafts += 1
        self._accepted_first += num_accepted > 0
        if self._drafts < WINDOW:
            return
        share = self._accepted_first / self._drafts
        if share < LEAST_SHARE and not self.has_spoken:
            self.has_spoken = True
            logger.warning(
                "Of the last %d drafts of the drafter %r the first token was accepted %.1f%% of the time, so that "
                "speculation costs time and gains none. Output stays right. Sound drafters accept less than %.0f%% "
                "on no usual text: look for a drafter of another target, a wrong mask_token_id, target_layer_ids or "
                "RoPE layout, and wrongly read quantized weights. Check with: lilicorr doctor %s --target %s",
                self._drafts,
                self._drafter,
                100 * share,
                100 * LEAST_SHARE,
                self._drafter,
                self._target,
            )
        self._drafts = self._accepted_first = 0

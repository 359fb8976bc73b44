# SPDX-License-Identifier: Apache-2.0
"""The target's layers that a drafter reads, as they were before any LoRA adapter."""

from torch import nn


def token_embedding(target_model: nn.Module) -> nn.Module | None:
    """The target's token embedding, of its language model where it has several; None where it is absent."""
    language_model = target_model.get_language_model() if hasattr(target_model, "get_language_model") else target_model
    inner = getattr(language_model, "model", language_model)
    return getattr(inner, "embed_tokens", None) or getattr(inner, "embedding", None)


def without_lora(layer: nn.Module | None) -> nn.Module | None:
    """The layer under a LoRA wrapper, which adds what the target's own batch asks for; the drafter was
    trained on the base weights."""
    return getattr(layer, "base_layer", layer)

# SPDX-License-Identifier: Apache-2.0
"""Every knob of the recipe, written once; train.py derives its flags from it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The defaults made the shipped weights."""

    seed: int = 20261130

    # Corpus and tokenizer.
    vocab_size: int = 2048
    held_out_percent: int = 3  # share of files kept out, by a hash of their path
    window_tokens: int = 256  # windows more repetitive than this are left out:
    min_distinct: float = 0.55  # distinct 4-grams / 4-grams of one window

    # Target: Qwen3, deep and narrow.
    num_layers: int = 10
    hidden_size: int = 256
    intermediate_size: int = 768
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_position: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    target_steps: int = 1300
    target_shallow_steps: int = 900  # first steps, at half the depth
    target_warmup: int = 30
    target_decay: float = 0.3  # last share of the steps, learning rate to zero
    target_tokens_per_step: int = 4096
    target_matrix_lr: float = 5e-3
    target_other_lr: float = 3e-3

    # Unlikelihood steps against loops in greedy text.
    unloop_steps: int = 84
    unloop_steps_per_round: int = 12  # steps on one round of fresh rollouts
    unloop_rows: int = 16  # rollout rows a step, beside as many rows of real text
    unloop_prompt_tokens: int = 64
    unloop_length: int = 257
    unloop_ngram: int = 8  # the last token of a repeated n-gram is made less likely
    unloop_weight: float = 0.3
    unloop_matrix_lr: float = 6e-4
    unloop_other_lr: float = 4e-4

    # Rollouts of the target on training prompts.
    feature_layers: tuple[int, ...] = (1, 5, 8)  # zero-based outputs of target layers
    rollout_rows: int = 256  # per shard, all of one prompt length
    rollout_shards: int = 18
    rollout_prompts: tuple[int, ...] = (32, 192)  # prompt tokens, shard by shard
    rollout_new_tokens: int = 144
    rollout_sampled: float = 0.2  # share of rows drawn at temperature 1
    held_out_rows: int = 96  # per prompt length, greedy, for the evaluation
    held_out_prompts: tuple[int, ...] = (32, 96)
    held_out_new_tokens: int = 128

    # Drafter: DFlash backbone.
    block_size: int = 8
    drafter_layers: int = 2
    drafter_intermediate_size: int = 1024
    rows_per_step: int = 16
    anchors_per_row: int = 32
    repeated_anchor_weight: float = 0.2  # blocks inside a loop are drawn less often
    slot_decay: float = 4.0  # weight of slot s in the loss: exp(-s / slot_decay)
    drafter_matrix_lr: float = 4e-3
    drafter_other_lr: float = 2e-3
    drafter_weight_decay: float = 0.05
    drafter_warmup: int = 30
    drafter_decay: float = 0.5  # last share of the joint and baseline steps

    # Drafter: LiLiCorr head.
    top_k: int = 8
    head_hidden_size: int = 128
    head_num_layers: int = 2
    head_num_heads: int = 4
    head_mlp_ratio: float = 2.0
    head_factor_dim: int = 128
    head_vector_eps: float = 1e-4
    head_logit_scale: float = 8.0
    transition_weight: float = 0.25
    gap_weight: float = 0.25

    # Steps of the drafter's stages. The baseline continues the plain stage for
    # as many steps as the head and joint stages take together.
    plain_steps: int = 1200
    head_steps: int = 150
    joint_steps: int = 800

    @property
    def eos_token_id(self) -> int:
        return 0

    @property
    def mask_token_id(self) -> int:
        return 1

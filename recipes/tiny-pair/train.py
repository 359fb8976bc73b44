# SPDX-License-Identifier: Apache-2.0
"""Trains the tiny pair: tokenizer, target, rollouts, DFlash drafter, LiLiCorr head.

    python recipes/tiny-pair/train.py [--out DIR] [--target-steps N] ...

Writes DIR/{target,drafter,drafter-dflash} and DIR/results.json; DIR/work holds
the stages. Run it again after an interruption: finished stages are read back and
the running one continues from its last checkpoint.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

PRELOAD = Path(sys.prefix) / "lib" / "libiomp5.so"


def relaunch_with_openmp() -> None:
    """Starts this command again under Intel's OpenMP where the environment has it.

    GNU's runtime spins while other processes use the cores; Intel's can sleep.
    """
    if PRELOAD.exists() and "LD_PRELOAD" not in os.environ:
        environment = {**os.environ, "LD_PRELOAD": str(PRELOAD), "KMP_BLOCKTIME": "0"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def parse_arguments():  # -> (Path, Settings)
    from settings import Settings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiny-pair"))
    for field in fields(Settings):
        if field.type in (int, float):
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, type=field.type, default=field.default)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    return out, replace(Settings(), **arguments)


def main() -> None:
    """All stages in order."""
    relaunch_with_openmp()
    out, settings = parse_arguments()
    import torch
    from blocks import Blocks
    from corpus import prepare
    from evaluate import rounded, tokens_per_step
    from export import export_drafter
    from rollouts import distinct_ratio, held_out_rollouts, make_rollouts
    from stages_drafter import train_baseline, train_lilicorr, train_plain
    from stages_target import train_target
    from stages_unloop import train_unloop
    from target import export_target

    # Layers of one class share a code object; each stage adds shapes to it.
    torch._dynamo.config.recompile_limit = 64
    work = out / "work"
    corpus, shards = work / "corpus", work / "rollouts"
    corpus.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    began = time.monotonic()

    def finished(stage: str) -> None:
        """Notes the wall time since the last call."""
        nonlocal began
        seconds[stage] = round(time.monotonic() - began, 1)
        print(f"{stage}: finished after {seconds[stage]:.0f} s", flush=True)
        began = time.monotonic()

    prepare(corpus, settings)
    finished("corpus")
    target = train_target(work, corpus, settings)
    finished("target")
    train_unloop(work, corpus, target)
    rounded(target)
    export_target(target, out / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(corpus / name, out / "target" / name)
    finished("unloop")
    make_rollouts(shards, corpus, target, settings)
    held_out = held_out_rollouts(work / "held_out.pt", corpus, target, settings)
    finished("rollouts")

    blocks = Blocks(shards, settings)
    plain = train_plain(work, blocks, target.embed_tokens.weight)
    finished("plain")
    model = train_lilicorr(work, blocks, plain)
    finished("head and joint")
    rounded(model)
    export_drafter(out / "drafter", model.backbone, model.lilicorr)
    baseline = train_baseline(work, blocks, plain)
    finished("baseline")
    rounded(baseline)
    export_drafter(out / "drafter-dflash", baseline, None)

    new_tokens = settings.held_out_new_tokens
    with torch.compiler.set_stance("force_eager"):
        alone = tokens_per_step(baseline, None, held_out, settings)
        joint = tokens_per_step(model.backbone, model.lilicorr, held_out, settings)
    finished("evaluation")
    results = {
        "distinct 4-grams of held-out greedy rollouts": [distinct_ratio(shard, new_tokens) for shard in held_out],
        "plain DFlash trained alone": alone,
        "LiLiCorr drafter": joint,
        "gain over plain DFlash": joint["lilicorr"] / alone["argmax"] - 1,
        "settings": asdict(settings),
        "seconds of this run": seconds,
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

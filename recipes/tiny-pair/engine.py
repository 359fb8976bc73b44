# SPDX-License-Identifier: Apache-2.0
"""Acceptance of the trained pair through vLLM itself, beside the offline figures.

    python recipes/tiny-pair/engine.py DIR [--temperatures 0 1] [--rows 96]

DIR is what train.py wrote. One engine per process and line: the plain DFlash
baseline, the LiLiCorr drafter's backbone alone (its argmax), and LiLiCorr, which
needs this project's plugin on the V1 runner. Tokens per step are pooled.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

METHODS = ("dflash", "argmax", "lilicorr")


def strip_head(source: Path, folder: Path) -> None:
    """A plain DFlash folder with the backbone of a LiLiCorr drafter."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    backbone = {k: v for k, v in tensors.items() if not k.startswith("lilicorr.")}
    save_file(backbone, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    config["dflash_config"] = {
        key: value
        for key, value in config["dflash_config"].items()
        if "lilicorr" not in key and key != "projector_type"
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(out: Path, method: str, temperature: float, rows: int, dtype: str) -> dict:
    """Runs one engine over the held-out prompts and reads its counters."""
    import torch
    from settings import Settings
    from vllm import LLM, SamplingParams

    drafter = {"dflash": "drafter-dflash", "argmax": "work/argmax", "lilicorr": "drafter"}
    if method == "argmax":
        strip_head(out / "drafter", out / drafter[method])
    config: dict = {
        "method": "dflash",
        "model": str(out / drafter[method]),
        "num_speculative_tokens": 7,
    }
    if temperature > 0:
        config["draft_sample_method"] = "probabilistic"
    llm = LLM(
        str(out / "target"),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        seed=0,
        speculative_config=config,
        disable_log_stats=False,
    )
    new_tokens = Settings().held_out_new_tokens
    identical = count = 0
    for shard in torch.load(out / "work" / "held_out.pt", weights_only=True):
        tokens = shard["tokens"][:rows].tolist()
        outputs = llm.generate(
            [{"prompt_token_ids": row[:-new_tokens]} for row in tokens],
            SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        count += len(tokens)
        for row, output in zip(tokens, outputs, strict=True):
            identical += list(output.outputs[0].token_ids) == row[-new_tokens:]
    values = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics()}
    drafts = values["vllm:spec_decode_num_drafts"]
    accepted = values["vllm:spec_decode_num_accepted_tokens"]
    return {
        "method": method,
        "temperature": temperature,
        "dtype": dtype,
        "prompts": count,
        "rows equal to the offline rollout": identical,
        "draft steps": drafts,
        "accepted": accepted,
        "tokens per step": round(1 + accepted / drafts, 4),
        "accepted by position": values["vllm:spec_decode_num_accepted_tokens_per_pos"],
    }


def main() -> None:
    """One subprocess per engine; each prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--rows", type=int, default=96, help="per prompt length")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        line = measure(args.out, args.methods[0], args.temperatures[0], args.rows, args.dtype)
        print("RESULT " + json.dumps(line), flush=True)
        return
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **os.environ,
    }
    preload = Path(sys.prefix) / "lib" / "libiomp5.so"
    if preload.exists():
        environment.setdefault("LD_PRELOAD", str(preload))
    for temperature in args.temperatures:
        for method in args.methods:
            command = [sys.executable, __file__, str(args.out), "--one"]
            command += ["--methods", method, "--temperatures", str(temperature)]
            command += ["--rows", str(args.rows), "--dtype", args.dtype]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
            if lines:
                print(lines[-1].removeprefix("RESULT "), flush=True)
            else:
                print(f"{method} at {temperature}: no result\n{done.stderr[-2000:]}")
    shutil.rmtree(args.out / "work" / "argmax", ignore_errors=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Loads and serves a pair of the published Super-VL geometry on a CPU; prints what it took, as JSON.

    python tests/engine/published_pair.py FOLDER

FOLDER gets the drafter (1.35 GB) and a target that fits it (tests/published_geometry.py).
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(folder: Path) -> None:
    from published_geometry import write_fitting_target, write_published_geometry

    drafter, target = write_published_geometry(folder / "drafter"), write_fitting_target(folder / "target")
    from vllm import LLM, SamplingParams

    from vllm_lilicorr.checkpoint.doctor import examine
    from vllm_lilicorr.checkpoint.findings import exit_code
    from vllm_lilicorr.checkpoint.inspection import inspect

    inspection = inspect(drafter)
    _, findings = examine(drafter, target)
    begun = time.perf_counter()
    llm = LLM(
        str(target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=1,
        enforce_eager=True,
        speculative_config={"method": "lilicorr", "model": str(drafter)},
    )
    loaded = time.perf_counter() - begun
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling, use_tqdm=False)
    print(
        json.dumps(
            {
                "bytes": inspection.num_bytes,
                "exit_code": exit_code(findings, strict=True),
                "tokens": len(output.outputs[0].token_ids),
                "peak_mib": round(peak_mib()),
                "load_seconds": round(loaded, 1),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

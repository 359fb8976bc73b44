# SPDX-License-Identifier: Apache-2.0
"""The `lilicorr` command: verbs, each with its code where its subject lives."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

QUANTIZED_GROUPS = ("attention", "convolutions", "fc", "head", "lm-head", "mlp")
VLLM_ARGS_HELP = "last: what would follow `vllm serve`; a target and a drafter in it need not be named before"
SERVE_HELP = "start vLLM's OpenAI server; ARGS are exactly those of `vllm serve`"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. `serve` replaces this process and does not return."""
    words = sys.argv[1:] if arguments is None else arguments
    # `serve` is taken before argparse, which would read vLLM's own options.
    dry_run = words[:1] == ["--dry-run"]
    if words[dry_run : dry_run + 1] == ["serve"]:
        return _report_errors(_serve, words[dry_run + 1 :], dry_run)
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(words)
    if options.dry_run:
        parser.error("--dry-run goes with serve: lilicorr --dry-run serve MODEL ...")
    return _report_errors(options.run, options)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb but `serve`."""
    parser = argparse.ArgumentParser(prog="lilicorr", description="LiLiCorr speculative decoding for vLLM.")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="before serve: print the command and the changed environment, start nothing",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("serve", help=SERVE_HELP, add_help=False)

    demo = verbs.add_parser("demo", help="serve the embedded pair, with and without speculation")
    _add_pair_options(demo)
    demo.add_argument("--port", type=int, help="port on loopback (default: a free one)")
    demo.add_argument("--folder", type=Path, default=Path("lilicorr-demo"), help="for logs and SVG")
    demo.add_argument("--max-tokens", type=int, default=128, help="per completion (default: 128)")
    demo.add_argument("--dtype", default="auto", help="vLLM's --dtype (default: auto)")
    demo.add_argument("--compiled", action="store_true", help="let vLLM compile the model first")
    demo.set_defaults(run=_demo)

    bench = verbs.add_parser("bench-pair", help="tokens/s of no speculation, plain DFlash and LiLiCorr, in paired runs")
    _add_pair_options(bench)
    bench.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="requests in flight")
    bench.add_argument("--prompts", type=int, default=32, help="how many prompts (default: 32)")
    bench.add_argument("--max-tokens", type=int, default=128, help="per prompt (default: 128)")
    bench.add_argument("--dtype", default="auto", help="vLLM's --dtype (default: auto)")
    bench.add_argument("--compiled", action="store_true", help="compile (default: eager)")
    bench.add_argument("--output", type=Path, default=Path("lilicorr-bench.json"), help="results")
    bench.set_defaults(run=_bench_pair)

    acceptance = verbs.add_parser("acceptance", help="tokens per step by walk, by sampling, by candidates and length")
    _add_pair_options(acceptance, with_method=False)
    acceptance.add_argument("--prompts", type=int, default=96, help="held-out prompts (default: 96)")
    acceptance.add_argument("--max-tokens", type=int, default=96, help="per prompt (default: 96)")
    acceptance.add_argument("--dtype", default="auto", help="vLLM's --dtype (default: auto)")
    acceptance.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="some variants (default: all)")
    acceptance.add_argument("--output", type=Path, default=Path("lilicorr-acceptance.json"), help="results")
    acceptance.set_defaults(run=_acceptance)

    adaptive = verbs.add_parser("bench-adaptive", help="adaptive draft length: tokens/s over no speculation, by load")
    _add_pair_options(adaptive, with_method=False)
    adaptive.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="requests in flight")
    adaptive.add_argument("--repeats", type=int, default=6, help="paired runs of every load (default: 6)")
    adaptive.add_argument("--seconds", type=float, default=1.5, help="about, per run and phase (default: 1.5)")
    adaptive.add_argument("--dtype", default="auto", help="vLLM's --dtype (default: auto)")
    adaptive.add_argument("--compiled", action="store_true", help="compile (default: eager)")
    adaptive.add_argument("--output", type=Path, default=Path("lilicorr-adaptive.json"), help="results")
    adaptive.set_defaults(run=_bench_adaptive)

    quantize = verbs.add_parser("quantize", help="a float checkpoint to NVFP4 or FP8, without calibration data")
    _add_rewriting_options(quantize)
    quantize.add_argument("--format", required=True, choices=("nvfp4-w4a16", "nvfp4", "fp8"), help="of the weights")
    groups = {"nargs": "+", "default": [], "metavar": "GROUP", "choices": QUANTIZED_GROUPS}
    quantize.add_argument(
        "--quantize", **groups, help=f"groups besides the default ones: {', '.join(QUANTIZED_GROUPS)}"
    )
    quantize.add_argument("--keep", **groups, help="groups to leave as they are")
    quantize.add_argument(
        "--encoder",
        default="auto",
        choices=("auto", "modelopt", "builtin"),
        help="auto: NVIDIA Model Optimizer where it is installed, else our own; the bytes are the same",
    )
    quantize.add_argument(
        "--input-scale", type=float, default=1.0, help="of activations, with --format nvfp4 (default: 1)"
    )
    quantize.set_defaults(run=_quantize)

    convert = verbs.add_parser(
        "convert", help="a drafter to the names and quantization that stock vLLM or SGLang loads"
    )
    _add_rewriting_options(convert)
    convert.add_argument("--program", default="vllm", choices=("vllm", "sglang"), help="whose names (default: vllm)")
    convert.set_defaults(run=_convert)

    doctor = verbs.add_parser("doctor", help="check a drafter and its target before anything is loaded")
    doctor.add_argument("drafter", nargs="?", help="folder, or repository in the Hugging Face cache")
    doctor.add_argument("--target", help="likewise, for the model to serve")
    doctor.add_argument("--gpu", metavar="NAME", help="gb10, rtx-pro-6000, h100, h200 or b200 (default: this machine)")
    doctor.add_argument("--deep", action="store_true", help="read the drafter's values too")
    doctor.add_argument("--strict", action="store_true", help="exit code 1 for warnings")
    doctor.add_argument("--json", action="store_true", help="print findings as JSON")
    doctor.add_argument("--vllm-args", nargs=argparse.REMAINDER, default=[], metavar="...", help=VLLM_ARGS_HELP)
    doctor.set_defaults(run=_doctor)

    inspect = verbs.add_parser("inspect", help="what a drafter is: dimensions, parameters, bytes, floor time per step")
    inspect.add_argument("drafter", help="folder, or repository in the Hugging Face cache")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(run=_inspect)

    verbs.add_parser("version", help="print versions").set_defaults(run=_version)
    return parser


def _add_pair_options(parser: argparse.ArgumentParser, with_method: bool = True) -> None:
    parser.add_argument("--target", type=Path, help="folder (default: the embedded target)")
    parser.add_argument("--drafter", type=Path, help="folder (default: the embedded drafter)")
    if with_method:
        parser.add_argument("--method", default="lilicorr", help="speculation method")


def _add_rewriting_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder; it is only read")
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to make; work goes on in DST.partial")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _serve(arguments: list[str], dry_run: bool) -> int:
    from vllm_lilicorr.serving.launch import plan_serve

    plan = plan_serve(arguments, os.environ)
    for note in plan.notes:
        print(f"lilicorr: {note}", file=sys.stderr, flush=True)
    if dry_run:
        print(plan.describe())
        return 0
    return plan.execute(os.environ)


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_lilicorr.measure.demo import DemoOptions, run_demo
    from vllm_lilicorr.measure.embedded_pair import find_pair

    chosen = DemoOptions(
        pair=find_pair(options.target, options.drafter),
        method=options.method,
        folder=options.folder,
        port=options.port,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        compiled=options.compiled,
    )
    return run_demo(chosen, Console(highlight=False))


def _bench_pair(options: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_lilicorr.measure.embedded_pair import find_pair
    from vllm_lilicorr.measure.pair_bench import BenchOptions, run_bench

    chosen = BenchOptions(
        pair=find_pair(options.target, options.drafter),
        method=options.method,
        concurrency=tuple(options.concurrency),
        num_prompts=options.prompts,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        compiled=options.compiled,
        output=options.output,
    )
    return run_bench(chosen, Console(highlight=False))


def _acceptance(options: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_lilicorr.measure.acceptance_table import AcceptanceOptions, run_acceptance
    from vllm_lilicorr.measure.embedded_pair import find_pair

    chosen = AcceptanceOptions(
        pair=find_pair(options.target, options.drafter),
        num_prompts=options.prompts,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        only=tuple(options.only),
        output=options.output,
    )
    return run_acceptance(chosen, Console(highlight=False))


def _bench_adaptive(options: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_lilicorr.measure.adaptive_bench import AdaptiveOptions, run_adaptive_bench
    from vllm_lilicorr.measure.embedded_pair import find_pair

    chosen = AdaptiveOptions(
        pair=find_pair(options.target, options.drafter),
        concurrency=tuple(options.concurrency),
        repeats=options.repeats,
        seconds=options.seconds,
        dtype=options.dtype,
        compiled=options.compiled,
        output=options.output,
    )
    return run_adaptive_bench(chosen, Console(highlight=False))


def _quantize(options: argparse.Namespace) -> int:
    from vllm_lilicorr.checkpoint.encoders import choose_encoder
    from vllm_lilicorr.checkpoint.quantization import Format
    from vllm_lilicorr.checkpoint.quantize import QuantizeOptions, plan_quantization
    from vllm_lilicorr.checkpoint.rewriting import run_rewriting

    form, encoder = Format(options.format), choose_encoder(options.encoder)
    chosen = QuantizeOptions(form, tuple(options.quantize), tuple(options.keep), options.input_scale)
    plan = partial(plan_quantization, options=chosen, encoder=encoder)
    return run_rewriting(options.source, options.destination, plan, encoder.name, options.json)


def _convert(options: argparse.Namespace) -> int:
    from vllm_lilicorr.checkpoint.convert import plan_conversion
    from vllm_lilicorr.checkpoint.rewriting import run_rewriting

    plan = partial(plan_conversion, program=options.program)
    return run_rewriting(options.source, options.destination, plan, None, options.json)


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from vllm_lilicorr.doctor.diagnosis import DoctorOptions, diagnose
    from vllm_lilicorr.doctor.view import print_report

    chosen = DoctorOptions(options.drafter, options.target, options.gpu, tuple(options.vllm_args), options.deep)
    with Progress(console=Console(stderr=True), transient=True, disable=not options.deep) as progress:
        task = progress.add_task("Reading values", total=None)
        report = diagnose(chosen, lambda num_bytes: progress.advance(task, num_bytes))
    if options.json:
        print(report.to_json())
    else:
        print_report(report, Console(highlight=False))
    return report.exit_code(options.strict)


def _inspect(options: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_lilicorr.checkpoint.inspection import inspect
    from vllm_lilicorr.doctor.diagnosis import find_folder
    from vllm_lilicorr.doctor.view import print_inspection

    result = inspect(find_folder(options.drafter))
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print_inspection(result, options.drafter, Console(highlight=False))
    return 0


def _version(options: argparse.Namespace) -> int:
    from vllm_lilicorr.measure.provenance import versions

    for name, text in versions().items():
        print(f"{name:<14} {text}")
    return 0


def _report_errors(run: Callable[..., int], *arguments: object) -> int:
    """Mistakes of the user end in one sentence, not in a traceback."""
    from vllm_lilicorr.serving.server import ServerFailedError

    try:
        code = run(*arguments)
        sys.stdout.flush()  # a closed pipe shows here, not when the interpreter ends
        return code
    except (ValueError, ServerFailedError) as error:
        print(f"lilicorr: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in `lilicorr doctor ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return 2
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"lilicorr: {place}{error.strerror or error}. Name another place, or mend this one.", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interruption:
        print(f"\nlilicorr: {interruption or 'interrupted; everything it started is stopped.'}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

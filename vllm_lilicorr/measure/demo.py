# SPDX-License-Identifier: Apache-2.0
"""`lilicorr demo`: the embedded pair served for real, with and without speculation.

Two servers, one after the other, never both at once. The first drafts with LiLiCorr:
completions are streamed to the screen, then each prompt is timed. The second is the
same server without a drafter, timed on the same prompts.
"""

import json
import os
import shlex
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import OpenAIError
from rich.console import Console

from vllm_lilicorr.measure import demo_view
from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.measure.completions import Completion, CompletionClient
from vllm_lilicorr.measure.embedded_pair import Pair
from vllm_lilicorr.measure.lattice_view import lattice_svg
from vllm_lilicorr.measure.prompt_files import Prompt, load_prompts
from vllm_lilicorr.measure.trace_file import most_telling, read_trace
from vllm_lilicorr.serving.preflight import Findings, busy_cores, check_load, check_machine, choose_port
from vllm_lilicorr.serving.server import OFFLINE_LOOPBACK, ServerProcess

SERVER_NAME = "tiny-pair"
KV_CACHE_GIB = "1"
# Lattices are recorded for the streamed completions only, so that recording them
# takes no part in the timing that follows.
TRACED_LINES = 150


@dataclass(frozen=True)
class DemoOptions:
    """What `lilicorr demo` may be told.

    Attributes:
        pair: Checkpoints to serve.
        method: Speculation method given to vLLM.
        folder: Where logs, the trace and the SVG go; emptied first.
        port: Port on loopback; None takes a free one.
        max_tokens: Tokens per completion.
        repeats: Timed completions per prompt, whose median counts.
        dtype: vLLM's dtype.
        compiled: Whether vLLM compiles the model (slower start, faster steps).
        start_timeout: Seconds that a server may take to be ready.
    """

    pair: Pair
    method: str = "lilicorr"
    folder: Path = Path("lilicorr-demo")
    port: int | None = None
    max_tokens: int = 128
    repeats: int = 3
    dtype: str = "auto"
    compiled: bool = False
    start_timeout: float = 300.0


@dataclass
class ServedResults:
    """What one server delivered.

    Attributes:
        tokens_per_second: Median over the repeats, by prompt.
        token_ids: Of the timed completions, by prompt.
        counts: Speculation counters over the timed completions.
        counts_by_prompt: The same, by prompt.
    """

    tokens_per_second: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    counts_by_prompt: list[SpeculationCounts] = field(default_factory=list)


def run_demo(options: DemoOptions, console: Console) -> int:
    """Runs the demo; returns the exit code.

    Raises:
        ServerFailedError: A server did not start.
    """
    findings = Findings()
    check_machine(findings)
    check_load(busy_cores(), os.cpu_count(), findings)
    port = choose_port(options.port)
    demo_view.show_findings(console, findings)
    if findings.problems:
        return 1
    _make_folder(options.folder)
    prompts = load_prompts("demo")
    demo_view.show_intro(console, options.pair, len(prompts))

    trace_file = options.folder / "lattices.jsonl"
    speculation = json.dumps({"method": options.method, "model": str(options.pair.drafter)})
    with _interruptible():
        with _server(options, port, "with-lilicorr", ["--speculative-config", speculation], {
            "LILICORR_TRACE": str(trace_file.resolve()),
            "LILICORR_TRACE_LINES": str(TRACED_LINES),
        }, console) as server:  # fmt: skip
            client = CompletionClient(server.url)
            streamed = _stream_all(client, prompts, options.max_tokens, console)
            drafted = _time_all(client, server, prompts, options, console)
        with _server(options, port, "without-speculation", [], {}, console) as server:
            client = CompletionClient(server.url)
            plain = _time_all(client, server, prompts, options, console)

    demo_view.show_speed(console, prompts, drafted, plain, options.compiled)
    demo_view.show_acceptance(console, drafted.counts)
    _show_lattice(options, trace_file, streamed, console)
    demo_view.show_files(console, options.folder)
    return 0


def _make_folder(folder: Path) -> None:
    """An empty folder; of one left by an earlier run, only that run's files go."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.log", "lattices.jsonl", "lattice.svg"):
        for old in folder.glob(pattern):
            old.unlink()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal unwind the stack as Ctrl-C does, so that servers are stopped."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _server(
    options: DemoOptions,
    port: int,
    name: str,
    arguments: list[str],
    environment: dict[str, str],
    console: Console,
) -> Iterator[ServerProcess]:
    """One server, ready; stopped on leaving, whatever the reason."""
    server = ServerProcess(
        [
            str(options.pair.target),
            "--served-model-name", SERVER_NAME,
            "--max-model-len", "1024",
            "--max-num-seqs", "8",
            "--dtype", options.dtype,
            *([] if options.compiled else ["--enforce-eager"]),
            *arguments,
        ],
        port,
        options.folder / f"{name}.log",
        {**OFFLINE_LOOPBACK, "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB, **environment},
    )  # fmt: skip
    demo_view.show_command(console, name.replace("-", " "), shlex.join(["lilicorr", *server.command[3:]]))
    with server:
        with demo_view.waiting(console) as progress:
            seconds = server.wait_until_ready(options.start_timeout, progress)
        console.print(f"  ready after {seconds:.0f} s; log: {server.log_file}", style="dim")
        try:
            yield server
        except OpenAIError as error:
            raise server.failure(f"A request failed: {error}.") from error
        finally:
            with console.status("stopping the server"):
                server.stop()


def _stream_all(client: CompletionClient, prompts: list[Prompt], max_tokens: int, console: Console) -> list[Completion]:
    completions = []
    for prompt in prompts:
        show: Callable[[str], None] = demo_view.begin_stream(console, prompt)
        completion = client.stream(prompt.text, max_tokens, show)
        demo_view.end_stream(console, completion)
        completions.append(completion)
    return completions


def _time_all(
    client: CompletionClient,
    server: ServerProcess,
    prompts: list[Prompt],
    options: DemoOptions,
    console: Console,
) -> ServedResults:
    """Every prompt once to warm up, then in rounds, so that a slow moment hits all alike."""
    results = ServedResults()
    times: list[list[float]] = [[] for _ in prompts]
    with console.status("timing") as status:
        for prompt in prompts:
            client.complete(prompt.text, options.max_tokens)
        for repeat in range(options.repeats):
            for index, prompt in enumerate(prompts):
                status.update(f"timing, round {repeat + 1} of {options.repeats}: {prompt.kind}")
                before = SpeculationCounts.from_prometheus(server.metrics())
                completion = client.complete(prompt.text, options.max_tokens)
                counts = SpeculationCounts.from_prometheus(server.metrics()) - before
                times[index].append(completion.tokens_per_second)
                results.counts += counts
                if repeat == 0:
                    results.token_ids.append(completion.token_ids)
                    results.counts_by_prompt.append(counts)
    results.tokens_per_second = [statistics.median(row) for row in times]
    return results


def _show_lattice(options: DemoOptions, trace_file: Path, streamed: list[Completion], console: Console) -> None:
    from tokenizers import Tokenizer

    sequences = {one.response_id: one.prompt_token_ids + one.token_ids for one in streamed}
    block = most_telling(read_trace(trace_file, sequences))
    if block is None:
        console.print(f"No lattice was recorded: method {options.method!r} draws none.")
        return
    tokenizer = Tokenizer.from_file(str(options.pair.target / "tokenizer.json"))

    def token_text(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False)

    demo_view.show_lattice(console, block, token_text)
    (options.folder / "lattice.svg").write_text(lattice_svg(block, token_text))

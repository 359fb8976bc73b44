# SPDX-License-Identifier: Apache-2.0
"""Every touch of vLLM's unofficial internals: what is replaced, why, and until when.

Each seam names a function or class of vLLM and the parameters that we count on.
They are compared with vLLM's sources as syntax trees, so nothing heavy is imported
and a release that is not installed can be checked too. Two sets exist: the
configuration's, replaced when the plugin registers, and the worker's, replaced
when a worker that drafts initialises its device.
"""

import ast
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.lilicorr")

TESTED_VERSIONS = ("0.31", "0.32", "0.33")


@dataclass(frozen=True)
class Seam:
    """One internal of vLLM that this plugin replaces, extends or calls.

    Attributes:
        module: dotted module of vLLM.
        name: function, "Class", or "Class.method" inside it; an imported name counts.
        parameters: names that it must accept, in this order, self left out; None
            for a name whose parameters do not matter.
        reason: why no official hook will do.
        removal: what would make the seam unnecessary.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None
    reason: str
    removal: str


_NO_METHOD_REGISTRY = "vLLM has no registry of speculative methods"
_METHOD_REGISTRY = "a registry of speculative methods"
CONFIG_SEAMS = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        ("target_model_config", "target_parallel_config"),
        f'accepts method "lilicorr" and fills in what the checkpoint knows; {_NO_METHOD_REGISTRY}',
        _METHOD_REGISTRY,
    ),
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        ("parser",),
        "--spec-method lists its choices when the parser is built",
        _METHOD_REGISTRY,
    ),
    Seam(
        "vllm.config.speculative",
        "SpeculativeConfig.compose_draft_hf_overrides",
        None,
        "older exports name another architecture; overrides given as a mapping never reach the drafter",
        "overrides for the drafter's configuration",
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig._is_dflash_candidate_draft",
        (),
        "model runner V1 refuses candidate heads, because its own proposer would ignore them",
        "LiLiCorr on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_device",
        (),
        "the last call before a runner builds its proposer: worker modules load only where they are used",
        _METHOD_REGISTRY,
    ),
)
SCHEDULER_SEAMS = (
    Seam(
        "vllm.config.scheduler",
        "SchedulerConfig.get_scheduler_cls",
        (),
        "an engine asks for its scheduler's class here: that module loads only where it is used",
        "accepted counts for plugins in vLLM, also where statistics are off",
    ),
    Seam(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.make_spec_decoding_stats",
        (
            "spec_decoding_stats",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_invalid_spec_tokens",
            "request_id",
        ),
        "is told of every request how many drafted tokens were accepted, without asking the device",
        "accepted counts for plugins in vLLM, also where statistics are off",
    ),
)
V1_SEAMS = (
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "DFlashProposer",
        None,
        "the V1 runner builds its proposer by this module-level name",
        "LiLiCorr on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.dflash",
        "DFlashProposer.__init__",
        ("vllm_config", "device", "runner"),
        "the proposer subclasses it",
        "LiLiCorr on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.dflash",
        "DFlashProposer.set_inputs_first_pass",
        (
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "target_hidden_states",
            "token_indices_to_sample",
            "cad",
            "num_rejected_tokens_gpu",
        ),
        "sees target features and rejected counts together: the anchor",
        "LiLiCorr on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._sample_draft_tokens",
        ("hidden_states", "sampling_metadata"),
        "sees the drafter's hidden states: the lattice is scored here",
        "LiLiCorr on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.propose",
        (
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "token_indices_to_sample",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
            "slot_mappings",
        ),
        "called by name of argument; suspends the drafter and shortens its proposals",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.initialize_attn_backend",
        ("kv_cache_config", "kernel_block_sizes"),
        "knows whether the drafter shares its KV-cache group with the target",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        ("sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
        "loops over the requests, for nothing where one token each was sampled",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.prepare_inputs_padded",
        ("common_attn_metadata", "spec_decode_metadata", "valid_sampled_tokens_count"),
        "counts rejected tokens also where none were drafted",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.dflash",
        "DFlashProposer.dummy_run",
        ("num_tokens", "use_cudagraphs", "is_graph_capturing", "slot_mappings"),
        "the drafter's forward pass, timed by itself at start-up",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.worker.worker_base",
        "WorkerBase.compile_or_warm_up_model",
        (),
        "models are loaded, compiled and have their caches: the time to measure what a step costs",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        ("logits", "spec_decode_metadata"),
        "the rejection sampler copies all logits even where nothing was drafted",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        None,
        "the target's forward pass, timed at start-up",
        "an adaptive draft length on model runner V1 in vLLM",
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer.load_model",
        ("target_model",),
        "gives the target's token embedding to the head",
        "LiLiCorr on model runner V1 in vLLM",
    ),
)
CPU_SEAMS = (
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        "the CPU build writes the expanded sampling parameters into a copy: temperature, top-k and top-p of "
        "speculative rows are uninitialised memory there, for every drafter",
        "a vLLM CPU build whose expand kernel writes to its output",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "apply_sampling_constraints",
        ("logits", "cu_num_draft_tokens", "sampling_metadata"),
        "a step in which nothing was drafted for requests with top-k ends the CPU build's engine: it asks for the "
        "largest of no values",
        "a vLLM whose top-k takes no rows",
    ),
    Seam(
        "vllm.model_executor.models.qwen3_dflash",
        "DFlashQwen3Model._normalize_context_k",
        ("all_k",),
        "the CPU build's rms_norm reads only the first row of a stacked weight: every layer of a DFlash drafter gets "
        "the first layer's k_norm, which costs acceptance and says nothing",
        "a vLLM CPU build whose rms_norm takes one weight per layer",
    ),
)
_A16_KERNEL = "weight-only NVFP4 among the kernels that register_linear_kernel adds"
CPU_NVFP4_SEAMS = (
    Seam(
        "vllm.model_executor.kernels.linear",
        "init_nvfp4_linear_kernel",
        ("use_a16",),
        "for weight-only NVFP4 it chooses among built-in CUDA kernels, whatever was registered for the platform",
        _A16_KERNEL,
    ),
    Seam(
        "vllm.model_executor.layers.quantization.modelopt",
        "init_nvfp4_linear_kernel",
        None,
        "Model Optimizer's layers choose their kernel by this module-level name",
        _A16_KERNEL,
    ),
    Seam(
        "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
        "init_nvfp4_linear_kernel",
        None,
        "compressed-tensors' layers choose their kernel by this module-level name",
        _A16_KERNEL,
    ),
    Seam(
        "vllm.model_executor.kernels.linear",
        "register_linear_kernel",
        ("kernel_class", "platform", "kernel_type"),
        "official; the CPU platform has no NVFP4 kernel of its own",
        "an NVFP4 linear kernel in vLLM's CPU build",
    ),
)
_EXACT_SHARDS = "fused NVFP4 linears with a weight_scale_2 for each shard in vLLM"
QUANTIZED_SEAMS = (
    Seam(
        "vllm.model_executor.layers.quantization.modelopt",
        "ModelOptQuantConfigBase.get_quant_method",
        ("layer", "prefix"),
        "makes the method of each quantized linear of a drafter, by its stored format",
        "a quantization of the drafter that is read from its tensors",
    ),
    Seam(
        "vllm.model_executor.layers.quantization.modelopt",
        "KNvfp4Static.process",
        ("layer", "role"),
        "keeps the largest weight_scale_2 of fused shards; ours makes them equal before it and rescales the output",
        _EXACT_SHARDS,
    ),
    Seam(
        "vllm.model_executor.layers.linear",
        "register_weight_loader_v2_supported_method",
        None,
        "lets the method around vLLM's load as vLLM's does",
        _EXACT_SHARDS,
    ),
)
_WHOLE_PROPOSALS = "proposals over the whole vocabulary in vLLM's candidate walk"
_LIMITS = "top-k and top-p among propose's parameters"
_GENERATE_DRAFT = (
    "num_reqs",
    "num_tokens_padded",
    "attn_metadata",
    "slot_mappings",
    "num_tokens_across_dp",
    "cudagraph_runtime_mode",
)
V2_SEAMS = (
    Seam(
        "vllm.v1.worker.gpu.spec_decode.lilicorr.speculator",
        "LiLiCorrSpeculator",
        None,
        "init_speculator imports the class from here when it is called",
        _METHOD_REGISTRY,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.lilicorr.speculator",
        "LiLiCorrSpeculator.load_draft_model",
        ("target_model", "target_attn_layer_names"),
        "the in-tree one refuses a token embedding with LoRA, and prepares no head for dummy weights",
        "LoRA targets for LiLiCorr in vLLM",
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator.load_draft_model",
        ("target_model", "target_attn_layer_names"),
        "loads the backbone, past the in-tree LiLiCorr checks",
        "LoRA targets for LiLiCorr in vLLM",
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.lilicorr.speculator",
        "LiLiCorrSpeculator._score_candidates",
        ("candidate_ids", "unary_logits", "hidden_states"),
        "calls this plugin's head as the drafter's model.lilicorr",
        _METHOD_REGISTRY,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash2.speculator",
        "DFlash2Speculator._generate_draft",
        _GENERATE_DRAFT,
        "the in-tree one draws from the K candidates only",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator._run_model",
        ("num_tokens", *_GENERATE_DRAFT[2:]),
        "runs the backbone for it",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash2.speculator",
        "CandidateSampler.__init__",
        ("max_num_reqs", "num_steps", "top_k", "device"),
        "walks over one more candidate per slot where requests sample, or over fewer (candidate_topk)",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash2.speculator",
        "CandidateSampler.sample",
        (
            "candidate_ids",
            "scores",
            "num_reqs",
            "sample_pos",
            "idx_mapping",
            "temperature",
            "seeds",
            "draft_tokens",
            "draft_logits",
            "use_fp64",
        ),
        "walks the lattice by Gumbel-max; realised rows are left in its scores",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash2.speculator",
        "CandidateSampler._cache_draft_logits",
        ("candidate_ids", "num_sample", "idx_mapping", "draft_logits"),
        "the in-tree one erases the candidates of the step before, which are other tokens now",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        None,
        "draws the token from elsewhere with the noise that the walk compares with; called by keywords",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator._maybe_predict_acceptance",
        ("logits", "idx_mapping", "draft_step"),
        "adaptive verification reads the proposals",
        _WHOLE_PROPOSALS,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator.propose",
        None,
        "the last call before a graph is replayed: top-k and top-p are copied to where the graph reads them",
        _LIMITS,
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner",
        None,
        "its speculator gets a weak reference to it: propose is told temperatures and seeds only",
        _LIMITS,
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.states",
        "SamplingStates.__init__",
        ("max_num_reqs", "vocab_size"),
        "holds top_k and top_p by request state",
        _LIMITS,
    ),
)
ALL_SEAMS = CONFIG_SEAMS + SCHEDULER_SEAMS + V1_SEAMS + CPU_SEAMS + CPU_NVFP4_SEAMS + QUANTIZED_SEAMS + V2_SEAMS


def is_tested(version: str) -> bool:
    """Whether a vLLM version, such as "0.32.0+cpu", lies in the tested range."""
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS


def mismatch(seam: Seam, package: Path) -> str | None:
    """What no longer fits a seam in the vLLM sources at `package`, or None."""
    path = package.joinpath(*seam.module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    if not path.is_file():
        return f"{seam.module} is gone"
    node = _find(_parse(path), seam.name.split("."))
    if node is None:
        return f"{seam.module} has no {seam.name}"
    if seam.parameters is None:
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{seam.module}.{seam.name} is no function"
    arguments = node.args
    found = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    found = tuple(name for name in found if name not in ("self", "cls"))
    if found != seam.parameters:
        return f"{seam.module}.{seam.name} takes {list(found)}, expected {list(seam.parameters)}"
    return None


@functools.lru_cache(maxsize=8)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom | ast.Import) and len(names) == 1:
            if any((alias.asname or alias.name) == names[0] for alias in node.names):
                return node
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return node if len(names) == 1 else _find(node, names[1:])
    return None


def mismatches(seams: tuple[Seam, ...], package: Path) -> list[str]:
    problems = [problem for seam in seams if (problem := mismatch(seam, package))]
    _parse.cache_clear()  # syntax trees are large
    return problems


def _vllm_package() -> Path:
    import vllm

    return Path(vllm.__file__).parent


def _explain(problems: list[str]) -> str:
    import vllm

    return (
        f"vllm-lilicorr does not fit vLLM {vllm.__version__}: {'; '.join(problems)}. Tested versions: "
        f"{', '.join(TESTED_VERSIONS)}. vLLM is left as it was; install a tested version, or a vllm-lilicorr "
        "that knows this one."
    )


CheckBeforeLoading = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@functools.cache
def install(check_before_loading: CheckBeforeLoading) -> None:
    """Replaces the configuration's seams in this process, or none of them and says why.

    Args:
        check_before_loading: is called with vLLM's engine arguments, the speculative
            config and the target's configuration; returns what to add to the
            speculative config, or raises ValueError.
    """
    import vllm

    problems = [] if is_tested(vllm.__version__) else ["this version was not tested"]
    problems += mismatches(CONFIG_SEAMS, _vllm_package())
    if problems:
        logger.warning(_explain(problems))
        return
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_lilicorr.method.geometry import ARCHITECTURE

    ModelRegistry.register_model(ARCHITECTURE, "vllm_lilicorr.engine.drafter:LiLiCorrForCausalLM")
    _accept_method(check_before_loading)
    _list_method_on_command_line()
    _rewrite_draft_config()
    _allow_on_v1()
    _install_worker_seams_on_init_device()
    _watch_acceptance()
    logger.debug("vllm-lilicorr registered with vLLM %s", vllm.__version__)


def _accept_method(check_before_loading: CheckBeforeLoading) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    from vllm_lilicorr.engine.options import KEY
    from vllm_lilicorr.engine.speculative_config import download_dir, refuse_pipeline_parallel, translate
    from vllm_lilicorr.settings import Settings

    original = EngineArgs.create_speculative_config

    def read_config(model: str, revision: str | None) -> dict[str, Any] | None:
        return get_hf_file_to_dict("config.json", model, revision)

    @functools.wraps(original)
    def create_speculative_config(self, target_model_config, target_parallel_config):
        config = {key.replace("-", "_"): value for key, value in (self.speculative_config or {}).items()}
        flags = {"method": self.spec_method, "model": self.spec_model, "num_speculative_tokens": self.spec_tokens}
        flags = {key: value for key, value in flags.items() if value is not None}
        # Nothing to translate, or a key given twice: vLLM's own answer.
        if (config or flags) and not config.keys() & flags.keys():
            given = config | flags
            if KEY in self.additional_config:  # these arguments were translated before
                given = {KEY: self.additional_config[KEY]} | given
            walk = Settings.from_environment().walk
            self.speculative_config, options = translate(given, read_config, target_model_config.hf_text_config, walk)
            if options is not None:
                self.additional_config = {**self.additional_config, KEY: options.to_mapping()}
                if current_platform.is_cpu():
                    refuse_pipeline_parallel(target_parallel_config.pipeline_parallel_size)
                target = target_model_config.hf_text_config.to_dict()
                self.speculative_config |= check_before_loading(self, self.speculative_config, target)
            self.spec_method = self.spec_model = self.spec_tokens = None
        download_dir.set(self.download_dir)
        return original(self, target_model_config, target_parallel_config)

    EngineArgs.create_speculative_config = create_speculative_config


def _list_method_on_command_line() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_lilicorr.engine.speculative_config import METHOD

    original = EngineArgs.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser):
        parser = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and METHOD not in (action.choices or (METHOD,)):
                action.choices = [*action.choices, METHOD]
        return parser

    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _rewrite_draft_config() -> None:
    from vllm.config.speculative import SpeculativeConfig

    from vllm_lilicorr.engine.speculative_config import download_dir, rewrite_draft_config

    original = SpeculativeConfig.compose_draft_hf_overrides

    @functools.wraps(original)
    def compose_draft_hf_overrides(*args, **kwargs):
        return functools.partial(rewrite_draft_config, original(*args, **kwargs), download_dir.get())

    SpeculativeConfig.compose_draft_hf_overrides = staticmethod(compose_draft_hf_overrides)


def drafts_with_lilicorr(vllm_config: Any) -> bool:
    """Whether this engine's drafter is a LiLiCorr checkpoint."""
    from vllm_lilicorr.method.geometry import ARCHITECTURE

    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return draft is not None and ARCHITECTURE in (draft.architectures or ())


def _allow_on_v1() -> None:
    from vllm.config.vllm import VllmConfig

    original = VllmConfig._is_dflash_candidate_draft

    @functools.wraps(original)
    def _is_dflash_candidate_draft(self):
        return False if drafts_with_lilicorr(self) else original(self)

    VllmConfig._is_dflash_candidate_draft = _is_dflash_candidate_draft


def _install_worker_seams_on_init_device() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device

    @functools.wraps(original)
    def init_device(self):
        if _is_quantized(self.vllm_config):
            install_cpu_nvfp4()
        if self.vllm_config.speculative_config is not None:
            install_worker(self.vllm_config)
        result = original(self)
        if drafts_with_lilicorr(self.vllm_config):
            if self.vllm_config.use_v2_model_runner:
                _introduce_runner(self.worker.model_runner)
            else:
                _adapt(self.worker)
        return result

    WorkerWrapperBase.init_device = init_device


def _watch_acceptance() -> None:
    from vllm.config.scheduler import SchedulerConfig

    original = SchedulerConfig.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self):
        _count_accepted()
        return original(self)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


@functools.cache
def _count_accepted() -> None:
    if problems := mismatches(SCHEDULER_SEAMS, _vllm_package()):
        logger.warning(_explain(problems))
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.make_spec_decoding_stats

    @functools.wraps(original)
    def make_spec_decoding_stats(
        self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    ):
        if num_draft_tokens and (watch := _acceptance_watch(self)) is not None:
            watch.observe(num_accepted_tokens)
        return original(
            self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    Scheduler.make_spec_decoding_stats = make_spec_decoding_stats


def _acceptance_watch(scheduler: Any) -> Any:
    """The watch of a scheduler's engine; None where its drafter is another, or the guard watches it."""
    if not hasattr(scheduler, "_lilicorr_watch"):
        from vllm_lilicorr.engine.acceptance_watch import AcceptanceWatch
        from vllm_lilicorr.engine.options import Options

        config = scheduler.vllm_config
        is_watched = drafts_with_lilicorr(config) and config.use_v2_model_runner
        if is_watched and Options.from_vllm_config(config).guard:
            models = (config.speculative_config.draft_model_config.model, config.model_config.model)
            scheduler._lilicorr_watch = AcceptanceWatch(*models)
        else:
            scheduler._lilicorr_watch = None
    return scheduler._lilicorr_watch


def install_worker(vllm_config: Any) -> None:
    """Replaces the seams that this engine's workers need. Safe to call again.

    On the CPU build that includes the cures of vLLM that every drafter needs.

    Raises:
        ValueError: LiLiCorr was asked for and a seam of the worker does not fit.
    """
    from vllm.platforms import current_platform

    ours, uses_v2, on_cpu = (
        drafts_with_lilicorr(vllm_config),
        vllm_config.use_v2_model_runner,
        current_platform.is_cpu(),
    )
    needed = CPU_SEAMS if on_cpu else ()
    if ours:
        needed += V2_SEAMS if uses_v2 else V1_SEAMS
        needed += QUANTIZED_SEAMS if _is_quantized(vllm_config) else ()
    problems = mismatches(needed, _vllm_package())
    if problems and ours:
        raise ValueError(_explain(problems))
    if problems:
        logger.warning(_explain(problems))
        return
    if on_cpu:
        expand_exactly()
        constrain_no_rows()
        normalize_each_layer()
    if ours and uses_v2:
        _speculate_on_v2()
    elif ours:
        _propose_on_v1()


def _is_quantized(vllm_config: Any) -> bool:
    """Whether target or drafter is."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return any(getattr(config, "quantization", None) for config in (vllm_config.model_config, draft))


@functools.cache
def install_cpu_nvfp4() -> None:
    """Gives the CPU platform an NVFP4 linear kernel, for any model; elsewhere does nothing."""
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    problems = mismatches(CPU_NVFP4_SEAMS, _vllm_package())
    if problems:
        logger.warning(_explain(problems))
        return
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4

    from vllm_lilicorr.engine.cpu_nvfp4 import CpuNvFp4LinearKernel

    linear.register_linear_kernel(CpuNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    original = linear.init_nvfp4_linear_kernel

    @functools.wraps(original)
    def init_nvfp4_linear_kernel(use_a16=False):
        if use_a16:
            return CpuNvFp4LinearKernel(linear.NvFp4LinearLayerConfig())
        return original()

    for module in (modelopt, compressed_tensors_w4a4_nvfp4):
        module.init_nvfp4_linear_kernel = init_nvfp4_linear_kernel


@functools.cache
def _propose_on_v1() -> None:
    from vllm.v1.worker import gpu_model_runner

    from vllm_lilicorr.engine.adaptive_proposer import AdaptiveProposer

    plain = gpu_model_runner.DFlashProposer

    class DFlashProposer(plain):
        """What the runner builds: ours for a LiLiCorr checkpoint, vLLM's for any other."""

        def __new__(cls, vllm_config, device, runner=None):
            return object.__new__(_Proposer if drafts_with_lilicorr(vllm_config) else cls)

    class _Proposer(AdaptiveProposer, DFlashProposer):
        """Ours, and an instance of the name that the runner checks."""

    gpu_model_runner.DFlashProposer = DFlashProposer


def _adapt(worker: Any) -> None:
    """Lets a V1 proposer adapt its length: it measures both models when they are loaded, compiled and have
    their caches, and a step that verifies nothing samples as without speculation."""
    runner = worker.model_runner
    if not getattr(runner.drafter, "adapts", False):
        return
    warm_up, sample = worker.compile_or_warm_up_model, runner._sample

    @functools.wraps(warm_up)
    def compile_or_warm_up_model():
        result = warm_up()
        runner.drafter.start_adapting()
        return result

    @functools.wraps(sample)
    def _sample(logits, spec_decode_metadata):
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return sample(logits, spec_decode_metadata)

    worker.compile_or_warm_up_model, runner._sample = compile_or_warm_up_model, _sample


@functools.cache
def expand_exactly() -> None:
    """Gives each drafted token its request's sampling parameters on the CPU build."""
    import torch
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.expand_batch_to_tokens

    @functools.wraps(original)
    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        if replace_from != replace_to:
            x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return x.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


@functools.cache
def constrain_no_rows() -> None:
    """Lets steps without a single drafted token pass the CPU build's top-k."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.apply_sampling_constraints

    @functools.wraps(original)
    def apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata):
        if logits.shape[0] == 0:
            return logits
        return original(logits, cu_num_draft_tokens, sampling_metadata)

    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


@functools.cache
def normalize_each_layer() -> None:
    """Gives each layer of a DFlash drafter its own k_norm on the CPU build."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    original = DFlashQwen3Model._normalize_context_k

    @functools.wraps(original)
    def _normalize_context_k(self, all_k):  # [L, num_context, kv_heads, head_dim]
        normed = torch.empty_like(all_k)
        for index, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[index], all_k[index], weight, self._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = _normalize_context_k


@functools.cache
def _speculate_on_v2() -> None:
    from vllm.v1.worker.gpu.spec_decode.lilicorr import speculator

    from vllm_lilicorr.engine.speculator import LiLiCorrSpeculator

    speculator.LiLiCorrSpeculator = LiLiCorrSpeculator


def _introduce_runner(runner: Any) -> None:
    if runner.speculator is not None:  # the last pipeline stage's
        runner.speculator.meet_runner(runner)

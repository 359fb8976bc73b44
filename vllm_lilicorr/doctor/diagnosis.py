# SPDX-License-Identifier: Apache-2.0
"""`lilicorr doctor`: a drafter, its target, a machine and vLLM's options, before anything is loaded."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vllm_lilicorr.checkpoint.doctor import Subject, examine
from vllm_lilicorr.checkpoint.findings import Finding, exit_code
from vllm_lilicorr.checkpoint.location import local_folder
from vllm_lilicorr.checkpoint.quantization import module_formats
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.doctor.engine_arguments import EngineArguments, parse_engine_arguments
from vllm_lilicorr.doctor.engine_rules import check_server
from vllm_lilicorr.doctor.gpu_rules import nvfp4_dtype, nvfp4_widths
from vllm_lilicorr.doctor.installation_rules import check_installation
from vllm_lilicorr.doctor.machines import Machine, find_machine, present_cpu, present_machine
from vllm_lilicorr.doctor.planned_server import PlannedServer
from vllm_lilicorr.serving.installation import VllmMissingError, find_vllm


@dataclass(frozen=True)
class DoctorOptions:
    """What to look at.

    Attributes:
        drafter: folder, or Hugging Face repository in the cache; None takes the one that
            `vllm_args` name.
        target: likewise.
        gpu: name of a known machine; None looks at the present one.
        vllm_args: what would follow `vllm serve`.
        deep: whether to read the drafter's values.
    """

    drafter: str | None = None
    target: str | None = None
    gpu: str | None = None
    vllm_args: Sequence[str] = field(default_factory=tuple)
    deep: bool = False


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        drafter: its folder.
        target: the target's folder, or None.
        machine: where it would run.
        findings: of every check, in order.
    """

    drafter: Path
    target: Path | None
    machine: Machine
    findings: list[Finding]

    def exit_code(self, strict: bool) -> int:
        return exit_code(self.findings, strict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "drafter": str(self.drafter),
                "target": str(self.target) if self.target else None,
                "machine": self.machine.name,
                "findings": [asdict(finding) for finding in self.findings],
            },
            indent=2,
        )


def diagnose(options: DoctorOptions, progress: Callable[[int], None] = lambda num_bytes: None) -> Report:
    """Runs every check.

    Args:
        options: what to look at.
        progress: is told the bytes read of the drafter's values, with `deep`.

    Raises:
        ValueError: no drafter is named, it is not on this machine, or an option cannot be read.
    """
    arguments = parse_engine_arguments(options.vllm_args)
    machine = find_machine(options.gpu) if options.gpu else this_machine()
    drafter = options.drafter or arguments.speculative.get("model")
    if not drafter:
        raise ValueError(
            "No drafter is named; give its folder, as in `lilicorr doctor DRAFTER --target TARGET`, or a "
            "--speculative-config that names one after --vllm-args."
        )
    folder = find_folder(str(drafter))
    target_name = options.target or arguments.target
    target = find_folder(target_name) if target_name else None
    subject, findings = examine(folder, target)
    if options.deep and subject.drafter.tensors:
        from vllm_lilicorr.checkpoint.deep_values import deep_findings

        findings += deep_findings(subject.drafter, progress)
    findings += check_installation(arguments.speculative)
    findings += check_serving(subject, arguments, machine)[1]
    return Report(folder, target, machine, findings)


def find_folder(name: str) -> Path:
    """The folder of a drafter or target on this machine.

    Raises:
        ValueError: there is none.
    """
    folder = local_folder(name, None, None, fetch=False)
    if folder is None and not Path(name).exists():
        hint = f"download it first: hf download {name}" if name.count("/") == 1 else "name an existing folder"
        raise ValueError(f"{name!r} is neither a folder nor a repository in the Hugging Face cache; {hint}.")
    return folder or Path(name)


def this_machine() -> Machine:
    """A CPU build of vLLM runs on the CPU, whatever GPUs there are."""
    try:
        if find_vllm().is_cpu_build:
            return present_cpu()
    except VllmMissingError:
        pass
    return present_machine()


def check_serving(
    subject: Subject, arguments: EngineArguments, machine: Machine, skip: Iterable[str] = ()
) -> tuple[PlannedServer | None, list[Finding]]:
    """What the options, the machine and the installed vLLM's version mean for this pair.

    Args:
        subject: the pair; without dimensions nothing can be told.
        arguments: the options.
        machine: where it runs.
        skip: names of rules to leave out.
    """
    if subject.geometry is None:
        return None, []
    target = subject.target
    server = PlannedServer(
        arguments=arguments,
        machine=machine,
        geometry=subject.geometry,
        drafter=subject.drafter.config,
        target=target.config if target else None,
        target_quantization=target.hf_quant_config if target else None,
        vllm_version=_vllm_version(),
    )
    shapes = _nvfp4_shapes(subject.drafter) | (_nvfp4_shapes(target) if target else {})
    findings = [*check_server(server, skip), *nvfp4_widths(shapes, arguments, machine)]
    if target:
        findings += nvfp4_dtype(module_formats(target.tensors).values(), server)
    return server, findings


def _vllm_version() -> tuple[int, int]:
    """Of the installed vLLM, else of the newest tested one."""
    try:
        major, minor = find_vllm().version.split(".")[:2]
        return int(major), int(minor)
    except (VllmMissingError, ValueError):
        return PlannedServer.vllm_version


def _nvfp4_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """[N, K] of every linear whose weight and input are NVFP4, by stored module name."""
    found = {}
    for name, entry in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if (
            entry.dtype == "U8"
            and len(entry.shape) == 2
            and module != name
            and f"{module}.input_scale" in checkpoint.tensors
        ):
            found[module] = (entry.shape[0], 2 * entry.shape[-1])
    return found

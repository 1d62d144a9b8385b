"""Check of what this machine can run: versions, cores and memory, data sets, weights, plug-ins that load.

Nothing here imports torch before it is known to import.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from fedsim.base.errors import DataError, FedsimError, error_reason, first_line, one_line
from fedsim.federation.data_folder import WEIGHTS_FOLDER, find_data_folder, find_weights_folder
from fedsim.plugins import registry
from fedsim.plugins.descriptions import find_version

_EXTRA = "federation"
_HOW_TO_GET_WEIGHTS = (
    "on a machine with a network, save `torchvision.models.squeezenet1_1(weights='DEFAULT').state_dict()` there as "
    "squeezenet1_1.pth by `torch.save`"
)


@dataclass(frozen=True)
class MachineCheck:
    """Result of one check.

    Attributes:
        text: the result, and what to do where something is missing.
        broken: whether fedsim does not work like this.
    """

    part: str
    name: str
    text: str
    broken: bool = False


def run_checks() -> Iterator[MachineCheck]:
    """Yield the result of each check as it is made; takes seconds."""
    yield from _versions()
    yield from _requirements()
    if problem := _torch_problem():
        yield MachineCheck("versions", "torch", problem, broken=True)
        return
    yield from _machine()
    yield from _data_sets()
    yield _weights()
    yield from _plugins()


def _versions() -> Iterator[MachineCheck]:
    yield MachineCheck("versions", "python", sys.version.split()[0])
    for name, package in (("fedsim", registry.DISTRIBUTION), ("torch", "torch"), ("flwr", "flwr"), ("ray", "ray")):
        yield MachineCheck("versions", name, find_version(package) or "not installed")


def _requirements() -> Iterator[MachineCheck]:
    """Yield what fedsim needs and is not there, or in another version than it was made for."""
    for line in requires(registry.DISTRIBUTION) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if not (always or (marker is not None and marker.evaluate({"extra": _EXTRA}))):
            continue
        installed = find_version(requirement.name)
        if not installed:
            consequence = "" if always else "recordings can be attacked, but no federation be run; "
            package = registry.DISTRIBUTION if always else f"{registry.DISTRIBUTION}[{_EXTRA}]"
            text = f"is missing; {consequence}pip install '{package}'"
            yield MachineCheck("versions", requirement.name, text, broken=always)
        elif not requirement.specifier.contains(installed, prereleases=True):
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            text = f"is {installed}, and fedsim wants {requirement.specifier}; {remedy}"
            yield MachineCheck("versions", requirement.name, text, broken=always)


def _torch_problem() -> str:
    """Return why PyTorch does not import; empty where it does."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a missing library of the system is an OSError, and there are others
        return f"does not import ({one_line(error_reason(error))}); install it again, see https://pytorch.org"
    return ""


def _machine() -> Iterator[MachineCheck]:
    from fedsim.base.machine import count_cores, free_memory

    yield MachineCheck("machine", "cores", str(count_cores()))
    yield MachineCheck("machine", "memory", f"{free_memory() / 1e9:.1f} GB free")
    yield from _gpus()


def _gpus() -> Iterator[MachineCheck]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        build = "" if torch.version.cuda else "; this PyTorch was built without CUDA"
        reason = f" ({one_line(str(caught[0].message))})" if caught else ""
        yield MachineCheck("machine", "GPU", f"none that PyTorch can use{build}{reason}")
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        text = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB{_explain_unusable_gpu(number)}"
        yield MachineCheck("machine", f"cuda:{number}", text)


def _explain_unusable_gpu(gpu: int) -> str:
    """Return why nothing can be computed on a GPU, as the end of a sentence; empty where something can."""
    import torch

    try:
        torch.ones(2, 2, device=f"cuda:{gpu}").matmul(torch.ones(2, 2, device=f"cuda:{gpu}")).sum().item()
    except RuntimeError as error:
        return f"; nothing can be computed on it: {first_line(error)}"
    return ""


def _data_sets() -> Iterator[MachineCheck]:
    folder = find_data_folder()
    location = str(folder) if folder else "none; set FEDSIM_DATA, or give --data-dir DIR"
    missing = "" if folder is None or folder.is_dir() else "; there is no such folder"
    yield MachineCheck("data sets", "folder", location + missing)
    for name in registry.registered_names("datasets"):
        if registry.is_builtin("datasets", name):
            yield MachineCheck("data sets", name, _data_set(name, folder if folder and not missing else None))


def _data_set(name: str, folder: Path | None) -> str:
    """Say whether the files of a data set are there; if not, how to get them."""
    from fedsim.data.cache import find_source_files
    from fedsim.data.download import describe_source

    plugin = registry.build("datasets", name, {}, name)
    if "path" in registry.setting_parameters(type(plugin)):
        return "reads your own files; set data.path"
    try:
        files = find_source_files(plugin, folder)
    except DataError as error:
        if folder is None:
            return f"not searched for, because no folder is set; {describe_source(name)}"
        return f"missing: {str(error).removeprefix('data: ')}"
    if not files:
        return f"there, {describe_source(name)}"
    return "there, 1 file" if len(files) == 1 else f"there, {len(files)} files"


def _weights() -> MachineCheck:
    """Check the weights of the network behind LPIPS."""
    from fedsim.audit.evaluation.perceptual_distance import BACKBONES, check_backbone, find_backbone

    folder = find_weights_folder() or WEIGHTS_FOLDER
    backbone = find_backbone(folder)
    if backbone is None:
        files = " or ".join(known.files for known in BACKBONES)
        missing = f"missing, so no LPIPS is computed: {folder}/{files}; {_HOW_TO_GET_WEIGHTS}"
        return MachineCheck("weights", "LPIPS", missing)
    try:
        check_backbone(folder)
    except DataError as error:
        return MachineCheck("weights", "LPIPS", str(error))
    return MachineCheck("weights", "LPIPS", f"there, {backbone[1]}")


def _plugins() -> Iterator[MachineCheck]:
    """Yield how many plug-ins load, and each that does not."""
    count = 0
    for group in registry.GROUPS:
        for name in registry.registered_names(group):
            try:
                registry.load(group, name)
                count += 1
            except FedsimError as error:
                yield MachineCheck("plug-ins", name, str(error), broken=_is_ours(group, name))
    yield MachineCheck("plug-ins", "load", str(count))


def _is_ours(group: registry.Group, name: str) -> bool:
    """Return whether fedsim itself is broken if this plug-in does not load.

    It is not where Flower is not installed, or where two plug-ins share a name.
    """
    try:
        return registry.is_builtin(group, name) and bool(find_version("flwr"))
    except FedsimError:
        return False

"""What this machine can run: versions, cores and memory, data sets, weights, plug-ins that load.

Nothing here imports torch before it is known to import.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from fedsim.errors import DataError, FedsimError, first_line, one_line, what_it_said
from fedsim.plugins import registry

_EXTRA = "federation"
_WEIGHTS = (
    "on a machine with a network, save `torchvision.models.squeezenet1_1(weights='DEFAULT').state_dict()` there by "
    "`torch.save`"
)


@dataclass(frozen=True)
class Told:
    """One thing that was looked at.

    Attributes:
        part: of which it is one.
        name: what it is.
        text: how it is, and what to do where something is missing.
        broken: whether fedsim does not work as it is.
    """

    part: str
    name: str
    text: str
    broken: bool = False


def examined() -> Iterator[Told]:
    """Everything there is to say, one thing after the other as each is looked at; takes seconds."""
    yield from _versions()
    yield from _requirements()
    if broken := _no_torch():
        yield Told("versions", "torch", broken, broken=True)
        return
    yield from _machine()
    yield from _data_sets()
    yield _weights()
    yield from _plugins()


def _versions() -> Iterator[Told]:
    yield Told("versions", "python", sys.version.split()[0])
    for name, package in (("fedsim", registry.OWNER), ("torch", "torch"), ("flwr", "flwr"), ("ray", "ray")):
        yield Told("versions", name, _version(package) or "not installed")


def _requirements() -> Iterator[Told]:
    """What fedsim needs and is not there, or in another version than it was made for."""
    for line in requires(registry.OWNER) or ():
        needed = Requirement(line)
        always = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if always or (needed.marker is not None and needed.marker.evaluate({"extra": _EXTRA})):
            there = _version(needed.name)
            if not there:
                lost = "" if always else "recordings can be attacked, but no federation be run; "
                remedy = f"pip install '{registry.OWNER}{'' if always else f'[{_EXTRA}]'}'"
                yield Told("versions", needed.name, f"is missing; {lost}{remedy}", broken=always)
            elif not needed.specifier.contains(there, prereleases=True):
                wanted = (
                    f"is {there}, and fedsim wants {needed.specifier}; pip install '{needed.name}{needed.specifier}'"
                )
                yield Told("versions", needed.name, wanted, broken=always)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _no_torch() -> str:
    """Why PyTorch does not import; empty where it does."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a missing library of the system is an OSError, and there are others
        return f"does not import ({one_line(what_it_said(error))}); install it anew, see https://pytorch.org"
    return ""


def _machine() -> Iterator[Told]:
    from fedsim.machine import cores, free_memory

    yield Told("machine", "cores", str(cores()))
    yield Told("machine", "memory", f"{free_memory() / 1e9:.1f} GB free")
    yield from _gpus()


def _gpus() -> Iterator[Told]:
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = "" if torch.version.cuda else "; this PyTorch was built without CUDA"
        why = f" ({one_line(str(said[0].message))})" if said else ""
        yield Told("machine", "GPU", f"none that PyTorch can use{built}{why}")
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        yield Told("machine", f"cuda:{number}", f"{about.name}, {about.total_memory / 1e9:.0f} GB{_unusable(number)}")


def _unusable(gpu: int) -> str:
    """Why nothing can be computed on a GPU, as the end of a sentence."""
    import torch

    try:
        torch.ones(2, 2, device=f"cuda:{gpu}").matmul(torch.ones(2, 2, device=f"cuda:{gpu}")).sum().item()
    except RuntimeError as error:
        return f"; nothing can be computed on it: {first_line(error)}"
    return ""


def _data_sets() -> Iterator[Told]:
    from fedsim.experiments.build import data_folder

    folder = data_folder()
    told = str(folder) if folder else "none; set FEDSIM_DATA, or give --data-dir DIR"
    missing = "" if folder is None or folder.is_dir() else "; there is no such folder"
    yield Told("data sets", "folder", told + missing)
    for name in registry.names("datasets"):
        if registry.is_own("datasets", name):
            yield Told("data sets", name, _data_set(name, folder if folder and not missing else None))


def _data_set(name: str, folder: Path | None) -> str:
    """Whether the files of a data set are there; if not, how to get them."""
    from fedsim.datasets.cache import files_of
    from fedsim.datasets.download import how_to_get

    plugin = registry.build("datasets", name, {}, name)
    if "path" in registry.parameters(type(plugin)):
        return "reads files of your own; set data.path"
    try:
        files = files_of(plugin, folder)
    except DataError as error:
        if folder is None:
            return f"not looked for, without a folder; {how_to_get(name)}"
        return f"missing: {str(error).removeprefix('data: ')}"
    return f"there, {len(files)} file{'s' * (len(files) != 1)}" if files else f"there, {how_to_get(name)}"


def _weights() -> Told:
    """Those of the network behind LPIPS."""
    from fedsim.experiments.build import data_folder
    from fedsim.metrics import LPIPS_FILE, check_weights

    home = data_folder()
    path = (home or Path("$FEDSIM_DATA")) / "weights" / LPIPS_FILE
    if home is None or not path.is_file():
        return Told("weights", "LPIPS", f"missing, so no LPIPS is computed: {path}; {_WEIGHTS}")
    try:
        check_weights(path.parent)
    except DataError as error:
        return Told("weights", "LPIPS", str(error))
    return Told("weights", "LPIPS", f"there, {path}")


def _plugins() -> Iterator[Told]:
    """How many load, and each that does not."""
    count = 0
    for group in registry.GROUPS:
        for name in registry.names(group):
            try:
                registry.load(group, name)
                count += 1
            except FedsimError as error:
                yield Told("plug-ins", name, str(error), broken=_is_ours(group, name))
    yield Told("plug-ins", "load", str(count))


def _is_ours(group: registry.Group, name: str) -> bool:
    """Whether fedsim itself is broken if this does not load: not where Flower is left out, or two have one name."""
    try:
        return registry.is_own(group, name) and bool(_version("flwr"))
    except FedsimError:
        return False

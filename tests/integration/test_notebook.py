"""The notebook runs in a kernel as it does for its reader, and shows what its text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SHORTER = {
    '"rounds": 10': '"rounds": 2',
    "iterations=150": "iterations=70",
    '"iterations": 150': '"iterations": 70',
    '"victims": [0, 1]': '"victims": [0]',
    "for victim in (0, 1):": "for victim in (0,):",
}
"""What the test computes of the notebook is enough for what its text says of the attacks."""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_in_the_repository_holds_no_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


@pytest.mark.thorough
def test_the_audit_in_the_notebook_finds_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = _executed(EXAMPLES / "audit.ipynb", tmp_path, monkeypatch)

    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in shown if output.output_type == "error"] == []
    warnings = [output.text for output in shown if output.get("name") == "stderr"]
    assert all("in the same process as the data and remembers other" in text for text in warnings), warnings
    assert sum("image/png" in output.get("data", {}) for output in shown) == 3
    assert "<iframe" in shown[-1].data["text/html"]
    psnr = _psnr(tmp_path / "runs" / "audit")
    assert psnr["floor"] < psnr["inverting-gradients"] < psnr["MiddleOfTheWay"]
    assert abs(psnr["MiddleOfTheWay"] - psnr["sme"]) < 1.5
    defended = _psnr(tmp_path / "runs" / "audit-defended")
    assert all(defended[attack] < psnr[attack] - 3 for attack in psnr if attack != "floor")


def _executed(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook with its outputs, executed in `folder` by a kernel that listens on loopback."""
    import nbformat
    from nbclient import NotebookClient

    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(folder / "jupyter"))
    notebook = nbformat.read(path, as_version=4)
    for long, short in SHORTER.items():
        assert any(long in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    client = NotebookClient(notebook, kernel_name="python3", timeout=240, resources={"metadata": {"path": folder}})
    return client.execute()


def _psnr(run: Path) -> dict[str, Any]:
    scores = pd.read_csv(run / "scores.csv").query("metric == 'psnr'")
    return {**scores.groupby("attack")["value"].mean(), "floor": scores["floor"].mean()}

"""The index of a folder of runs in a browser."""

from __future__ import annotations

from fedsim.report.run_index import index_folder, write_index_page
from tests.fedsim.report.test_run_index import make_run


def test_the_index_is_for_everybody_and_sorts_by_a_click(tmp_path, is_for_everybody, look):
    for name, settings in (("a", {}), ("b", {"model": {"name": "linear"}}), ("c", {"rounds": 1})):
        make_run(tmp_path / name, **settings)
    path = write_index_page(index_folder(tmp_path))
    is_for_everybody(path)
    page = look(path).page
    page.get_by_role("button", name="State").click()
    assert page.locator("tbody th").all_inner_texts()[0] == "c"

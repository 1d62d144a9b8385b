"""Builders that tests share: experiments, tensors, recordings, runs, commands, processes."""

import pytest

pytest.register_assert_rewrite("tests.support.processes", "tests.support.runs")

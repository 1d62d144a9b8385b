"""Studies as recipes: each folder says what it asks, how that is run, and what came out.

`study.toml` has the question, the cells and the tables; a study of federations has a `sweep.toml`, which `fedsim sweep`
runs as well; `study.py` has what neither can say. Run one with `python -m studies NAME`.
"""

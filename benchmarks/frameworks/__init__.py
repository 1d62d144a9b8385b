"""One module a framework, each running the same federation; `benchmarks/engines.py` compares them.

    python -m frameworks FRAMEWORK '{"job": "mlp", "clients": 100, "rounds": 12}'

runs one of them in this process and prints one line of JSON. A module is named after its framework and has `run(task)`.
"""

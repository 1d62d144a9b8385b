"""The command line, as `python -m fedsim`."""

from fedsim.cli.program import run_program

if __name__ == "__main__":
    run_program()

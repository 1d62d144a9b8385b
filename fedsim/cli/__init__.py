"""The command line: one file a command, which reads options and shows what `fedsim.api` returns."""

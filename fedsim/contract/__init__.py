"""What every plug-in keeps to: checks on tiny cases, the same for fedsim's own plug-ins and for strangers'."""

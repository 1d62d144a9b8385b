"""What authors of plug-ins implement or receive: attacks, defenses, findings, knowledge."""

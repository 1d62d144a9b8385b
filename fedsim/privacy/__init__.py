"""What differential privacy costs: accountants for one client, and a ledger of what each client did over all rounds."""

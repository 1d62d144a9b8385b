"""The cost of differential privacy: accountants, a ledger of all clients and rounds, and audits."""

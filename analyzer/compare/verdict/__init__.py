"""A gate: candidate runs against a baseline, by budgets; pass, regressed or inconclusive."""

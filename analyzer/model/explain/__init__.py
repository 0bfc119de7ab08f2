"""The formulas behind a prediction, with its numbers, beside the rules of thumb of the field."""

"""The ways to open a trace that are compared; each is a program that opens and then tells."""

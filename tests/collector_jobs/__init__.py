"""Trainings as users write them, for the collectors to record, and ways to start and break them."""

"""The measured steps replayed with something changed on purpose."""

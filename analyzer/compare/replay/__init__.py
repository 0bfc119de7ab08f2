"""What if: the measured steps again, by their own dependencies, with something changed."""

"""In which order the ranks of a pipeline work, how long that takes and what it holds."""

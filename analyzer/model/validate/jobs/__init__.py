"""The jobs behind published rows: what each paper ran, and what it leaves open."""

"""The job of a recorded run, as a RUN.toml would state it."""

"""What agents ask: read-only tools over the analysis, served by the Model Context Protocol.

Each tool is an entry of `tools.TOOLS` and calls what the terminal and the pages call; none computes
a number of its own.
"""

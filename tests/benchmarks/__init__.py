"""What opening a large trace costs, beside other ways to open it, on one machine in one run."""

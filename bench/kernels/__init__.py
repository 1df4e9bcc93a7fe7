"""A benchmark for each Triton kernel, under its name: time on this machine's card beside what it must move."""

"""One benchmark for each Triton kernel, under the kernel's name: time on this machine's card beside what it must move."""

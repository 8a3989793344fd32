"""What each implementation of attention declares: a file for each family of kernels."""

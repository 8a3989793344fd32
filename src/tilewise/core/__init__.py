"""What does not depend on attention: errors, GPUs, random bits, values read back."""

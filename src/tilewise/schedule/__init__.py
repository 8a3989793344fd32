"""Which tiles a mask needs."""

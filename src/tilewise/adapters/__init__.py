"""The interfaces of other libraries, run by tilewise."""

"""Keys and values in fewer bits: codes with a scale for each token and head, and a rotation that evens out channels."""

from tilewise.quant.codes import KINDS, Encoded, decode, encode
from tilewise.quant.rotation import rotate

__all__ = ["KINDS", "Encoded", "decode", "encode", "rotate"]

"""Keys and values in fewer bits: codes with a scale for each token and head, or for each channel of a page, and a
rotation that evens out channels.
"""

from tilewise.quant.channels import ByChannel, encode_by_channel
from tilewise.quant.codes import KINDS, Encoded, decode, encode
from tilewise.quant.rotation import rotate

__all__ = ["KINDS", "ByChannel", "Encoded", "decode", "encode", "encode_by_channel", "rotate"]

"""Keys and values in fewer bits: codes with a scale for each token and head, or for each channel of a page, and a
rotation that evens out channels; and schemes of attention in few bits.
"""

from tilewise.quant.blocks import Quantized
from tilewise.quant.channels import ByChannel, encode_by_channel
from tilewise.quant.codes import KINDS, Encoded, decode, encode
from tilewise.quant.rotation import rotate
from tilewise.quant.schemes import FA3FP8, FP8, Sage, Sage1, Sage2, Sage2pp

__all__ = [
    "FA3FP8",
    "FP8",
    "KINDS",
    "ByChannel",
    "Encoded",
    "Quantized",
    "Sage",
    "Sage1",
    "Sage2",
    "Sage2pp",
    "decode",
    "encode",
    "encode_by_channel",
    "rotate",
]

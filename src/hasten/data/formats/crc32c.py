"""The checksum of TFRecord files: CRC-32C, computed by ``google-crc32c`` and masked."""

from collections.abc import Sequence

import numpy

from hasten.core.errors import ConfigurationError


def masked_crc32c(pieces: Sequence[bytes]) -> numpy.ndarray:
    """Returns the checksum of every piece as files store it: rotated right by 15 bits, plus a constant.

    uint32, shape (pieces,). ConfigurationError without ``google-crc32c``.
    """
    try:
        from google_crc32c import value
    except ImportError:
        raise ConfigurationError("checksums of TFRecord files need google-crc32c: pip install 'hasten[data]'") from None
    checksums = numpy.fromiter(map(value, pieces), numpy.uint32, len(pieces))
    return ((checksums >> numpy.uint32(15)) | (checksums << numpy.uint32(17))) + numpy.uint32(0xA282EAD8)

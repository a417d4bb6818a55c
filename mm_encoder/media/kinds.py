"""What kind of file some bytes are, from their signature: to decode it, or to name what is not decoded."""

from __future__ import annotations

import re

from ..config import MediaLimits
from ..errors import MediaDecodeError, UnsupportedMediaError

_MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00\x10\x00\x00\x00CR", "Canon CR2 camera raw"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "BigTIFF (TIFF with 64-bit offsets)"),
    (b"MM\x00+", "BigTIFF (TIFF with 64-bit offsets)"),
    (b"8BPS", "PSD"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"II\xbc\x01", "JPEG XR"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"#?RGBE", "Radiance HDR"),
    (b"SIMPLE  =", "FITS"),
    (b"qoif", "QOI"),
    (b"DDS ", "DDS"),
    (b"BPG\xfb", "BPG"),
    (b"FLIF", "FLIF"),
    (b"\xabKTX", "KTX"),
    (b"\x8aMNG\r\n\x1a\n", "MNG"),
    (b"\x8bJNG\r\n\x1a\n", "JNG"),
    (b"farbfeld", "farbfeld"),
    (b"gimp xcf", "XCF"),
    (b"AT&TFORM", "DjVu"),
    (b"icns", "ICNS"),
    (b"/* XPM */", "XPM"),
    (b"\x59\xa6\x6a\x95", "Sun raster"),
    (b"\x01\xda\x00\x01", "SGI image"),
    (b"\x01\xda\x01\x01", "SGI image"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"FUJIFILMCCD-RAW", "Fujifilm camera raw"),
    (b"IIU\x00", "Panasonic camera raw"),
    (b"IIRO", "Olympus camera raw"),
    (b"MMOR", "Olympus camera raw"),
    (b"%PDF-", "PDF"),
    (b"\x1aE\xdf\xa3", "Matroska/WebM video"),
    (b"OggS", "Ogg audio/video"),
    (b"ID3", "MP3 audio"),
    (b"\xff\xfb", "MP3 audio"),
    (b"\xff\xf3", "MP3 audio"),
    (b"\xff\xf2", "MP3 audio"),
    (b"\xff\xfa", "MP3 audio"),
    (b"\xff\xf1", "AAC audio"),
    (b"\xff\xf9", "AAC audio"),
    (b"#!AMR", "AMR audio"),
    (b".snd", "AU audio"),
    (b"caff", "CAF audio"),
    (b"MThd", "MIDI audio"),
    (b"RF64", "WAV audio"),
    (b"\x00\x00\x01\xba", "MPEG video"),
    (b"\x00\x00\x01\xb3", "MPEG video"),
    (b"FLV", "Flash video"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "Windows Media audio/video"),
    (b"fLaC", "FLAC audio"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "ZIP"),
)
_RIFF = {b"WEBP": "WebP", b"WAVE": "WAV audio", b"AVI ": "AVI video"}
# With the number of images: a plain TGA begins with the same four bytes and has two zeros there.
_ICON = re.compile(rb"\0\0([\1\2])\0(?!\0\0)..", re.DOTALL)
_TGA_FOOTER = b"TRUEVISION-XFILE.\0"
_NETPBM = re.compile(rb"P(?:[1-7Ff]\s|7\n)")
_MARKUP = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*<", re.ASCII)
_SVG = re.compile(rb"<svg[\s>]", re.IGNORECASE)
_HTML = re.compile(rb"<(?:!doctype html|html|head|body)[\s>]", re.IGNORECASE)


def sniff(data: bytes) -> str:
    """Return the kind of file, from its bytes alone. Raises MediaDecodeError if no signature matches."""
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and (riff := _RIFF.get(data[8:12])):
        return riff
    if data[4:8] == b"ftyp":
        return _iso_kind(data)
    if data[4:8] in (b"moov", b"mdat", b"wide"):
        return "MP4/QuickTime video"
    if data[:4] == b"FORM":
        if data[8:12] in (b"AIFF", b"AIFC"):
            return "AIFF audio"
        if data[8:12] in (b"ILBM", b"PBM "):
            return "IFF ILBM"
    if icon := _ICON.match(data):
        return "ICO" if icon[1] == b"\1" else "CUR"
    if data.endswith(_TGA_FOOTER):
        return "TGA"
    if _NETPBM.match(data):
        return "Netpbm (PNM)"
    if data[:1] == data[188:189] == b"\x47":
        return "MPEG transport stream video"
    if data[128:132] == b"DICM":
        return "DICOM"
    if data[:4] == b"\x01\x00\x00\x00" and data[40:44] == b" EMF":
        return "EMF"
    head = data[:4096]
    if _MARKUP.match(head):
        if _SVG.search(head):
            return "SVG"
        if _HTML.search(head):
            raise MediaDecodeError("the bytes are an HTML page, not an image")
    raise MediaDecodeError(
        f"the {len(data)} bytes are of no image format that is known here; send an encoded image, such as "
        "JPEG, PNG or WebP"
    )


# --- ISO base media files ----------------------------------------------------------------------------

# Brands that say how the image or film is coded, and those that say only how the file is built.
_CODED = dict.fromkeys((b"avif", b"avis", b"MA1A", b"MA1B"), "AVIF")
_CODED |= dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "HEIC")
_CODED |= dict.fromkeys((b"avci", b"avcs"), "HEIF with AVC")
_CODED |= {b"vvic": "HEIF with VVC", b"vvis": "HEIF with VVC", b"evbi": "HEIF with EVC"}
_CODED |= {b"jpeg": "HEIF with JPEG", b"jpgs": "HEIF with JPEG", b"j2ki": "HEIF with JPEG 2000"}
_CODED |= {
    b"jp2 ": "JPEG 2000",
    b"jpx ": "JPEG 2000",
    b"jpm ": "JPEG 2000",
    b"mjp2": "Motion JPEG 2000 video",
}
_CODED |= {b"jxl ": "JPEG XL", b"crx ": "Canon CR3 camera raw", b"pdf ": "PDF"}
_CODED |= dict.fromkeys((b"M4A ", b"M4B ", b"M4P "), "M4A audio")
_BUILT = {b"mif1": "HEIF", b"mif2": "HEIF", b"msf1": "HEIF image sequence", b"miaf": "HEIF"}
_VIDEO = re.compile(rb"qt  |isom|iso\d|mp4\d|M4V|avc1|3g[p2e]|dash|msdh|f4v |MSNV|mmp4|mp71|NDS|XAVC")
_MAX_BRANDS = 64


def _iso_kind(data: bytes) -> str:
    """Return the kind that the major brand names, else the first compatible brand that names one."""
    major = data[8:12]
    if kind := _CODED.get(major):
        return kind
    if _VIDEO.match(major):
        return "MP4/QuickTime video"
    end = min(int.from_bytes(data[:4]), len(data), 16 + 4 * _MAX_BRANDS)
    for at in range(16, end - 3, 4):
        if kind := _CODED.get(data[at : at + 4]):
            return kind
    if kind := _BUILT.get(major):
        return kind
    shown = major.decode("ascii").strip() if major.replace(b" ", b"").isalnum() else "?"
    return f"ISO media file (brand {shown!r})"


# --- formats -----------------------------------------------------------------------------------------


def check_narrowed(data: bytes, limits: MediaLimits) -> None:
    """Raise as `kind_allowed` if `limits` allow less than every format; look at nothing otherwise."""
    if limits.formats != _EVERY_FORMAT:
        kind_allowed(data, limits)


_EVERY_FORMAT = MediaLimits().formats


def kind_allowed(data: bytes, limits: MediaLimits) -> str:
    """Return the kind of an encoded image if it is decoded here and `limits` allow it.

    Raises UnsupportedMediaError, and MediaDecodeError if no signature matches.
    """
    kind = sniff(data)
    if kind in limits.formats:
        return kind
    allowed = ", ".join(limits.formats)
    if kind in _EVERY_FORMAT:
        raise UnsupportedMediaError(f"{kind} is not among the formats that MediaLimits allow ({allowed})")
    raise UnsupportedMediaError(f"{kind} is not decoded here; convert it to one of {allowed}")

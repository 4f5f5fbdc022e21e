"""Codecs: fp32 tensors to bytes and back, behind one seam.

    base      what a codec is; fp32 and bf16, which cast every value by itself
    blocks    codecs that code values block by block, and how a box is cut out of them
    scaled    fp16, int8, int4, e3m0, int2: a scale per block
    topk      the largest values of every chunk
    subsets   indices of a chunk as one number, which takes no more bits than there are choices
    native    where the compiled kernels are, if they are
    policy    which codec each tensor of a run takes

A payload is the codes of its boxes or tensors, one after the other, little-endian, with nothing between. A codec is
known on the wire by `id` and `version`; the bytes of a version never change.
"""

from __future__ import annotations

from diloco.codec.base import Bf16, Choice, Codec, Fp32
from diloco.codec.scaled import E3m0, Fp16, Int2, Int4, Int8
from diloco.codec.topk import TopK
from diloco.errors import CodecError, ConfigError

__all__ = ["CODECS", "Choice", "Codec", "by_id", "by_name"]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Fp32(),
        Bf16(),
        Fp16(),
        Int8(),
        Int4(),
        E3m0(),
        Int2(),
        TopK("topk", 16, keep=64, value_bits=2),
        TopK("topk-128", 17, keep=128, value_bits=2),
        TopK("topk-int8", 18, keep=64, value_bits=8),
        TopK.named("topk-coded"),
    )
}
"""Codecs by name. There are more of the family `topk`: `by_name` makes them."""
_BY_ID = {(codec.id, codec.version): codec for codec in CODECS.values()}


def by_name(name: str) -> Codec:
    """The codec of a name: one of `CODECS`, or `topk-K`, `topk-K-int8`, `topk-K-fp32`, each also with `-coded`.

    Raises:
        ConfigError: there is none of this name.
    """
    known = CODECS.get(name)
    if known is None:
        try:
            known = TopK.named(name)
        except ValueError:
            raise ConfigError(
                f"unknown codec '{name}'; known: {', '.join(CODECS)}, and topk-K, topk-K-int8 and topk-K-fp32 with K "
                "values kept of 4096, where '-coded' codes the indices"
            ) from None
    return known


def by_id(codec_id: int, version: int) -> Codec:
    """The codec of an id and version. Raises `CodecError` for one that is not known here."""
    known = _BY_ID.get((codec_id, version)) or TopK.numbered(codec_id, version)
    if known is None:
        names = ", ".join(f"{c.name} (id {c.id}, version {c.version})" for c in CODECS.values())
        raise CodecError(f"unknown codec id {codec_id} version {version}; known here: {names}, and others of topk")
    return known

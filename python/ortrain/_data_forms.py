"""Forms of data that ``ortrain.data.open`` reads. The help of the commands has them without the readers."""

from __future__ import annotations

__all__ = ["FORMS"]

FORMS = """\
FOLDER/CLASS/FILE.jpg        images: one folder per class (also png, webp, bmp, gif, tiff)
FOLDER/CLASS/FILE.wav        audio: one folder per class (also flac, ogg)
FILE.csv .tsv .parquet .arrow  a table: one column is the target, the others are inputs
FILE.npz .h5 .safetensors    arrays: one is the target, the others are inputs
FOLDER/x.npy FOLDER/y.npy    arrays, one file each
FILE.jsonl                   one object per line: {"text": "...", "label": "..."}; needs a tokenizer
FILE.txt                     a text for language modelling; needs a tokenizer"""
"""Forms of data that :func:`open` reads, one per line."""

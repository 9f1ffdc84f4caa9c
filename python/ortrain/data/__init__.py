"""Data in files as rows for training: images, tables, arrays, texts and audio.

===========  ==========================================================================  =======================
kind         form of the path                                                            packages
===========  ==========================================================================  =======================
``images``   folder with a folder of images per class                                    Pillow
``table``    ``.csv``, ``.tsv``, ``.parquet``, ``.arrow``; one column is the target       pyarrow
``arrays``   ``.npz``, ``.h5``, ``.safetensors``, folder of ``.npy``; one is the target   h5py for chunked HDF5
``jsonl``    ``.jsonl``: one object per line, with a text and a label                     tokenizers
``text``     ``.txt``: text in UTF-8, for language modelling                              tokenizers
``audio``    folder with a folder of ``.wav`` files per class                            soundfile
===========  ==========================================================================  =======================

:func:`open` chooses by the path. Every source reads its rows when they are asked for, and a batch depends on its rows
and its seed alone. ``pip install 'ortrain[train]'`` installs the packages.

>>> import ortrain
>>> np.savez("digits.npz", x=x, y=labels)
>>> source = ortrain.data.open("digits.npz")
>>> batch = source.take(np.arange(4), seed=0, training=True)
>>> batch.inputs["x"].shape, batch.targets["target"].shape
((4, 64), (4,))
"""

from __future__ import annotations

from ortrain._data_forms import FORMS
from ortrain.data._file_source import FileSource
from ortrain.data._open import open  # noqa: A004  (the name that callers of a reader expect)
from ortrain.data._source import Batch, Source
from ortrain.data._subset import split

__all__ = ["FORMS", "Batch", "FileSource", "Source", "open", "split"]

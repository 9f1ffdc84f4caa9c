"""Quantize the weights of matrix products to four bits, with onnxruntime's tool: four_bits.py FOLDER.

Reads FOLDER/NAME.onnx. Writes FOLDER/four-bits/NAME-FORM.onnx for each form with operators of the model. The tool needs
onnx_ir, which this environment has for PyTorch's exporter.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantFormat
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

BLOCK = 16
# Keyword arguments of the tool.
FORMS: dict[str, dict[str, Any]] = {
    "QOperator": {"quant_format": QuantFormat.QOperator, "is_symmetric": False},
    "QOperator symmetric": {"quant_format": QuantFormat.QOperator, "is_symmetric": True},
    "QDQ": {"quant_format": QuantFormat.QDQ, "is_symmetric": False},
    "QOperator with rows": {
        "quant_format": QuantFormat.QOperator,
        "op_types_to_quantize": ("MatMul", "Gather"),
        "quant_axes": (("MatMul", 0), ("Gather", 1)),
    },
}


def main() -> None:
    logging.disable(logging.WARNING)
    folder = Path(sys.argv[1])
    results = folder / "four-bits"
    results.mkdir()
    for path in sorted(folder.glob("*.onnx")):
        for form, arguments in FORMS.items():
            wanted = set(arguments.get("op_types_to_quantize", ["MatMul"]))
            if not wanted <= {node.op_type for node in onnx.load(path).graph.node}:
                continue
            quantizer = MatMulNBitsQuantizer(onnx.load(path), bits=4, block_size=BLOCK, **arguments)
            quantizer.process()
            onnx.save(quantizer.model.model, results / f"{path.stem}-{form}.onnx")
    print("done")


if __name__ == "__main__":
    main()

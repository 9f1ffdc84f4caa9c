"""Kernels of products on the device "cuda": dumps and profiles name the library, or the printed kernels."""

from __future__ import annotations

from pathlib import Path

from test_cuda_memory import run_on_cuda

import ortrain

ROWS = 3200


def test_dumps_name_the_library(tmp_path: Path) -> None:
    run_on_cuda(
        f"""
text = ortrain.dump(ortrain.examples.perceptron(), "kernels", {{"x": [{ROWS}, 64]}}, device="cuda")
assert text.count("cuBLASLt: ") == 1 and "cuBLASLt: {ROWS}x96x64, then a map; printed: " in text, text[-300:]
small = ortrain.dump(ortrain.examples.perceptron(), "kernels", {{"x": [4, 64]}}, device="cuda")
assert "cuBLASLt: " not in small
""",
        tmp_path,
    )


def test_dumps_without_a_device_name_the_rule() -> None:
    text = ortrain.dump(ortrain.examples.perceptron(), "kernels", {"x": [ROWS, 64]}, device="cuda")
    assert text.splitlines()[-1].endswith("that library computes products of at least 4194304 multiplications")


def test_profiles_name_the_kernels(tmp_path: Path) -> None:
    run_on_cuda(
        f"""
import json
x, labels = np.ones(({ROWS}, 64), np.float32), np.zeros({ROWS}, np.int64)
profile = module.profile(x, labels, steps=1, warmup=0)
products = {{one.kernel.split(":")[0] for one in profile.instructions if one.kind == "MatMul"}}
assert products == {{"cuBLASLt", "printed"}}, products
assert "  | cuBLASLt: " in profile.table() and "cuBLASLt" in profile._repr_html_()
profile.chrome_trace("trace.json")
events = json.loads(open("trace.json").read())["traceEvents"]
assert any(event.get("args", {{}}).get("kernel", "").startswith("cuBLASLt") for event in events)
options = ortrain.SessionOptions()
options.enable_profiling = True
session = ortrain.InferenceSession(ortrain.examples.perceptron(), options, providers=["CUDAExecutionProvider"])
session.run(None, {{"x": x}})
assert '"kernel":"cuBLASLt' in open(session.end_profiling()).read()
""",
        tmp_path,
    )

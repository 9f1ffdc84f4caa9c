"""Pickles of legacy checkpoints: harmful pickles are rejected, and arrays of other pickles own their memory."""

from __future__ import annotations

import collections
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pickle_grammar
import pytest

from ortrain import _unpickler
from ortrain.errors import InvalidArgumentError

# A few seconds of pickles; `tests/conform/test_pickles.py` reads many more.
GENERATED, DAMAGED, SEED = 1500, 4000, 52
# Limit in processor seconds for a pickle of 5 MB. A reader with quadratic time needs minutes.
PATIENCE = 60


@pytest.mark.parametrize("case", pickle_grammar.HARMFUL)
def test_harmful_pickles(case: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidArgumentError, match="user_dict is damaged"):
        _unpickler.loads(pickle_grammar.HARMFUL[case])
    assert time.process_time() - begin < PATIENCE


def test_generated_and_damaged_pickles() -> None:
    """Generated and damaged pickles are read in a process with little memory."""
    script = Path(pickle_grammar.__file__)
    arguments = [f"--seed={SEED}", f"--generated={GENERATED}", f"--damaged={DAMAGED}"]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    words = done.stdout.split()
    read_generated, read_damaged = int(words[3]), int(words[8])
    assert read_generated > GENERATED / 10, "a share of the generated pickles is valid"
    assert read_damaged > DAMAGED / 100


def test_the_check_finds_arrays_of_others() -> None:
    """The ownership check rejects an array that borrows memory, and a field outside of its array."""
    with pytest.raises(AssertionError):
        pickle_grammar.check_owned(np.frombuffer(bytes(8), "f8"))
    assert pickle_grammar.read(pickle.dumps([np.arange(3), np.float32(1)]))


USUAL: dict[str, Any] = {
    "a vocabulary": {f"word {number}": number for number in range(50_000)},
    "a vocabulary by number": {number: f"word {number}" for number in range(200_000)},
    "merges of texts": {(f"a{number}", f"b{number % 97}"): number for number in range(50_000)},
    "a grid": {(x, y): x * y for x in range(60) for y in range(60)},
    "large numbers": {number * 0x9E3779B97F4A7C15 % 2**64: None for number in range(5000)},
    "a set of pairs": {(1, "a"), (2, "b"), (3, ("c", 4))},
    "counts of pairs": collections.Counter({(number, "x"): number for number in range(3000)}),
    "many deques": {f"metric {number}": collections.deque([1.5], 100) for number in range(2000)},
    "dicts of dicts": collections.defaultdict(dict, {"a": collections.defaultdict(list, b=[1])}),
    "numbers of NumPy": {np.int64(number): np.float32(number) for number in range(5000)},
    "histories": [[float(number), (number, "x"), {"loss": number / 7}] for number in range(20_000)],
}


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("case", USUAL)
def test_usual_values(case: str, protocol: int) -> None:
    value = USUAL[case]
    found = _unpickler.loads(pickle.dumps(value, protocol=protocol))
    assert type(found) is type(value)
    assert found == value


def test_parts_that_are_shared() -> None:
    """Shared tuples, lists and arrays stay the same objects."""
    array = np.arange(3)
    pair = (array, [array])
    ring: list[Any] = [pair]
    pair[1].append(ring)
    value = {"a": pair, "b": ((pair, 1), pair), "c": collections.deque([pair]), "d": ring}
    found = _unpickler.loads(pickle.dumps(value, protocol=4))
    assert found["a"] is found["b"][1] is found["b"][0][0] is found["c"][0] is found["d"][0]
    assert found["a"][0] is found["a"][1][0]
    assert found["a"][1][1] is found["d"]
    pickle_grammar.check_owned(found["a"][0])


def test_tuples_that_share_a_large_one() -> None:
    """The time to replace stand-ins is linear in the parts of tuples."""
    large = (np.zeros(1), *range(100_000))
    value = tuple([large] * 100_000)
    begin = time.process_time()
    found = _unpickler.loads(pickle.dumps(value, protocol=4))
    assert time.process_time() - begin < PATIENCE
    assert len({id(part) for part in found}) == 1

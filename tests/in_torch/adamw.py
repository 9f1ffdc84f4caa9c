"""Losses of ten steps of torch.optim.AdamW with its defaults, for the network of tests/conform/test_torch_adamw.py.

``adamw.py RECORD.npz``: the file has ``w``, ``v``, ``x`` and ``target``; the last output line has the losses as JSON.
"""

import json
import sys

import numpy as np
import torch

STEPS, RATE = 10, 0.01

record = {name: torch.from_numpy(value) for name, value in np.load(sys.argv[1]).items()}
w, v = (torch.nn.Parameter(record[name]) for name in ("w", "v"))
optimizer = torch.optim.AdamW([w, v], lr=RATE)
losses = []
for _ in range(STEPS):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(torch.tanh(record["x"] @ w) @ v, record["target"])
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
print(json.dumps(losses))

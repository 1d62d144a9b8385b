"""The model and the data of the example."""

import torch
from sklearn.datasets import load_digits
from torch import nn

NUM_CLIENTS = 5


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def local_digits(client, examples=8):
    """Return inputs, `example 1 8 8` in [0, 1], and labels of a client, counted from 1."""
    digits = load_digits()
    chosen = slice((client - 1) * examples, client * examples)
    inputs = torch.tensor(digits.images[chosen], dtype=torch.float32)[:, None] / 16
    return inputs, torch.tensor(digits.target[chosen])

"""The model and the data of an ordinary Flower app."""

import torch
from sklearn.datasets import load_digits
from torch import nn


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_partition(partition_id, num_partitions):
    """Eight images, 1 x 8 x 8 with values in [0, 1], a client."""
    digits = load_digits()
    mine = range(partition_id, len(digits.target), num_partitions)[:8]
    images = torch.tensor(digits.images[list(mine)], dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(digits.target[list(mine)])


def train(model, images, labels, learning_rate, epochs=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()

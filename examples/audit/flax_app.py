"""Audit an app that trains a Flax model with JAX: pip install jax flax optax; python flax_app.py

Its clients send the leaves of a tree of parameters: a layer's bias, then its kernel, which has its inputs first. The
attack file says so, a PyTorch twin stands for the model, and the attack gives every image back exactly.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from together import audited

import fedsim

DIGITS = load_digits()
app = ClientApp(mods=[fedsim.partition_mod])


class Mlp(nn.Module):
    """200 hidden units."""

    @nn.compact
    def __call__(self, inputs):
        hidden = nn.relu(nn.Dense(200)(inputs))
        return nn.Dense(10)(hidden)


def load_data(client):
    """Eight images a client, values in [0, 1], and their labels."""
    mine = slice(8 * client, 8 * (client + 1))
    return DIGITS.data[mine].astype(np.float32) / 16, DIGITS.target[mine]


FRESH = Mlp().init(jax.random.PRNGKey(0), load_data(0)[0])
LEAVES, TREE = jax.tree_util.tree_flatten(FRESH)


@jax.jit
def step(parameters, inputs, labels):
    """One step of gradient descent."""

    def loss(parameters):
        return optax.softmax_cross_entropy_with_integer_labels(Mlp().apply(parameters, inputs), labels).mean()

    return jax.tree_util.tree_map(lambda p, slope: p - 0.05 * slope, parameters, jax.grad(loss)(parameters))


@app.train()
def train(message, context):
    parameters = jax.tree_util.tree_unflatten(TREE, message.content["arrays"].to_numpy_ndarrays())
    inputs, labels = load_data(context.node_config["partition-id"])
    for _ in range(5):
        parameters = step(parameters, inputs, labels)
    arrays = ArrayRecord([np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(parameters)])
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def twin():
    """The same network in PyTorch."""
    layers = torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


ATTACK = """
[adversary.knowledge]
model = "flax_app:twin"
input_shape = [64]
value_range = [0.0, 1.0]
num_classes = 10

[app]
names = ["1.bias", "1.weight", "3.bias", "3.weight"] # as JAX orders the leaves of the tree
transposed = true

[[attack]]
name = "spear-ica"
"""

if __name__ == "__main__":
    start = ArrayRecord([np.asarray(leaf) for leaf in LEAVES])
    audited(app, FedAvg(fraction_evaluate=0.0), start, ATTACK, load_data)

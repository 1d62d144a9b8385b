"""Audit an app that trains scikit-learn's MLPClassifier: python sklearn_app.py

Its clients send `coefs_` and `intercepts_`, arrays without names whose weights have their inputs first. A PyTorch twin
and three lines in the attack file are all that fedsim needs; the attack then gives every image back exactly.
"""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from together import audited
from torch import nn

import fedsim

DIGITS = load_digits()
app = ClientApp(mods=[fedsim.partition_mod])


def load_data(client):
    """Eight images a client, values in [0, 1], and their labels."""
    mine = slice(8 * client, 8 * (client + 1))
    return DIGITS.data[mine] / 16, DIGITS.target[mine]


def model_with(arrays):
    """A classifier with these weights; the first call of `partial_fit` makes room for them."""
    model = MLPClassifier((200,), solver="sgd", learning_rate_init=0.05, momentum=0, batch_size=8, random_state=0)
    model.partial_fit(*load_data(0), classes=range(10))
    if arrays:
        model.coefs_, model.intercepts_ = arrays[:2], arrays[2:]
    return model


@app.train()
def train(message, context):
    model = model_with(message.content["arrays"].to_numpy_ndarrays())
    inputs, labels = load_data(context.node_config["partition-id"])
    for _ in range(5):
        model.partial_fit(inputs, labels)
    metrics = MetricRecord({"num-examples": len(labels), "train_loss": model.loss_})
    arrays = ArrayRecord([np.asarray(array) for array in (*model.coefs_, *model.intercepts_)])
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def twin():
    """The same network in PyTorch."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10)).double()


ATTACK = """
[adversary.knowledge]
model = "sklearn_app:twin"
input_shape = [64]
value_range = [0.0, 1.0]
num_classes = 10

[app]
names = ["1.weight", "3.weight", "1.bias", "3.bias"] # coefs_, then intercepts_
transposed = true

[[attack]]
name = "spear-ica"
"""

if __name__ == "__main__":
    fresh = model_with(None)
    start = ArrayRecord([np.asarray(array) for array in (*fresh.coefs_, *fresh.intercepts_)])
    audited(app, FedAvg(fraction_evaluate=0.0), start, ATTACK, load_data)

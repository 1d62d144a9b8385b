"""Small Flower apps in folders, as `flwr run` takes them."""

from __future__ import annotations

from pathlib import Path

PROJECT = """
[project]
name = "small-app"
[tool.flwr.app.components]
serverapp = "small_server:app"
clientapp = "small_client:app"
[tool.flwr.app.config]
num-server-rounds = 1
lr = 0.05
evaluate = 0.0
"""
TASK = """
import torch
from sklearn.datasets import load_digits
from torch import nn

def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 10))

def load_partition(number):
    digits = load_digits()
    rows = slice(6 * number, 6 * number + 6)
    return torch.tensor(digits.images[rows], dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target[rows])
"""
CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from small_task import load_partition, make_model

app = ClientApp()

@app.train()
def train(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_partition(context.node_config["partition-id"])
    config = message.content["config"]
    config["lr"] = config["lr"] * 2  # a client may do what it likes with what it was sent
    for _ in range(4):
        rows = torch.randperm(6)
        loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= context.run_config["lr"] * parameter.grad
    metrics = MetricRecord({"num-examples": 6, "train_loss": loss.item(), "lr": config["lr"]})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

@app.evaluate()
def evaluate(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = load_partition(context.node_config["partition-id"])
    accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
    return Message(RecordDict({"m": MetricRecord({"num-examples": 6, "accuracy": accuracy})}), reply_to=message)
"""
SERVER = """
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from small_task import make_model

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=config["evaluate"], min_evaluate_nodes=1)
    arrays = ArrayRecord(make_model().state_dict())
    strategy.start(grid, arrays, config["num-server-rounds"], train_config=ConfigRecord({"lr": config["lr"]}))
"""
ATTACK = """
[federation]
clients = 3
[adversary]
victims = "all"
workers = 1
[adversary.knowledge]
model = "small_task:make_model"
input_shape = [1, 8, 8]
value_range = [0.0, 1.0]
num_classes = 10
[[attack]]
name = "spear-ica"
"""


def write_app(folder: Path, **files: str) -> Path:
    """Write a small app of digits and an MLP; `files` replace those of the same name, without `.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"small_task": TASK, "small_client": CLIENT, "small_server": SERVER} | files
    (folder / "pyproject.toml").write_text(sources.pop("pyproject", PROJECT))
    (folder / "attack.toml").write_text(sources.pop("attack", ATTACK))
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(text)
    return folder

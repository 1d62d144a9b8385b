"""Stock Flower on its own simulation engine: one message a client, Ray actors, nothing tuned."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from frameworks.jobs import ACTORS, BATCH, JOBS, LEARNING_RATE, Task
from frameworks.strategy import latest_state, watch_fedavg

client_app = ClientApp()


@cache
def _make_job(job: str, clients: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Make the network and the data once in each actor."""
    torch.set_num_threads(1)
    return JOBS[job].network(), *JOBS[job].data(clients)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's data."""
    config, client = message.content.config_records["config"], int(context.node_config["partition-id"])
    network, inputs, labels = _make_job(str(config["job"]), int(context.node_config["num-partitions"]))
    network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    for batch, targets in zip(inputs[client].split(BATCH), labels[client].split(BATCH), strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(network(batch), targets)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": labels.shape[1], "train_loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


def run(task: Task) -> Mapping[str, Tensor]:
    """Return the final global model."""
    server_app = ServerApp()
    watch_fedavg()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        # The nodes appear one by one, and the first round would take a fraction of those that it sees.
        everybody = {"min_train_nodes": task.clients, "min_available_nodes": task.clients}
        strategy = FedAvg(fraction_evaluate=0.0, **everybody)
        config = ConfigRecord({"job": task.job})
        arrays = ArrayRecord(task.work.network().state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=task.rounds, train_config=config)

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=task.clients,
        backend_config={"init_args": {"num_cpus": ACTORS}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return latest_state()

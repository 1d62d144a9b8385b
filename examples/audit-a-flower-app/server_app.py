"""The server side of an ordinary Flower app, with one line added: the strategy is wrapped."""

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from task import make_model

from fedsim import Curious

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy = Curious(strategy, context.run_config["recording"])  # the audit: this line, nothing else
    torch.manual_seed(0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"learning-rate": context.run_config["learning-rate"]}),
    )

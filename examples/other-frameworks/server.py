"""A federation of NVFlare whose server writes down what it sends and gets.

python server.py                        # writes the folder exchange
fedsim import exchange recording
python write_truth.py                   # for the scores
fedsim attack recording attack.toml
"""

import sys
from pathlib import Path

from exchange_writer import ExchangeWriter
from network import NUM_CLIENTS, make_model
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner


class RecordedFedAvg(FedAvg):
    """FedAvg that writes each message down before anything else is done with it."""

    def __init__(self, exchange, num_clients, num_rounds):
        # NVFlare writes a job as the arguments that are attributes, too.
        super().__init__(num_clients=num_clients, num_rounds=num_rounds, persistor_id="")
        self.exchange = exchange

    def load_model(self):
        """Return the model that the first round begins with."""
        weights = {name: tensor.numpy() for name, tensor in make_model().state_dict().items()}
        return FLModel(params=weights)

    def send_model(self, *, data, callback, **kwargs):
        """Send a model as FedAvg does."""
        writer = ExchangeWriter(self.exchange)
        round = data.current_round + 1  # NVFlare counts from 0
        writer.write_broadcast(round, data.params)

        def write_reply(result):
            # Clients say who they are: the names that a simulator gives them were once exchanged.
            writer.write_reply(round, result.meta["client"], result.params, result.meta["NUM_STEPS_CURRENT_ROUND"])
            return callback(result)

        return super().send_model(data=data, callback=write_reply, **kwargs)


def main():
    exchange = Path(sys.argv[1] if len(sys.argv) > 1 else "exchange").resolve()
    job = FedJob(name="digits", min_clients=NUM_CLIENTS)
    job.to_server(RecordedFedAvg(str(exchange), num_clients=NUM_CLIENTS, num_rounds=1))
    for client in range(1, NUM_CLIENTS + 1):
        job.to(ScriptRunner(script="client.py", script_args=str(client)), f"site-{client}")
    job.simulator_run("workspace")


if __name__ == "__main__":
    main()

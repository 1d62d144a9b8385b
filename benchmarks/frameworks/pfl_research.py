"""pfl-research: FederatedAveraging on a SimulatedBackend, one process.

As its documentation and benchmarks have it: tensors in PyTorchTensorDataset, which keeps the batches
of a client; made once for each client; MinimizeReuseUserSampler; the device named, so that it is
not looked for at each batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from frameworks.clock import CLOCK
from frameworks.jobs import BATCH, LEARNING_RATE, Task


class Network(nn.Module):
    """The job's network with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return what is minimised; the network is in training mode from the start."""
        return cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return nothing: evaluation is off."""
        return {}


class Timer(TrainingProcessCallback):  # type: ignore[type-arg]
    """Tells the clock when the model has been updated."""

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """See TrainingProcessCallback."""
        CLOCK.round_over()
        return False, Metrics()


def run(task: Task) -> Mapping[str, Tensor]:
    """Return the final global model."""
    np.random.seed(0)  # noqa: NPY002
    pairs = zip(*task.work.data(task.clients), strict=True)
    clients = [PyTorchTensorDataset(pair, user_id=str(k)) for k, pair in enumerate(pairs)]
    sampler = get_user_sampler("minimize_reuse", range(task.clients))
    dataset = FederatedDataset(clients.__getitem__, sampler)
    network = Network(task.work.network())
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,  # after round 1 only
            train_cohort_size=task.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LEARNING_RATE
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Timer()],
        send_metrics_to_platform=False,
    )
    return network.network.state_dict()

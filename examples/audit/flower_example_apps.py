"""Flower's own apps, and how `flower_examples.py` runs and attacks each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from flower_example_data import CLIENTS, HELD, TRAINED_ON


@dataclass(frozen=True)
class App:
    """How an example is run and attacked.

    Attributes:
        package: where its code is.
        shape: of an input.
        ends: lowest and highest value of an input.
        classes: how many.
        model: what builds the network; by default the app's `Net`.
        settings: of its run_config, beside two rounds of one local epoch.
        knowledge: lines of [adversary.knowledge] beside the model, its inputs and classes.
        app: lines of [app].
        attack: lines of [[attack]].
        code: a module `said_by_auditor`, for what only the auditor knows.
        folder: of Flower's repository, that the app is in.
        clients: how many.
        loader: the function of the app's `task` that loads what a client holds; empty for a baseline's
            own, `unknown` where nobody can say.
        adversary: lines of [adversary].
        refused: why no attack is made of what is recorded; empty where one is.
    """

    package: str
    shape: tuple[int, ...] = (3, 32, 32)
    ends: tuple[float, float] = (-1.0, 1.0)
    classes: int = 10
    model: str = "task:Net"
    settings: dict[str, Any] = field(default_factory=dict)
    knowledge: str = ""
    app: str = ""
    attack: str = 'name = "inverting-gradients"\niterations = 1000\nstep_size = 0.1\nsigned = true'
    code: str = ""
    folder: str = "examples"
    clients: int = CLIENTS
    loader: str = "load_data"
    adversary: str = ""
    refused: str = ""

    def describe_attack(self) -> str:
        """Return the attack file, without what clients held."""
        model = self.model if self.model.startswith("said") else f"{self.package}.{self.model}"
        knowledge = [
            f"model = {json.dumps(model) if self.model else 'false'}",
            f"input_shape = {list(self.shape)}",
            f"value_range = {list(self.ends)}",
            *([f"num_classes = {self.classes}"] if self.classes else []),
            self.knowledge,
        ]
        tables = {
            "[adversary]": self.adversary,
            "[adversary.knowledge]": "\n".join(knowledge),
            "[app]": self.app,
            "[[attack]]": self.attack,
        }
        return "\n".join(f"{title}\n{lines}" for title, lines in tables.items())


MNIST = (-0.1307 / 0.3081, (1 - 0.1307) / 0.3081)
PROBABILITY = "import torch\n\ndef logit(probability, inputs):\n    return torch.logit(probability, 1e-6)\n"
VAE = """
    import torch

    def loss_of_each(returned, inputs):
        images, mean, logvar = returned
        far = (images - inputs).square().flatten(1).mean(1)
        return (far - 0.025 * (1 + logvar - mean.pow(2) - logvar.exp()).mean(1))[:, None]

    def loss(outputs, labels):
        return outputs.mean()
"""
TWIN = """
    from torch import nn

    def make():
        return nn.Linear(4, 3).double()
"""
MEAN_SQUARE = """
    from pytorchlightning_example.task import LitAutoEncoder

    class Decoded(LitAutoEncoder):
        def forward(self, images):
            flat = images.flatten(1)
            return (self.decoder(self.encoder(flat)) - flat).square().mean(1, keepdim=True)

    def loss(outputs, labels):
        return outputs.mean()
"""
CHANNELS_LAST = """
    from torch import nn

    class Rows(nn.Module):  # flattens as frameworks do that have their channels last
        def forward(self, images):
            return images.permute(0, 2, 3, 1).flatten(1)

    def keras():
        features = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*features, Rows(), nn.Dropout(), nn.Linear(2304, 10))

    def flax():
        layers = []
        for inputs, outputs in ((1, 6), (6, 16)):
            layers += [nn.Conv2d(inputs, outputs, 5, padding="same"), nn.ReLU(), nn.AvgPool2d(2)]
        layers += [Rows(), nn.Linear(784, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
        return nn.Sequential(*layers)
"""
BIAS_FIRST = [f"{layer}.{kind}" for layer in (0, 3, 7, 9, 11) for kind in ("bias", "weight")]
LOGISTIC = """
    from torch import nn

    def logistic():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""
PERCEPTRON = """
    from torch import nn

    def perceptron():
        hidden = nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
"""
TRANSFORMER = """
    import torch
    from torchvision.models import VisionTransformer

    def transformer():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sizes = {"patch_size": 56, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 32}
            network = VisionTransformer(image_size=224, **sizes)
        network.heads[-1] = torch.nn.Linear(32, 102)
        network.requires_grad_(False)
        network.heads.requires_grad_(True)
        return network
"""
SPLIT = """
    from fedrep.models import CNNCifar10, CNNCifar10ModelSplit

    def split():
        return CNNCifar10ModelSplit(CNNCifar10())
"""
BODY = [f"_body.{layer}.{kind}" for layer in (0, 1, 4, 5, 9, 11) for kind in ("weight", "bias")]
for _layer in (5, 1):  # in the order in which a state_dict has them
    _place = BODY.index(f"_body.{_layer}.bias") + 1
    BODY[_place:_place] = [f"_body.{_layer}.{kind}" for kind in ("running_mean", "running_var", "num_batches_tracked")]
SHARED = [
    f"{layer}.{kind}" for layer in ("conv1", "conv2", "conv3", "fc1", "fc2", "fc3") for kind in ("weight", "bias")
]
"""What FedBN sends: all but what normalises."""
TREES: dict[str, Any] = {
    "shape": (28,),
    "ends": (-4.0, 4.0),
    "classes": 2,
    "model": "",
    "settings": {"fraction-train": 1.0, "fraction-evaluate": 1.0, "params.nthread": 1},
    "knowledge": f"columns = {[1] * 28}",
    "attack": 'name = "timberstrike"',
    "loader": "rows",
    "adversary": 'rounds = "all"',
}
APPS = {
    "quickstart-pytorch": App("pytorchexample"),
    "advanced-pytorch": App("pytorch_example", (1, 28, 28), MNIST, settings={"fraction-train": 1.0}),
    "opacus": App("opacus_fl", app="defended = true"),
    "custom-mods": App("custom_mods"),
    "federated-vae": App(
        "fedvaeexample",
        classes=0,
        knowledge='loss = "said_by_auditor:loss"\nlabels = true',
        app='outputs = "said_by_auditor:loss_of_each"',
        code=VAE,
    ),
    "fl-tabular": App(
        "fltabular",
        (14,),
        (-4.0, 4.0),
        2,
        "task:IncomeClassifier",
        knowledge='loss = "bce"\nlabels = true',
        app=f'outputs = "said_by_auditor:logit"\nnum_examples = {TRAINED_ON}',
        code=PROBABILITY,
    ),
    "quickstart-sklearn": App("sklearnexample", (4,), (-4.0, 4.0), 3, "said_by_auditor:make", code=TWIN),
    "quickstart-pytorch-lightning": App(
        "pytorchlightning_example",
        (1, 28, 28),
        (0.0, 1.0),
        0,
        "said_by_auditor:Decoded",
        knowledge='loss = "said_by_auditor:loss"\nlabels = true',
        code=MEAN_SQUARE,
    ),
    "quickstart-tensorflow": App(
        "tfexample", ends=(0.0, 1.0), model="said_by_auditor:keras", app="transposed = true", code=CHANNELS_LAST
    ),
    "quickstart-jax": App(
        "jaxexample",
        (1, 28, 28),
        (0.0, 1.0),
        model="said_by_auditor:flax",
        settings={"batch-size": TRAINED_ON, "fraction-evaluate": 0.0},
        app=f"transposed = true\nnames = {BIAS_FIRST}",
        code=CHANNELS_LAST,
    ),
    # Its images are vectors, and its clients keep their accuracy to themselves.
    "quickstart-mlx": App(
        "mlxexample",
        (1, 28, 28),
        (0.0, 1.0),
        model="said_by_auditor:perceptron",
        settings={"fraction-evaluate": 0.0},
        app="names = ['1.weight', '1.bias', '3.weight', '3.bias', '5.weight', '5.bias']",
        code=PERCEPTRON,
    ),
    # It crops images at random, so that only their labels are known.
    "flowertune-vit": App(
        "vitexample",
        (3, 224, 224),
        ((0 - 0.485) / 0.229, (1 - 0.406) / 0.225),
        102,
        "said_by_auditor:transformer",
        app='module = "heads"\nfrozen = true',
        attack='name = "label-counts"',
        code=TRANSFORMER,
        loader="get_dataset_partition",
    ),
    "flower-secure-aggregation": App("secaggexample", settings={"is-demo": False}, app="defended = true"),
    "fl-dp-sa": App("fl_dp_sa", (1, 28, 28), settings={"num-sampled-clients": 5 * CLIENTS}),
    "flower-simulation-step-by-step-pytorch/my-awesome-app": App(
        "my_awesome_app", (1, 28, 28), settings={"fraction-fit": 1.0}
    ),
    "supernode-authentication": App("authexample", loader="load_data_from_disk"),
    "embedded-devices": App("embeddedexample", (1, 28, 28), loader="load_data_from_disk"),
    "quickstart-numpy": App(
        "quickstart_numpy", refused="its clients hold no data; they add random numbers to one weight"
    ),
    "quickstart-pandas": App("pandas_example", refused="it trains nothing; `inspect` names the histograms in clear"),
    "federated-kaplan-meier-fitter": App(
        "examplefkm", clients=2, refused="it trains nothing; clients send times and events of each patient in clear"
    ),
    "quickstart-xgboost": App("quickstart_xgboost", **TREES),
    "xgboost-comprehensive": App("xgboost_comprehensive", **TREES),
    "quickstart-catboost": App("quickstart_catboost", refused="no attack reads trees of CatBoost, which are no arrays"),
    "quickstart-pennylane": App(
        "quickstart_pennylane",
        model="task:QuantumNet",
        attack='name = "inverting-gradients"\niterations = 100\nstep_size = 0.1\nsigned = true',
    ),
    "quickstart-fastai": App(
        "fastai_example",
        (3, 224, 224),
        (0.0, 1.0),
        1000,
        "said_by_auditor:squeezenet",
        settings={"fraction-train": 1.0},
        clients=2,
        attack='name = "inverting-gradients"\niterations = 10\nstep_size = 0.1\nsigned = true',
        code="from torchvision.models import squeezenet1_1\n\ndef squeezenet():\n    return squeezenet1_1()\n",
    ),
    "quickstart-huggingface": App(
        "huggingface_example",
        model="",
        settings={"model-name": "made", "fraction-train": 1.0},
        refused="its network takes several tensors (tokens, masks) and returns an object; no attack here feeds it",
    ),
    "federated-analytics": App(
        "federated_analytics", refused="it trains nothing; `inspect` names the sums and counts in clear"
    ),
    "fedbn": App(
        "fedbn",
        (3, 28, 28),
        model="model:CNNModel",
        settings={"to-include": "MNIST", "num-clients": 2},
        clients=2,
        app=f"names = {SHARED}\nprivate = ['bn1', 'bn2', 'bn3', 'bn4', 'bn5']\nnum_examples = {HELD}",
        attack='name = "label-counts"',
        folder="baselines",
        loader="unknown",  # it draws anew in each round what a client holds
    ),
    # Its parties have embeddings of all rows in each step, and get gradients in messages of their own.
    "vertical-fl": App(
        "vertical_fl",
        (2,),
        classes=2,
        model="",
        clients=3,
        loader="survived",
        adversary='who = "feature-party"\nrounds = "all"',
        knowledge="num_examples = false",
        app='messages = "query.generate_embeddings"\nrecord = "arrays"\n'
        'broadcast_messages = "train.apply_gradients"\nbroadcast_record = "gradients"',
        attack='name = "label-direction"\nrarer_label = 0',
    ),
    "fedprox": App(
        "fedprox",
        (1, 28, 28),
        MNIST,
        model="said_by_auditor:logistic",
        settings={
            "algorithm.num-server-rounds": 2,
            "algorithm.local-epochs": 1,
            "algorithm.fraction-fit": 1.0,
            "algorithm.min-available-clients": CLIENTS,
            "algorithm.num-clients": CLIENTS,
            "dataset.val-ratio": 0.2,
        },
        app=f"num_examples = {TRAINED_ON}",
        code=LOGISTIC,
        folder="baselines",
        loader="",
    ),
    "fedrep": App(
        "fedrep",
        model="said_by_auditor:split",
        settings={"fraction-fit": 1.0, "num-local-epochs": 1, "dataset-split-fraction": 0.8},
        app=f"names = {[*BODY, '', '']}\nprivate = ['_head']",
        code=SPLIT,
        folder="baselines",
        loader="",
    ),
    "floco": App(
        "floco",
        model="said_by_auditor:net",
        settings={"fraction-fit": 1.0},
        code="from floco.model import Net\n\ndef net():\n    return Net(0)\n",
        folder="baselines",
        loader="",
    ),
}
"""By the name of their folder."""

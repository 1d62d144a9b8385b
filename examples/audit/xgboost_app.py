"""Audit an app that trains trees by XGBoost: python xgboost_app.py [bagging | cyclic]

Its messages are JSON, in which thresholds, covers and leaf values are in clear; `fedsim inspect` says what follows
from them at once. The attack then claims records that fit all trees, first of a server that knows nothing but the
columns' ranges, then of one that has records of other people. It needs XGBoost (`pip install "fedsim-curious[trees]"`).
"""

import sys

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic
from sklearn.datasets import load_breast_cancer
from together import CLIENTS, audited

import fedsim

try:
    import xgboost
except ImportError:
    sys.exit('xgboost_app.py trains trees with XGBoost; pip install "fedsim-curious[trees]"')

PATIENTS = load_breast_cancer()
INPUTS, LABELS = PATIENTS.data.astype(np.float32), PATIENTS.target
RANGE = INPUTS.min(0).tolist(), INPUTS.max(0).tolist()
EACH, ROUNDS = 80, 9
PARAMETERS = {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3, "nthread": 1}
METHOD = sys.argv[1] if len(sys.argv) > 1 else "bagging"
app = ClientApp(mods=[fedsim.partition_mod])


def load_data(client):
    """The patients of a client, or those that no client has."""
    mine = slice(EACH * client, EACH * (client + 1))
    return INPUTS[mine], LABELS[mine]


@app.train()
def train(message, context):
    inputs, labels = load_data(context.node_config["partition-id"])
    matrix = xgboost.DMatrix(inputs, label=labels)
    sent = message.content["arrays"]["0"].numpy().tobytes()
    if not sent:
        model = xgboost.train(PARAMETERS, matrix, num_boost_round=1)
    else:
        model = xgboost.Booster(PARAMETERS)
        model.load_model(bytearray(sent))
        model.update(matrix, model.num_boosted_rounds())
        if METHOD == "bagging":
            model = model[model.num_boosted_rounds() - 1 :]
    content = np.frombuffer(model.save_raw("json"), np.uint8)
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord([content]), "metrics": metrics}), reply_to=message)


def attack_file(auxiliary):
    return f"""
[adversary]
rounds = "all"

[adversary.knowledge]
model = false
input_shape = [{INPUTS.shape[1]}]
columns = {[1] * INPUTS.shape[1]}
value_range = [{RANGE[0]}, {RANGE[1]}]
num_classes = 2
auxiliary = {auxiliary}

[[attack]]
name = "timberstrike"
"""


if __name__ == "__main__":
    strategy = FedXgbBagging if METHOD == "bagging" else FedXgbCyclic
    others = INPUTS[EACH * CLIENTS :], LABELS[EACH * CLIENTS :]
    nothing = ArrayRecord([np.frombuffer(b"", np.uint8)])
    for auxiliary in ("false", "true"):
        print(f"\n{METHOD}, auxiliary records: {auxiliary}")
        text = attack_file(auxiliary)
        audited(app, strategy(fraction_evaluate=0.0), nothing, text, load_data, ROUNDS, others, RANGE)

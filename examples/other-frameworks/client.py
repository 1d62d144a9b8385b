"""An NVFlare client: it trains a small network on its share of the digits, one epoch a round."""

import sys

import nvflare.client as flare
import torch
from network import local_digits, make_model
from torch import nn


def train(state, inputs, labels):
    """Train one epoch of batches of 8 and return the model."""
    model = make_model()
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch_inputs, batch_labels in zip(inputs.split(8), labels.split(8), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch_inputs), batch_labels).backward()
        optimizer.step()
    return model


def main():
    flare.init()
    client = int(sys.argv[1])
    inputs, labels = local_digits(client)
    while flare.is_running():
        message = flare.receive()
        if message is None:
            break
        model = train(message.params, inputs, labels)
        meta = {"NUM_STEPS_CURRENT_ROUND": len(labels), "client": client}  # NVFlare averages by the first
        flare.send(flare.FLModel(params=model.state_dict(), params_type=flare.ParamsType.FULL, meta=meta))


if __name__ == "__main__":
    main()

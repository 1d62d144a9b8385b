"""Audit an app that fine-tunes a transformer with LoRA: pip install transformers peft; python lora_app.py

The model is made on the spot, a tiny vision transformer with random weights, of which clients train and send the LoRA
matrices and the head alone. The server knows the rest, as it would know a public backbone, so the twin has it; the
attack file says that it is frozen, and how to make logits of what the model returns.
"""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from together import audited
from transformers import ViTConfig, ViTForImageClassification

import fedsim

DIGITS = load_digits()
app = ClientApp(mods=[fedsim.partition_mod])


def load_data(client):
    """Two images a client, values in [0, 1], and their labels."""
    mine = slice(2 * client, 2 * (client + 1))
    images = torch.tensor(DIGITS.images[mine], dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(DIGITS.target[mine])


def make():
    """The backbone, which everybody has, with LoRA and a new head."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, attn_implementation="eager", **size)
    lora = LoraConfig(
        r=8,
        target_modules=["q_proj", "v_proj", "query", "value"],
        modules_to_save=["classifier"],
        init_lora_weights=False,
    )
    return get_peft_model(ViTForImageClassification(config), lora).eval()


def sent_of(model):
    """What is trained, by its names in the model."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def logits(returned, inputs):
    """Of what a model of transformers returns."""
    return returned.logits


@app.train()
def train(message, context):
    model = make()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    inputs, labels = load_data(context.node_config["partition-id"])
    moving = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.nn.functional.cross_entropy(model(inputs).logits, labels).backward()
    moving.step()
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(sent_of(model)), "metrics": metrics}), reply_to=message)


ATTACK = """
[adversary.knowledge]
model = "lora_app:make"
input_shape = [1, 8, 8]
value_range = [0.0, 1.0]
num_classes = 10

[app]
frozen = true
outputs = "lora_app:logits"

[[attack]]
name = "inverting-gradients"
iterations = 1000
step_size = 0.1
signed = true
"""

if __name__ == "__main__":
    audited(app, FedAvg(fraction_evaluate=0.0), ArrayRecord(sent_of(make())), ATTACK, load_data)

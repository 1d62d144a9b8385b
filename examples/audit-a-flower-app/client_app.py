"""The client side of an ordinary Flower app; auditing its server changes nothing here."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import load_partition, make_model, train

app = ClientApp()


@app.train()
def fit(message, context):
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_partition(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(model, images, labels, message.content["config"]["learning-rate"])
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": len(labels), "train_loss": loss})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

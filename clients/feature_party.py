"""Feature party of split learning: it embeds its columns, and never sees a label."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedsim.base.errors import DataError
from fedsim.base.randomness import generator
from fedsim.recording.split_steps import ROWS, select_bottom

_LAST_ROWS = "last-rows"


def make_feature_party(
    build_bottom: Callable[[int], nn.Module],
    load_rows: Callable[[int], tuple[Tensor, Tensor]],
    *,
    learning_rate: float,
    embedding_noise: float = 0.0,
    seed: int = 0,
) -> ClientApp:
    """Return the app that plays every feature party of `strategies.split_learning.SplitLearning`.

    Args:
        build_bottom: builds the bottom model of a party, whose weights the server sends first. It runs
            in evaluation mode, without dropout, for it is run once for embeddings and once for their
            gradients, which have to be of the same function.
        load_rows: returns what a party holds: `row` ids, int64, and `row feature` inputs.
        learning_rate: step size of its SGD.
        embedding_noise: standard deviation of the Gaussian noise on each unit of what it sends.
        seed: of the noise.
    """
    app = ClientApp()

    @app.query("rows")
    def answer_rows(message: Message, context: Context) -> Message:
        party = int(context.node_config["partition-id"])
        ids, inputs = load_rows(party)
        _check_columns(party, ids, inputs)
        content = {"arrays": ArrayRecord({ROWS: Array(ids.numpy())}), "metrics": MetricRecord({"partition-id": party})}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        party = int(context.node_config["partition-id"])
        ids, inputs = load_rows(party)
        row_of_id = {row: index for index, row in enumerate(ids.tolist())}
        sent = message.content["arrays"]
        tensors = {name: torch.from_numpy(array.numpy().copy()) for name, array in sent.items()}  # type: ignore[union-attr]
        bottom = build_bottom(party).eval()
        bottom.load_state_dict(select_bottom(tensors) or context.state["model"].to_torch_state_dict())  # type: ignore[union-attr]

        # Take the step of the last rows.
        if "gradient" in tensors:
            last = context.state[_LAST_ROWS][ROWS].numpy()  # type: ignore[union-attr]
            weights = list(bottom.parameters())
            embeddings = bottom(inputs[[row_of_id[row] for row in last.tolist()]])
            gradients = torch.autograd.grad(embeddings, weights, tensors["gradient"])
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(learning_rate * gradient)

        # Embed the next ones.
        rows = tensors[ROWS]
        with torch.no_grad():
            embeddings = bottom(inputs[[row_of_id[row] for row in rows.tolist()]])
        number = int(message.content["config"]["server-round"])  # type: ignore[arg-type]
        rng = generator(seed, "split learning", "embedding noise", number, party)
        embeddings = embeddings + embedding_noise * torch.randn(embeddings.shape, generator=rng)
        context.state["model"] = ArrayRecord(bottom.state_dict())
        context.state[_LAST_ROWS] = ArrayRecord({ROWS: Array(rows.numpy())})
        arrays = ArrayRecord({"embedding": Array(np.ascontiguousarray(embeddings.numpy())), ROWS: Array(rows.numpy())})
        metrics = MetricRecord({"num-examples": len(rows), "partition-id": party})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def _check_columns(party: int, ids: Tensor, inputs: Tensor) -> None:
    """Raise DataError where not every row has its id and its columns, in finite numbers."""
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        given = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise DataError(
            f"party {party}: ids of rows are {given}, expected a tensor of whole numbers; number the rows, alike in "
            "all parties' tables"
        )
    if len(ids) != len(inputs):
        raise DataError(
            f"party {party}: holds {len(ids)} ids and the columns of {len(inputs)} rows; return one id for each row"
        )
    is_finite = torch.isfinite(inputs).flatten(1).all(1) if inputs.dim() > 1 else torch.isfinite(inputs)
    if not is_finite.all():
        row = int(ids[~is_finite][0])
        raise DataError(f"party {party}: row {row} holds NaN or infinite numbers; fill in what is missing")

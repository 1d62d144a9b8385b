"""Part of `fedsim inspect`: what each client's trees say in clear, without any attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedsim.base.errors import FedsimError, number_of, one_line
from fedsim.cli.options import console, new_table

if TYPE_CHECKING:
    from fedsim.recording.transcript import Transcript
    from fedsim.recording.tree_models import Tree
    from fedsim.recording.tree_sums import LeafCounts


@dataclass(kw_only=True)
class _TreesInClear:
    """Trees of one client in all rounds.

    Attributes:
        counts: of its first tree's leaves; empty where records had different predictions before.
        settings: of its training, as text; empty where they cannot be read.
        reason: why counts cannot be read; empty where they can.
    """

    trees: list[Tree] = field(default_factory=list)
    counts: Sequence[LeafCounts] = ()
    settings: str = ""
    reason: str = ""


def show_trees(transcript: Transcript) -> None:
    """Show what trees say in clear, where clients of the first round that can be read sent such."""
    if not _are_trees_recorded(transcript):
        return
    trees_by_client = _read_trees(transcript)
    table = new_table("client", "trees", "eta, lambda", "thresholds", "records", "label 1", "smallest leaf")
    table.title = "in the clear: trees"
    for client, client_trees in sorted(trees_by_client.items()):
        texts = str(client), str(len(client_trees.trees)), client_trees.settings or "-"
        table.add_row(*texts, *_describe_contents(client_trees))
    console.print(table)
    reasons = {client_trees.reason for client_trees in trees_by_client.values() if client_trees.reason}
    for reason in sorted(reasons):
        console.print(f"not read: {one_line(reason)}", soft_wrap=True, markup=False)
    console.print(
        "thresholds are values that a record of the client has, where trees are made from histograms (hist, the "
        "default) and no value is missing; records and labels are counted in each leaf of a client's first tree",
        soft_wrap=True,
        markup=False,
    )


def _are_trees_recorded(transcript: Transcript) -> bool:
    """Return whether clients send trees; the rounds that cannot be read have been told."""
    from fedsim.recording.tree_models import holds_trees

    for number in transcript.rounds:
        try:
            for client in transcript.clients(number):
                return holds_trees(transcript.recorded_update(number, client).after)
        except FedsimError:
            continue
    return False


def _read_trees(transcript: Transcript) -> dict[int, _TreesInClear]:
    """Read the trees of all clients, and count the records of each in its first tree."""
    from fedsim.recording.tree_models import parse_tree_state
    from fedsim.recording.tree_sums import count_leaves, fit_settings

    trees_by_client: dict[int, _TreesInClear] = {}
    for number in transcript.rounds:
        try:
            clients = transcript.clients(number)
        except FedsimError:  # which has been told
            continue
        for client in clients:
            is_first = client not in trees_by_client
            client_trees = trees_by_client.setdefault(client, _TreesInClear())
            where = f"round {number}, client {client}"
            try:
                update = transcript.recorded_update(number, client)
                before = parse_tree_state(update.before, f"{where}: what it was sent")
                model = parse_tree_state(update.after, where)
                if model is None:
                    continue
                new_trees = model.new_trees(before)
                client_trees.trees += new_trees
                if not is_first or not new_trees:
                    continue
                settings = fit_settings(new_trees, where)
                client_trees.settings = f"{settings.learning_rate:.3g}, {settings.l2_penalty:.3g}"
                if before is None or not before.trees:
                    client_trees.counts = count_leaves(new_trees[0], model, settings, where)
                    _check_counts(client_trees, update.num_examples, where)
            except FedsimError as error:
                client_trees.reason = client_trees.reason or str(error)
    return trees_by_client


def _check_counts(client_trees: _TreesInClear, num_examples: int, where: str) -> None:
    """Leave out counts that are not those of the records that the client reports."""
    num_counted = sum(count.records for count in client_trees.counts)
    if num_examples and num_counted != num_examples:
        client_trees.counts = ()
        client_trees.reason = (
            f"{where}: its first tree counts {num_counted} of N = {num_examples} records, so records have weights or "
            "are sampled (subsample)"
        )


def _describe_contents(client_trees: _TreesInClear) -> tuple[str, str, str, str]:
    """Return the cells of a client's row after its settings."""
    from fedsim.recording.tree_sums import find_thresholds

    thresholds = find_thresholds(client_trees.trees)
    num_thresholds = sum(map(len, thresholds.values()))
    texts = f"{num_thresholds} ({number_of(len(thresholds), 'feature')})"
    if not client_trees.counts:
        return texts, "-", "-", "-"
    records = sum(count.records for count in client_trees.counts)
    smallest = min(client_trees.counts, key=lambda count: count.records)
    if smallest.positives is None:
        return texts, str(records), "-", str(smallest.records)
    positives = sum(count.positives or 0 for count in client_trees.counts)
    return texts, str(records), str(positives), f"{smallest.records} ({smallest.positives} of label 1)"

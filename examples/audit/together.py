"""What the examples of this folder share: run an app over three clients in this process, audit it, print the scores."""

import tempfile
import tomllib
from pathlib import Path

import fedsim
from fedsim.federation.engines.serial import InProcessGrid

CLIENTS = 3


def audited(client_app, strategy, start, attack, load_data, rounds=2, public=None, value_range=(0.0, 1.0)):
    """Run rounds under a curious server, then the attacks on the first client.

    Args:
        attack: the text of the attack file.
        load_data: what a client holds, inputs and labels, which only the evaluator sees.
        public: inputs and labels that no client holds, for guesses, and for an adversary that is granted them.
        value_range: lowest and highest input.
    """
    with tempfile.TemporaryDirectory() as folder:
        recording, file = Path(folder) / "recording", Path(folder) / "attack.toml"
        fedsim.Curious(strategy, recording).start(InProcessGrid(client_app, CLIENTS), start, num_rounds=rounds)
        truth = fedsim.write_truth(
            Path(folder) / "truth", load_data, range(CLIENTS), value_range=value_range, public=public
        )
        table = "".join(f'{client} = "{path}"\n' for client, path in truth.items())
        file.write_text(f"{attack}\n[truth]\n{table}")
        run = fedsim.open(recording, file=file)
        for named in tomllib.loads(attack)["attack"]:
            run.attack(named.pop("name"), victim=0, **named)
        print(run.scores[["attack", "victim", "metric", "value", "floor"]].to_string(index=False))

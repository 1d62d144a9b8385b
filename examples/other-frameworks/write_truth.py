"""Write the data of each client for the evaluator; no attack sees them."""

from network import NUM_CLIENTS, local_digits

import fedsim

fedsim.write_truth("truth", local_digits, clients=range(1, NUM_CLIENTS + 1), value_range=(0.0, 1.0))

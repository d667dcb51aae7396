"""What every rank of a test imports, in the server process that ranks are forked from. Imported there alone: it sets the environment."""

import os

# Chosen when DeepSpeed is imported; ranks of tests are CPU processes, also on a machine with a GPU.
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  torch.optim imports it at its first use

import megamoe.testing.proof  # noqa: E402, F401

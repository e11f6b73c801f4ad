"""What all tests of models share."""

import torch

torch.set_num_threads(1)  # tiny products: a second thread waits more than it works

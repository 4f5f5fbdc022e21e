"""The optimizer inside an island, and the schedule of its learning rate.

`build` makes one `torch.optim.Optimizer` from the run's `[inner]`, for plain tensors and DTensors of any placement.
Its state is the island's own: no sync touches it.
"""

from island.optimizers.build import build as build
from island.optimizers.lamb import Lamb as Lamb
from island.optimizers.muon import Muon as Muon
from island.optimizers.schedules import learning_rate as learning_rate
from island.optimizers.schedules import set_rates as set_rates
from island.optimizers.schedules import shape as shape

"""A list of tensors that checkpoints store."""

import torch


class TensorList(list[torch.Tensor]):
    """A list of tensors of fixed shapes, for ``RunContext.checkpoint_state`` and ``ParallelContext.rank_state``."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {str(index): tensor for index, tensor in enumerate(self)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

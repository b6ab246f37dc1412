"""Unequal shares in a Lightning Trainer: a strategy that wraps the LightningModule in HeteroDDP."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ..data_parallel import HeteroDDP, HeteroLoader
from ..errors import UnsupportedEnvironmentError, UsageError

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise UnsupportedEnvironmentError(
        f"this needs lightning, which cannot be imported ({error}): pip install 'arachne-hetero[lightning]'"
    ) from error


class HeteroStrategy(DDPStrategy):
    """Lightning's DDP strategy, with unequal shares; ``train_dataloader()`` gives a HeteroLoader.

        trainer = lightning.Trainer(strategy=HeteroStrategy(), ...)

    Accumulation, clipping, precision and checkpoints are Lightning's; a checkpoint has the loader's place,
    so that training goes on at the exact sample. ``training_step`` returns the mean over its samples, as
    ever. Log with ``on_epoch=True, sync_dist=True, batch_size=``: what is logged by step is a mean over
    ranks. A rank that runs out of memory ends the training on all.

    Args:
        options: Of DDPStrategy: how processes start and find each other.

    Raises:
        UsageError: Options of DistributedDataParallel.

    """

    model: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        asked = [*self._ddp_kwargs, *(name for name in options if name in _OF_DDP)]
        if asked:
            raise UsageError(
                f"HeteroStrategy has no {asked[0]}, which is DistributedDataParallel's; leave it out"
            )

    def configure_ddp(self) -> None:
        """Wrap the module.

        Raises:
            UsageError: The module does its backward itself.

        """
        if not self.lightning_module.automatic_optimization:
            raise UsageError(
                "automatic_optimization is off: backwards inside training_step are not behind the forward "
                "that HeteroDDP waits for; leave it on, or write the loop with arachne.HeteroDDP"
            )
        self.model = HeteroDDP(self.model)

    def process_dataloader(self, dataloader: object) -> object:
        """As it is.

        Raises:
            UsageError: A HeteroLoader that was made before the process group, or whose batch is adaptive.

        """
        if isinstance(dataloader, HeteroLoader) and dataloader.is_adaptive:
            raise UsageError(
                "an adaptive batch needs `with loader.step(optimizer):` around the body of the loop, which "
                "is Lightning's here, and changes how many steps an epoch has, which Lightning counts "
                "beforehand; leave out adaptive=, or write the loop with arachne.HeteroDDP"
            )
        if isinstance(dataloader, HeteroLoader) and dataloader.link.peers.num_ranks != self.world_size:
            raise UsageError(
                f"the HeteroLoader shares out among {dataloader.link.peers.num_ranks} ranks, but there are "
                f"{self.world_size}; make it in train_dataloader(), which is called when they have met"
            )
        return super().process_dataloader(dataloader)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave the sum of gradients to a later backward."""
        with self.model.no_sync() if isinstance(self.model, HeteroDDP) else nullcontext():
            yield

    def teardown(self) -> None:
        """Unwrap the module."""
        if isinstance(self.model, HeteroDDP):
            self.model = self.lightning_module
        super().teardown()


_OF_DDP = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")

"""The callback that hasten adds to a Trainer of Lightning, called as Lightning does; no Trainer runs."""

from types import SimpleNamespace

from hasten.hosts.inside.frameworks import lightning


class FakeTrainer:
    def __init__(self):
        self.callbacks, self.callback_metrics, self.sanity_checking = [], {}, False


def test_metric_that_lightning_reduces_over_an_epoch_of_training_is_not_held_out():
    """Its first value comes after the first validation, which lies inside of the epoch."""
    fake = SimpleNamespace(Trainer=type("Trainer", (FakeTrainer,), {"__init__": FakeTrainer.__init__}), Callback=object)
    models = SimpleNamespace(begin_evaluation=lambda: None, end_evaluation=lambda now: None)
    logged = []
    loop = SimpleNamespace(models=models, monitor=None, take=lambda *_: {})
    loop.report = lambda name, value: logged.append((name, value))
    lightning.watch(fake, loop)  # pyright: ignore[reportArgumentType]
    trainer = fake.Trainer()
    (callback,) = trainer.callbacks
    for epoch in range(3):
        callback.on_validation_start(trainer, None)
        trainer.callback_metrics["val_loss"] = epoch
        callback.on_validation_end(trainer, None)
        trainer.callback_metrics["acc"] = 0.5
    assert logged == [("val_loss", 0), ("val_loss", 1), ("val_loss", 2)]

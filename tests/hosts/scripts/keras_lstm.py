"""Keras on torch: an LSTM reads made-up series, with early stopping; argument: epochs."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(1280, 64, 16)).astype("float32")
y = x[:, -8:, 0].mean(axis=1)
model = keras.Sequential([keras.layers.Input((64, 16)), keras.layers.LSTM(64), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
model.fit(
    x[:1024],
    y[:1024],
    batch_size=32,
    epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 2,
    validation_data=(x[1024:], y[1024:]),
    callbacks=[keras.callbacks.EarlyStopping("val_mae", patience=50)],
    verbose=2,
)

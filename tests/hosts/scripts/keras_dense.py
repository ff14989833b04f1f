"""Keras on torch: a dense network on made-up columns; argument: epochs."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(4096, 20)).astype("float32")
y = (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).astype("int32")
model = keras.Sequential(
    [
        keras.layers.Input((20,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
model.fit(x[:3584], y[:3584], batch_size=32, epochs=epochs, validation_data=(x[3584:], y[3584:]), verbose=2)

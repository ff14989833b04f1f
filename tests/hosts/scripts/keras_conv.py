"""Keras on torch: a small convolutional network, AdamW, a layer with a dtype of its own; argument: epochs."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
y = random.integers(0, 4, size=1024)
x = random.normal(size=(1024, 16, 16, 1)).astype("float32")
for image, label in zip(x, y, strict=True):  # each class is bright in another quarter
    image[8 * (label // 2) :, 8 * (label % 2) :] += 0.8

inputs = keras.Input((16, 16, 1))
hidden = keras.layers.Conv2D(16, 3, activation="relu")(inputs)
hidden = keras.layers.BatchNormalization()(hidden)
hidden = keras.layers.MaxPooling2D()(hidden)
hidden = keras.layers.Conv2D(32, 3, activation="relu")(hidden)
hidden = keras.layers.GlobalAveragePooling2D()(hidden)
model = keras.Model(inputs, keras.layers.Dense(4, dtype="float32")(hidden))
model.compile(
    keras.optimizers.AdamW(2e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["sparse_categorical_accuracy"],
)
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
model.fit(x, y, batch_size=32, epochs=epochs, validation_split=0.2, verbose=2)

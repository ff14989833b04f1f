"""From a trained model to small devices: ONNX, int8 behind the quality gate, and integer C code."""

"""Models in integer arithmetic for processors without floating-point units: lowering, a NumPy reference, and C99."""

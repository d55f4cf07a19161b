"""Weights of linear layers in bfloat16 or int8 under float32 activations, on the CPU."""

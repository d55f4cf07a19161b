"""What is chosen at load by measuring on the machine at hand: kernels of linear layers, and threads."""

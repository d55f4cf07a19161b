"""Steps of static shape: captured graphs, their inputs, and when to use them."""

"""Stage 1 and its product: encoder, decoder, training, probes, and the environment that shows the RL token."""

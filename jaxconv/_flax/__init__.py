"""What Flax's two APIs share: linen.py and nnx.py have a module for each."""

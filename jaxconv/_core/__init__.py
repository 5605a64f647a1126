"""What every op is made of: an op as a JAX primitive, meshes, the compiled modules, uses of JAX that is not public."""

"""The ops, one a file: kernels, rule pair, public function. `reference` has the meaning of each."""

"""Programs of plain ops that are differentiated as a whole, rewritten by rules, and cut in two."""

"""Words and floor: what every other package may import. Free of torch."""

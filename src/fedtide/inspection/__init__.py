"""Which shift a person's own data have: eight questions, each against the same data shuffled."""

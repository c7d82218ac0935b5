"""ThunderKittens: the claims, and what can be run about them."""

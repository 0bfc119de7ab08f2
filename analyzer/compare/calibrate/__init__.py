"""The model's constants as one's own recorded runs tell them."""

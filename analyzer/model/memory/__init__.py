"""How much memory each rank needs at its peak, by what it is for."""

"""What must come out as printed: formulas, counts and volumes without any fitted constant."""

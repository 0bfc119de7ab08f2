"""Communication of a step: which messages every strategy sends, and how long they take."""

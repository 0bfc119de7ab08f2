"""The model against published figures: how far off it is, on rows that nothing was fitted on."""

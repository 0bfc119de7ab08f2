"""Published figures that the model is held against: one CSV a table, each row with its source.

Nothing here is fitted. Rows on which a constant of the model was fitted are named where that
constant stands (presets/*.toml, comm/rates.py), and the validation leaves them out.
"""

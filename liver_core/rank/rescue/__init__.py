"""The rescue rung: what only leavers hold is saved first, and the next world is built after they have gone."""

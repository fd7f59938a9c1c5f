"""Replay of capacity traces under a policy, on a virtual clock: how much training it gets, for how much money, and how
far that is from what could have been had by somebody who knew everything.
"""

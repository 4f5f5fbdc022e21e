"""Doors into a run for training loops that are not ours: one thin file for each library, imported where it is used.

Each joins when the library's training begins, steps after each of its optimizer steps, stops it when the run is done,
and leaves with it. What a step does is `island.session`; none of them knows more than `island.join` offers.
"""
